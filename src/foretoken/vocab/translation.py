"""From one vocabulary to another: the tokens both have, and texts of one in ids of the other."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from foretoken.vocab.vocabulary import Vocabulary

GAP = b"\n"  # stands for a special token that the other vocabulary lacks, such as a turn's marker


@dataclass(frozen=True)
class Edge:
    """The end of a context, where the drafter's last token may be taken back, to be written again or as a longer one.

    taken: its bytes. firsts: the drafter tokens that may come there. Both are empty where nothing is taken back.
    """

    taken: bytes = b""
    firsts: frozenset[int] = frozenset()

    def closed(self, width: int) -> np.ndarray:
        """[width] bool: the drafter tokens that may not come there."""
        closed = np.ones(width, dtype=bool)
        closed[[i for i in self.firsts if i < width]] = False
        return closed


FIRM = Edge()


class Translation:
    """From ids of `source`, the target's vocabulary, to ids of `dest`, the drafter's.

    Special tokens are mapped by their role (begin and end of text) or their name, never by their bytes; one that the
    drafter lacks becomes a line break.
    """

    def __init__(self, source: Vocabulary, dest: Vocabulary) -> None:
        self.source = source
        self.dest = dest
        self.token = cache(self._token)
        self.edge = cache(self._edge)

    @cached_property
    def special(self) -> dict[int, int]:
        """Special tokens that both have: begin and end of text, and those of one name."""
        roles = ((self.source.bos, self.dest.bos), (self.source.eos, self.dest.eos))
        names = {i: self.dest.special[name] for name, i in self.source.special.items() if name in self.dest.special}
        return {s: d for s, d in roles if s is not None and d is not None} | names

    @cached_property
    def special_back(self) -> dict[int, int]:
        """{dest id: source id} of the same. Of two source tokens that share a dest token, the end of text."""
        eos_last = sorted(self.special.items(), key=lambda pair: pair[0] == self.source.eos)
        return {d: s for s, d in eos_last}

    @cached_property
    def pairs(self) -> dict[int, int]:
        """{source id: dest id} of the intersection: tokens of the same bytes, and special tokens. One to one."""
        pairs = {i: self.dest.ids[token] for token, i in self.source.ids.items() if token in self.dest.ids}
        return pairs | {s: d for d, s in self.special_back.items()}

    def _token(self, token: int) -> tuple[int, ...]:
        """Dest ids, at least one, for one source token wherever it stands."""
        if token in self.special:
            return (self.special[token],)
        if token in self.pairs:
            return (self.pairs[token],)
        for data in (self.source.spell([token]), GAP, b" "):
            if ids := self.dest.encode(data):
                return tuple(ids)
        return (next(i for i in (self.dest.eos, self.dest.bos, 0) if i is not None),)

    def _edge(self, token: int, last: int) -> Edge:
        """The edge of a text that ends with source token `token` and dest token `last`.

        A longer dest token may only come where the source's tokenizer would part the text at this edge all the same:
        after " the" not " them", if that is a source token too, since a target that writes it does not stand here.
        Costs, once for each edge, one encoding for each longer token.
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
        """Every dest token's bytes, sorted, and its id."""
        pairs = sorted((token, i) for i, token in enumerate(self.dest.tokens) if token)
        return [token for token, _ in pairs], [i for _, i in pairs]

    def text(self, ids: Sequence[int]) -> list[int]:
        """Dest ids for a stretch of text, split as the dest tokenizer splits it."""
        return [
            i for piece in self.pieces(ids) for i in ([piece] if isinstance(piece, int) else self.dest.encode(piece))
        ]

    def pieces(self, ids: Iterable[int]) -> Iterator[bytes | int]:
        """Source ids as bytes, and the dest ids of special tokens between them."""
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
        """`text`, from the first token on: the drafter's own begin-of-text comes first, and only once."""
        begun = ids[0] in self.source.prefix and bool(self.dest.prefix)
        return [*self.dest.prefix, *self.text(ids[1:] if begun else ids)]

    def opening(self, token: int) -> tuple[int, ...]:
        """Dest ids for the first token of a text: the drafter's own begin-of-text, then what the token spells."""
        if token in self.source.prefix and self.dest.prefix:
            return self.dest.prefix
        return (*self.dest.prefix, *self.token(token))
