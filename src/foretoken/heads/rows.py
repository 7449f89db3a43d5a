"""Draft heads that score token trees like a language model: the rows of one batch, and the slots of their caches.

A head reads at a token the target's state before it: (x_j, h_{j-1}). So a row's first token is never scored, and a node
below the known text takes the state that the head itself made at the node's parent. What was scored on the head's own
states is forgotten at `keep` and scored again on the target's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.heads.layer import LayerShape
from foretoken.models.cache import Plane, Planes, SlotCache, write_place
from foretoken.models.growing_tree import GrowingTree, additive_mask, causal_mask
from foretoken.models.kernel_layers import KernelSlots
from foretoken.models.parts import TargetParts
from foretoken.models.static import StaticRows

LOW = float(torch.finfo(torch.float16).min)  # what a hidden slot adds to its score, in every dtype
CHUNK = 512  # tokens per prefill forward: bounds the mask and the activations


@dataclass
class HeadRow:
    """One sequence of a batch.

    length: number of committed tokens that the row is done with; its tree's nodes follow them.
    features: the target's states of all committed tokens but the last [t, f].
    tokens: of the tree's nodes.
    """

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

    @property
    def used(self) -> int:
        """Number of slots of the head's cache that hold something of the row."""
        return self.length - 1 + len(self.tree)

    def forget_tree(self) -> None:
        self.tree.clear()
        self.tokens = []


R = TypeVar("R", bound=HeadRow)


class HeadRows(ABC, Generic[R]):
    """The calls of models.rows.Rows, and `learn`.

    slots: of the cache of the head's own layers, None where it has none.
    columns: target ids of the vocabulary that the head scores, None where that is the target's.
    """

    def __init__(
        self, target: TargetParts, batch: int, new_row: type[R], slots: "HeadSlots | None" = None,
        columns: Int[Tensor, " c"] | None = None,
    ) -> None:  # fmt: skip
        self.target, self.batch, self.slots, self.columns = target, batch, slots, columns
        self.rows: list[R] = []
        self._new_row = new_row

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

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        """Forget a row; the last row moves into its place."""
        last = len(self.rows) - 1
        if row != last and self.slots is not None:
            self.slots.cache.copy_row(last, row, self.rows[last].used)
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
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ c"]]:
        """Scores of every row's nodes from firsts[row] on."""

    def _keep_slots(self, row: int, nodes: list[int]) -> None:
        """What a cache holds of these nodes, if anything, becomes that of the committed tokens that come next."""

    def _none(self) -> Float[Tensor, "0 c"]:
        width = self.target.vocab_size if self.columns is None else len(self.columns)
        return torch.empty(0, width, device=self.target.device)


def scattered(
    own: Float[Tensor, "*n c"], columns: Int[Tensor, " c"], vocab_size: int, rest: float
) -> Float[Tensor, "*n v"]:
    """Numbers of some tokens among those of a whole vocabulary, of which all others are `rest`."""
    return own.new_full((*own.shape[:-1], vocab_size), rest).index_copy_(-1, columns, own)


def planes_of(shape: LayerShape, layers: int, target: TargetParts) -> Planes:
    """What so many layers of a head keep of every token."""
    plane = Plane(shape.kv_heads, shape.head_dim, target.dtype, target.device)
    return [(plane, plane)] * layers


class HeadSlots:
    """Where a head's next forward writes in a cache and what it sees.

    window: how far back a node sees, in positions; None: as far as the text goes.
    Masks are [b, 1, n, used] of 0 and LOW, None if all is seen.
    """

    def __init__(self, cache: SlotCache | KernelSlots | StaticRows, slots: int, window: int | None = None) -> None:
        self.cache, self.slots, self.window = cache, slots, window

    def place(self, trees: Sequence[GrowingTree], lengths: Sequence[int], firsts: Sequence[int]) -> np.ndarray | None:
        """For the newest nodes of each row's tree, from firsts[row] on, after lengths[row] committed slots."""
        counts = [len(tree) - first for tree, first in zip(trees, firsts, strict=True)]
        n, used = max(counts), max(length + len(tree) for length, tree in zip(lengths, trees, strict=True))
        starts = [length + first for length, first in zip(lengths, firsts, strict=True)]
        self.check_room(used)
        rows = slice(0, len(trees))
        self.cache.place(rows, write_place(starts, counts, self.slots), n, used)
        return additive_mask(trees, lengths, firsts, n, used, self.window)

    def place_chain(self, row: int, start: int, n: int) -> np.ndarray:
        """For n tokens of committed text from slot `start` on."""
        self.check_room(start + n)
        self.cache.place(slice(row, row + 1), start, n, start + n)
        return causal_mask(start, n, LOW, self.window)

    @staticmethod
    def seen(mask: np.ndarray | None, target: TargetParts) -> Float[Tensor, "b 1 n used"] | None:
        """A mask as torch takes it."""
        return None if mask is None else torch.from_numpy(mask).to(device=target.device, dtype=target.dtype)

    def check_room(self, used: int) -> None:
        """Raises ForetokenError where a row needs more slots than it has."""
        if used > self.slots:
            raise ForetokenError(f"A head's row needs {used} slots and has {self.slots}: open with more slots.")
