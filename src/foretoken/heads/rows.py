"""Draft heads that score token trees like a language model: the rows of one batch.

A head reads at a token the target's state before it: (x_j, h_{j-1}). So a row's first token is never scored, and a node
below the known text takes the state that the head itself made at the node's parent. What was scored on the head's own
states is forgotten at `keep` and scored again on the target's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.heads.serial import scattered
from foretoken.models.growing_tree import GrowingTree
from foretoken.models.parts import TargetParts

LOW = float(torch.finfo(torch.float16).min)  # what a hidden slot adds to its score, in every dtype


@dataclass
class HeadRow:
    """length: committed tokens that the row is done with; its tree's nodes follow them. features: the target's states
    [t, f] of all committed tokens but the last. tokens: of the tree's nodes."""

    length: int = 1
    features: Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: list[int] = field(default_factory=list)
    tree: GrowingTree = field(default_factory=lambda: GrowingTree(LOW))

    def level(self, node: int) -> int:
        """Its depth below the last committed token, which is in the tree itself; 0 for that token and those above."""
        return max(0, self.tree.depths[node] - self._root)

    def above(self, node: int) -> list[int]:
        """Nodes from the last committed token down to `node`."""
        path = [node]
        while self.tree.depths[path[-1]] > self._root:
            path.append(self.tree.parents[path[-1]])
        return path[::-1]

    @property
    def _root(self) -> int:
        """Depth in the tree of the last committed token."""
        return len(self.features) - self.length

    def forget_tree(self) -> None:
        self.tree.clear()
        self.tokens = []


R = TypeVar("R", bound=HeadRow)


class HeadRows(ABC, Generic[R]):
    """The calls of models.rows.Rows, and `learn`.

    columns: target ids of the vocabulary that the head scores, None where that is the target's.
    """

    def __init__(self, target: TargetParts, batch: int, columns: Int[Tensor, " c"] | None = None) -> None:
        self.target, self.batch, self.columns = target, batch, columns
        self.rows: list[R] = []

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def join(self) -> int:
        """A new empty row at the end; returns its index."""
        if len(self.rows) == self.batch:
            raise ForetokenError(f"All {self.batch} rows are in use: let one leave first or open more.")
        self.rows.append(self._new_row())
        return len(self.rows) - 1

    def leave(self, row: int) -> None:
        """Forget a row; the last row moves into its place."""
        last = len(self.rows) - 1
        if row != last:
            self._copy_slots(last, row)
        self.rows[row] = self.rows[last]
        self.rows.pop()

    def learn(self, features: Sequence[Float[Tensor, "_ f"]]) -> None:
        """The target's states of every row's committed tokens but the last."""
        for row, of_row in zip(self.rows, features, strict=True):
            row.features = of_row

    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ v"]]:
        """Append nodes to the trees; scores of what follows each of them, over the target's vocabulary."""
        return [self.whole(scores, float("-inf")) for scores in self.score_own(tokens, parents)]

    def whole(self, own: Float[Tensor, "m _"], rest: float) -> Float[Tensor, "m v"]:
        """Numbers of the head's vocabulary as numbers of the target's, `rest` for tokens that it does not know."""
        return own if self.columns is None else scattered(own, self.columns, self.target.vocab_size, rest)

    def score_own(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[Float[Tensor, "_ c"]]:
        """`score` over the vocabulary that the head scores."""
        firsts = [len(row.tree) for row in self.rows]
        for row, new, above in zip(self.rows, tokens, parents, strict=True):
            row.tree.grow(above)
            row.tokens += new
        return self._score(firsts)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit of each row's path what was scored on the target's states; forget the rest of the trees."""
        for at, (row, path) in enumerate(zip(self.rows, paths, strict=True)):
            row.tree.check_path(path)
            known = max(0, min(len(path), len(row.features) + 1 - row.length))
            self._keep_slots(at, list(path[:known]))
            row.length += known
            row.forget_tree()

    @abstractmethod
    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Commit tokens whose target states are known."""

    @abstractmethod
    def _new_row(self) -> R: ...

    @abstractmethod
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ c"]]:
        """Of every row's nodes from firsts[row] on."""

    @abstractmethod
    def _copy_slots(self, source: int, target: int) -> None:
        """What a cache holds of row `source` also becomes that of row `target`."""

    @abstractmethod
    def _keep_slots(self, row: int, nodes: list[int]) -> None:
        """What a cache holds of these nodes becomes that of the committed tokens that come next."""

    def _none(self) -> Float[Tensor, "0 c"]:
        width = self.target.vocab_size if self.columns is None else len(self.columns)
        return torch.empty(0, width, device=self.target.device)
