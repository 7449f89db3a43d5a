"""The way between two vocabularies through text: a context in the drafter's ids, and drafted text in the target's.

In both directions the last few tokens before the edge, where old text meets new, are encoded again together with the
new text. So a word or a character that the edge cut is split as the tokenizer would split the whole. These tokens are
the *look-behind window*. It begins at a whole character, if possible at a word; in the drafter's context it begins
after the last special token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.vocab.translation import FIRM, Edge, Translation
from foretoken.vocab.vocabulary import Vocabulary

WINDOW = 6  # tokens that are encoded again; up to twice as many so that the window begins at a word


@dataclass(eq=False)
class Followed:
    """A text that grows in the target's ids, translated into the ids of a drafter with another vocabulary.

    The text ends where one of the target's tokens ends, which may be inside a token of the drafter's. After "):" +
    "\\n", for example, a drafter that has the token "\\n    " was never trained on an indentation after "\\n" alone. So
    the drafter's last token is taken back where a longer one may come (Translation.edge), and drafts must begin with
    the bytes of that token.

    translation: from the target's vocabulary to the drafter's.
    heals: whether the drafter may write its last token again as a longer one.
    ids: the drafter's ids for the text, without a last one that is taken back.
    edge: the end of these ids, with what is taken back.
    seen: the number of target ids that were read.
    """

    translation: Translation
    heals: bool
    ids: list[int] = field(default_factory=list)
    edge: Edge = FIRM
    seen: int = 0
    _read: list[int] = field(default_factory=list)  # the drafter's ids, with a last one that is taken back
    _settled: int = 0  # how many of those cannot be changed by what follows: all up to the last special token

    def follow(self, target_ids: Sequence[int]) -> list[int]:
        """Return the drafter's ids for the text so far, without a last one that is taken back.

        The ids of two calls may differ near the earlier end only.

        target_ids: all target ids of the text, at least one; those of the last call come first.
        """
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
    """Return the index at which the look-behind window of `ids` begins.

    It is WINDOW tokens back, or up to twice as many so that the window begins at a word or after a special token.

    vocabulary: that of the ids.
    ids: the text.
    floor: the least index that may be returned.
    """
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
    """Return the ids of drafted text as they would follow a context.

    The look-behind window and the draft are encoded together, and the ids after the window are returned. Where a token
    would reach over that edge, the draft is encoded alone, since `ids` are committed. An incomplete character at the
    end of the draft is cut off.

    vocabulary: the target's.
    ids: the target's ids of the context.
    drafted: the drafted text, in UTF-8 bytes.
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
    """Return how many bytes at the end of `data` begin a UTF-8 character without finishing it."""
    for n in range(1, min(4, len(data) + 1)):
        byte = data[-n]
        if byte >= 0xC0:
            return n if n < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of ids that `one` and `other` have in common at their beginnings."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
