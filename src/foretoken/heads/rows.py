"""The rows of a batch in a draft head, which score token trees as a language model's do, and the slots of their caches.

Together with a token x_j, a head reads the target's hidden state before it, h_{j-1}. So a row's first token is never
scored. A node whose parent has no target state yet takes the state that the head itself made at the parent. What was
scored on the head's own states is forgotten at `keep`, and scored again on the target's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.heads.head import Head
from foretoken.models.cache import Plane, Planes, SlotCache
from foretoken.models.growing_tree import GrowingTree, NewNodes
from foretoken.models.kernel_layers import KernelSlots
from foretoken.models.parts import LayerShape, TargetParts
from foretoken.models.static import StaticRows

LOW = float(torch.finfo(torch.float16).min)  # what a mask adds to the attention score of a hidden slot, in every dtype


@dataclass
class HeadRow:
    """The state of one sequence.

    length: number of committed tokens that the head has read, the first token included. The tree's nodes follow them.
    features: the target's hidden states of all committed tokens but the last [t, f].
    tokens: ids of the tree's nodes.
    tree: the nodes that were scored since the last `keep`; committed tokens not read before come first in it.
    states: in a serial head, the states that the head made of the tree's nodes, one [d] per node.
    parallel: in Gumiho, per node at depth 2 the logits of all levels below it [number of MLPs, v].
    read: in Hydra, DFlash and JetFlow, number of the target's states that were read into the head's cache.
    levels: in Medusa, DFlash and JetFlow, the logits of all levels below the last committed token [k, v].
    prefix: in Hydra, the prefix state of the text [d].
    """

    length: int = 1
    features: Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: list[int] = field(default_factory=list)
    tree: GrowingTree = field(default_factory=lambda: GrowingTree(LOW))
    states: list[Tensor] = field(default_factory=list)
    parallel: dict[int, Tensor] = field(default_factory=dict)
    read: int = 0
    levels: Tensor = field(default_factory=lambda: torch.empty(0))
    prefix: Tensor = field(default_factory=lambda: torch.empty(0))

    def level(self, node: int) -> int:
        """Return the depth of `node` below the last committed token, which is in the tree itself.

        node: index of the node in the row's tree. For the last committed token and those above it the result is 0.
        """
        return max(0, self.tree.depths[node] - self._root)

    def above(self, node: int) -> list[int]:
        """Return the indices of the nodes from the last committed token down to `node`, both included."""
        path = [node]
        while self.tree.depths[path[-1]] > self._root:
            path.append(self.tree.parents[path[-1]])
        return path[::-1]

    @property
    def _root(self) -> int:
        """The depth in the tree of the last committed token."""
        return len(self.features) - self.length

    @property
    def used(self) -> int:
        """The number of slots of the head's cache that may hold something of the row."""
        return max(self.length - 1 + len(self.tree), self.read)


