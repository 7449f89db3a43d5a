"""Text as the meeting place of two vocabularies: a drafter's context in its own ids, and drafted text in the target's.

Both directions encode again a few tokens from before the edge (the look-behind window), so that a word or a character
that was cut by the edge is put together as the tokenizer would. A window begins at a whole character, if possible at a
word, and never reaches behind a special token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.vocab.translation import FIRM, Edge, Translation
from foretoken.vocab.vocabulary import Vocabulary

WINDOW = 6  # tokens encoded again; up to twice as many to begin at a word


@dataclass(eq=False)
class Followed:
    """A text that grows in the target's ids, as a drafter with another vocabulary reads it.

    The text's edge is the target's, not the drafter's: after "):" + "\\n" a drafter whose own token is "\\n    " has
    never seen an indentation follow. So its last token is taken off, where a longer one may come (Translation.edge),
    and drafts must begin with that token's bytes.

    heals: whether the drafter may write its last token again as a longer one.
    ids: the drafter's, but for a last one that is taken back.
    edge: where they end.
    seen: target ids so far.
    """

    translation: Translation
    heals: bool
    ids: list[int] = field(default_factory=list)
    edge: Edge = FIRM
    seen: int = 0
    _read: list[int] = field(default_factory=list)  # the drafter's ids, with the last one
    _settled: int = 0  # of those, the ones that what follows cannot change: up to a special token

    def follow(self, target_ids: Sequence[int]) -> list[int]:
        """The drafter's ids for the text so far, without a last token that is taken back; only their end may differ
        from the last call's."""
        dest, new = self.translation.dest, target_ids[self.seen :]
        ids = list(self._read)
        if self.seen == 0:
            ids = list(dest.prefix)
            self._settled = len(ids)
            if ids and new and new[0] in self.translation.source.prefix:
                new = new[1:]
        for piece in self.translation.pieces(new):
            if isinstance(piece, int):
                ids.append(piece)
                self._settled = len(ids)
            else:
                start = window(dest, ids, self._settled)
                ids[start:] = dest.encode(dest.spell(ids[start:]) + piece)
        self.seen = len(target_ids)
        self._read = ids or list(self.translation.token(target_ids[-1]))
        # A last token that is settled, or the only one, stays.
        heals = self.heals and len(self._read) > max(self._settled, 1) and dest.longest > 1
        self.edge = self.translation.edge(target_ids[-1], self._read[-1]) if heals else FIRM
        self.ids = self._read[:-1] if self.edge.taken else self._read
        return self.ids


def window(vocabulary: Vocabulary, ids: Sequence[int], floor: int = 0) -> int:
    """Where the look-behind window of `ids` begins: WINDOW tokens back, or up to twice as many to begin at a word."""
    tokens = vocabulary.tokens
    end = len(ids)
    whole = None
    for start in range(max(end - WINDOW, floor), max(end - 2 * WINDOW, floor) - 1, -1):
        token = tokens[ids[start]] if start < end and ids[start] < len(tokens) else b""
        if start < end and not token:  # a special token: begin after it
            return start + 1
        if not token or token[:1].isspace() or start == floor:
            return start
        if whole is None and not 0x80 <= token[0] < 0xC0:
            whole = start
    return max(end - WINDOW, floor) if whole is None else whole


def continuation(vocabulary: Vocabulary, ids: Sequence[int], drafted: bytes) -> list[int]:
    """How `vocabulary` goes on after `ids` if the text goes on with `drafted`.

    Of the window and the draft encoded together, what lies beyond the last of `ids`; where a token would reach over
    that edge, which is past recall, the draft is encoded alone. A character that the draft leaves incomplete is cut.
    """
    drafted = drafted[: len(drafted) - incomplete(drafted)]
    start = window(vocabulary, ids)
    before = vocabulary.spell(ids[start:])
    encoded = vocabulary.encode(before + drafted)
    spelled, at = 0, 0
    while spelled < len(before) and at < len(encoded):
        spelled += len(vocabulary.tokens[encoded[at]] or b"")
        at += 1
    return encoded[at:] if spelled == len(before) else vocabulary.encode(drafted)


def incomplete(data: bytes) -> int:
    """How many bytes at the end begin a UTF-8 character and do not finish it."""
    for n in range(1, min(4, len(data) + 1)):
        byte = data[-n]
        if byte >= 0xC0:
            return n if n < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
