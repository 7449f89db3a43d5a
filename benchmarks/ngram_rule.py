"""The prompt lookup before the one of the package: a baseline of `python -m benchmarks repetitive`.

What followed the last occurrences of the longest known n-gram of 4 tokens or fewer is proposed again, always as far as
the tree goes.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foretoken.core.interfaces import Path
from foretoken.core.laws import Law, Opaque
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree, opaque_tree

LONGEST = 4  # n-grams of this length down to 1 are indexed
REMEMBERED = 8  # latest occurrences kept for each n-gram


@dataclass(frozen=True)
class NgramRule:
    """A drafter of chains. depth: of each."""

    depth: int
    name: str = "n-gram rule"

    @property
    def laws(self) -> tuple[Law, ...]:
        return (Opaque(1),)

    @property
    def max_nodes(self) -> int:
        return 1 + self.depth

    def open(self, batch: int, slots: int) -> "NgramSession":
        return NgramSession(self.depth)


@dataclass
class Index:
    """For every n-gram of one text, the positions that followed its latest occurrences, oldest first."""

    length: int = 0
    positions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def update(self, ids: list[int]) -> None:
        """Index what was added; the n-grams that end the text are left out, since nothing follows them yet."""
        for end in range(max(self.length, 1), len(ids)):
            for n in range(1, min(LONGEST, end) + 1):
                followers = self.positions.setdefault(tuple(ids[end - n : end]), [])
                followers.append(end)
                del followers[:-REMEMBERED]
        self.length = len(ids)

    def draft(self, ids: list[int], depth: int) -> list[int]:
        """What followed the latest occurrence of the longest known suffix; where it ends, an earlier one goes on."""
        for n in range(min(LONGEST, len(ids) - 1), 0, -1):
            if places := self.positions.get(tuple(ids[-n:])):
                return self._followers(ids, places[::-1], depth)
        return []

    def _followers(self, ids: list[int], places: list[int], depth: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < depth and (places := [place for place in places if place < len(ids)]):
            drafted.append(ids[places[0]])
            places = [place + 1 for place in places if ids[place] == drafted[-1]]
        return drafted


class NgramSession:
    def __init__(self, depth: int) -> None:
        self._depth, self._indexes = depth, list[Index]()

    def join(self) -> None:
        self._indexes.append(Index())

    def leave(self, row: int) -> None:
        self._indexes[row] = self._indexes[-1]
        self._indexes.pop()

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        return [self._tree(seq, index) for seq, index in zip(sequences, self._indexes, strict=True)]

    def _tree(self, seq: Sequence, index: Index) -> TokenTree:
        index.update(seq.ids)
        tokens = [seq.ids[-1], *index.draft(seq.ids, min(self._depth, max(seq.depth_left, 0)))]
        return opaque_tree(tokens, range(-1, len(tokens) - 1))

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        """Nothing to do: the index reads the committed ids at the next step."""