class HeadRows(ABC):
    """The rows of a head, with the methods of models.rows.Rows that drafting needs, and `learn`.

    rows: the rows in use, one per sequence.
    cache: keys and values of the head's layers; None where it has no layers.
    columns: ids of the target's tokens that the head scores [c], in the order of its scores; None: all, in order.

    Masks are 0 for a slot that a node sees and LOW for others [b, 1, n, used]; None if every node sees every slot.
    """

    def __init__(self, head: Head, batch: int, slots: int, cache: SlotCache | KernelSlots | StaticRows | None) -> None:
        """Make rows, none of which is in use.

        head: the head that drafts.
        batch: the largest number of rows.
        slots: the number of slots of each row of the cache.
        cache: as in the class's docstring.
        """
        self.head: Any = head
        self.target, self.columns = head.target, head.columns
        self.batch, self.slots, self.cache = batch, slots, cache
        self.rows: list[HeadRow] = []

    @property
    def lengths(self) -> list[int]:
        """Per row the number of committed tokens that the head has read, the first token included."""
        return [row.length for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def join(self) -> int:
        """Add an empty row at the end and return its index. Raises ForetokenError where all are in use."""
        if len(self.rows) == self.batch:
            raise ForetokenError(f"All {self.batch} rows are in use: let one leave first or open more.")
        self.rows.append(HeadRow())
        return len(self.rows) - 1

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        """Forget the row with index `row`; the last row moves into its place."""
        last = len(self.rows) - 1
        if row != last and self.cache is not None:
            self.cache.copy_row(last, row, self.rows[last].used)
        self.rows[row] = self.rows[last]
        self.rows.pop()

    def learn(self, features: Sequence[Float[Tensor, "_ f"]]) -> None:
        """Take the target's hidden states; features: per row those of its committed tokens but the last [t, f]."""
        for row, of_row in zip(self.rows, features, strict=True):
            row.features = of_row

    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ v"]]:
        """Append nodes to the trees, and return the logits of the token after each, per row [new nodes, v].

        tokens: per row the ids of the new nodes, which may be none.
        parents: per row the parent of each new node: the index of an earlier node of the row's tree, those of this call
            included, or -1 where the node follows the committed tokens that the row has read.

        The logits are over the target's vocabulary, -inf for tokens that the head cannot draft. After committed tokens
        before the last one, from which nothing is drafted, some heads return zeros instead.
        """
        return [self.whole(scores, float("-inf")) for scores in self.score_own(tokens, parents)]

    def whole(self, own: Float[Tensor, "m _"], rest: float) -> Float[Tensor, "m v"]:
        """Return numbers per token of the head's vocabulary as numbers per token of the target's [m, v].

        own: the numbers, in the order of `columns` [m, c].
        rest: the number of each token that the head's vocabulary lacks.
        """
        if self.columns is None:
            return own
        return own.new_full((len(own), self.target.vocab_size), rest).index_copy_(-1, self.columns, own)

    def score_own(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[Float[Tensor, "_ c"]]:
        """Do as `score`, and return logits over the head's own vocabulary, per row [new nodes, c].

        tokens, parents: as in `score`. The order of the columns is that of `columns`.
        """
        firsts = [len(row.tree) for row in self.rows]
        for row, new, above in zip(self.rows, tokens, parents, strict=True):
            row.tree.grow(above)
            row.tokens += new
        return self._score(firsts)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit the part of each row's path that was scored on the target's states; forget the rest of the trees.

        paths: per row the indices of a chain of nodes that follows the committed tokens, the first one first.

        Raises ForetokenError where a path is not such a chain.
        """
        for at, (row, path) in enumerate(zip(self.rows, paths, strict=True)):
            row.tree.check_path(path)
            known = max(0, min(len(path), len(row.features) + 1 - row.length))
            self._keep_slots(at, list(path[:known]))
            row.length += known
            row.tree.clear()
            row.tokens, row.states, row.parallel = [], [], {}

    @abstractmethod
    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Read and commit tokens, without computing logits.

        row: the index of the row, whose tree is empty.
        tokens: ids that follow its committed tokens; the target's state before each of them is known.
        """

    @abstractmethod
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ c"]]:
        """Return the logits after every row's nodes, from index firsts[row] of its tree on [new nodes, c]."""

    @abstractmethod
    def _keep_slots(self, row: int, nodes: list[int]) -> None:
        """Move what the cache keeps of these nodes, if anything, to the slots after the row's committed tokens."""

    def _none(self) -> Float[Tensor, "0 c"]:
        """Return the logits of a row without new nodes."""
        width = self.target.vocab_size if self.columns is None else len(self.columns)
        return torch.empty(0, width, device=self.target.device)

    def _placed(self, new: NewNodes) -> np.ndarray | None:
        """Set the slots of the next forward, that of the `new` nodes of all rows, and return its mask."""
        assert self.cache is not None
        self._check_room(new.used)
        self.cache.place(new.place(slice(0, len(self.rows)), self.slots))
        return new.mask(self.head.window)

    def _seen(self, mask: np.ndarray | None) -> Float[Tensor, "b 1 n used"] | None:
        """Return `mask` as a tensor on the device and in the dtype of the target, None for None."""
        return None if mask is None else torch.from_numpy(mask).to(device=self.target.device, dtype=self.target.dtype)

    def _check_room(self, used: int) -> None:
        if used > self.slots:
            raise ForetokenError(f"A head's row needs {used} slots and has {self.slots}: open with more slots.")


def planes_of(shape: LayerShape, layers: int, target: TargetParts) -> Planes:
    """Return the shapes of the keys and values that the layers of a head keep per token.

    shape: the sizes of each layer.
    layers: the number of layers.
    target: what the head borrows of its target, whose dtype and device they have.
    """
    plane = Plane(shape.kv_heads, shape.head_dim, target.dtype, target.device)
    return [(plane, plane)] * layers
