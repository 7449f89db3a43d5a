"""The translation between two vocabularies: the tokens that both have, and texts of one in the ids of the other."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from foretoken.vocab.vocabulary import Vocabulary

GAP = b"\n"  # stands for a special token that the other vocabulary lacks, such as a turn's marker


@dataclass(frozen=True)
class Edge:
    """The end of a drafter's context. Its last token may be taken back, to be drafted again or as a longer token.

    taken: the bytes of the token that is taken back; empty where none is.
    firsts: the drafter ids that may be drafted in its place; empty where none is taken back.
    """

    taken: bytes = b""
    firsts: frozenset[int] = frozenset()

    def closed(self, width: int) -> np.ndarray:
        """Return which drafter tokens may not be drafted first [width], bool.

        width: the number of columns of the drafter's logits.
        """
        closed = np.full(width, bool(self.taken))
        closed[[i for i in self.firsts if i < width]] = False
        return closed


FIRM = Edge()  # where nothing is taken back


class Translation:
    """Translates ids of the target's vocabulary into ids of the drafter's.

    Special tokens are mapped by their role (begin and end of text) or their name, never by their bytes; one that the
    drafter lacks becomes a line break.

    source: the target's vocabulary.
    dest: the drafter's vocabulary.
    token: token(id) are the dest ids, at least one, for one source id wherever it stands.
    edge: edge(id, last) is the Edge of a text that ends with source id `id` and dest id `last`.
    """

    def __init__(self, source: Vocabulary, dest: Vocabulary) -> None:
        self.source = source
        self.dest = dest
        self.token = cache(self._token)
        self.edge = cache(self._edge)

    @cached_property
    def special(self) -> dict[int, int]:
        """{source id: dest id} of the special tokens that both have: begin and end of text, and those of equal name."""
        roles = ((self.source.bos, self.dest.bos), (self.source.eos, self.dest.eos))
        names = {i: self.dest.special[name] for name, i in self.source.special.items() if name in self.dest.special}
        return {s: d for s, d in roles if s is not None and d is not None} | names

    @cached_property
    def special_back(self) -> dict[int, int]:
        """{dest id: source id} of `special`. Where source tokens share a dest token, the end of text is preferred."""
        eos_last = sorted(self.special.items(), key=lambda pair: pair[0] == self.source.eos)
        return {d: s for s, d in eos_last}

    @cached_property
    def pairs(self) -> dict[int, int]:
        """{source id: dest id} of the intersection: tokens of equal bytes, and special tokens. It is one to one."""
        pairs = {i: self.dest.ids[token] for token, i in self.source.ids.items() if token in self.dest.ids}
        return pairs | {s: d for d, s in self.special_back.items()}

    def _token(self, token: int) -> tuple[int, ...]:
        """Return dest ids, at least one, for one source token. One that the drafter cannot spell is a line break."""
        if token in self.special:
            return (self.special[token],)
        if token in self.pairs:
            return (self.pairs[token],)
        for data in (self.source.spell([token]), GAP, b" "):
            if ids := self.dest.encode(data):
                return tuple(ids)
        return (next(i for i in (self.dest.eos, self.dest.bos, 0) if i is not None),)

    def _edge(self, token: int, last: int) -> Edge:
        """Return the edge of a text that ends with source token `token` and dest token `last`.

        A longer dest token is allowed only if the source's tokenizer, given the longer text, still ends a token at this
        edge. After " the", for example, " them" is not allowed if it is a source token too: a target that meant " them"
        would have written that token instead. The cost is one encoding per longer dest token, once per edge.
        """
        keys, ids = self._sorted
        taken = self.dest.spell([last])
        low = bisect_left(keys, taken)
        high = bisect_left(keys, True, low, key=lambda key: not key.startswith(taken))
        same = bisect_right(keys, taken, low, high)
        before = self.source.spell([token])
        longer = [i for i in range(same, high) if self.source.encode(before + keys[i][len(taken) :])[:1] == [token]]
        return Edge(taken, frozenset(ids[i] for i in (*range(low, same), *longer))) if taken and longer else FIRM

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        """The bytes of all dest tokens, sorted, and their ids in the same order."""
        pairs = sorted((token, i) for i, token in enumerate(self.dest.tokens) if token)
        return [token for token, _ in pairs], [i for _, i in pairs]

    def text(self, ids: Sequence[int]) -> list[int]:
        """Return dest ids for a stretch of text, split as the dest tokenizer splits it; ids: its source ids."""
        return [
            i for piece in self.pieces(ids) for i in ([piece] if isinstance(piece, int) else self.dest.encode(piece))
        ]

    def pieces(self, ids: Iterable[int]) -> Iterator[bytes | int]:
        """Yield the text of source `ids` as bytes, with the dest ids of special tokens between them."""
        data = b""
        for token in ids:
            spelled = self.source.spell([token])
            data += spelled
            if not spelled:
                for i in self.token(token):
                    if self.dest.spell([i]):  # a line break for a token that the drafter lacks
                        data += self.dest.spell([i])
                        continue
                    if data:
                        yield data
                    data = b""
                    yield i
        if data:
            yield data

    def beginning(self, ids: Sequence[int]) -> list[int]:
        """Return dest ids for a text from its first token on: the drafter's begin-of-text, if it has one, comes first.

        ids: the source ids of the beginning, at least one.
        """
        begun = ids[0] in self.source.prefix and bool(self.dest.prefix)
        return [*self.dest.prefix, *self.text(ids[1:] if begun else ids)]

    def opening(self, token: int) -> tuple[int, ...]:
        """Return dest ids for the first `token` of a text: the drafter's begin-of-text, then what the token spells."""
        if token in self.source.prefix and self.dest.prefix:
            return self.dest.prefix
        return (*self.dest.prefix, *self.token(token))
