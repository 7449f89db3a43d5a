"""Trees that grow while they are scored, and the attention masks of their nodes.

A node sees the committed text, its ancestors and itself.

Slots of a row: [0, length) committed tokens, [length, length + len(tree)) tree nodes in the order they were scored.

    tree  A(-1) B(0) C(0) D(1), all scored at once after 2 committed slots:

            0 1 A B C D
        A   T T T . . .
        B   T T T T . .
        C   T T T . T .
        D   T T T T . T
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

from foretoken.core.errors import ForetokenError
from foretoken.models.cache import Place


def lowest(dtype: torch.dtype) -> float:
    """Return what a mask adds to the attention score of a hidden slot, for a model that computes in `dtype`.

    It is not -inf, since a padded node that sees nothing would become NaN. Masks are built in float32.
    """
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)


class GrowingTree:
    """The tree nodes of one row that were scored since its last `keep`, and what each of them sees.

    low: what a mask adds to the attention score of a hidden slot; 0 is added to that of a visible one.
    parents: per node the index of its parent, -1 where it follows the committed tokens.
    depths: per node the number of its ancestors.
    """

    def __init__(self, low: float) -> None:
        self.low = np.float32(low)
        self.clear()

    def __len__(self) -> int:
        return len(self.parents)

    def clear(self) -> None:
        """Forget all nodes."""
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._seen: list[list[int]] = []  # per node its ancestors and itself

    def grow(self, parents: Sequence[int]) -> None:
        """Append nodes.

        parents: the parent of each new node: the index of an earlier node, those of this call included, or -1.

        Raises ForetokenError where a parent is neither; then no node was appended.
        """
        for j, parent in enumerate(parents, start=len(self.parents)):
            if not -1 <= parent < j:
                raise ForetokenError(f"Node {j} of a tree has parent {parent}: parents are earlier nodes or -1.")
        for parent in parents:
            above = [] if parent < 0 else self._seen[parent]
            self._seen.append([*above, len(self.parents)])
            self.parents.append(parent)
            self.depths.append(len(above))

    def drop(self, size: int) -> None:
        """Forget all nodes but the first `size`."""
        del self.parents[size:], self.depths[size:], self._seen[size:]

    def rows(self, first: int) -> np.ndarray:
        """Return which of the tree's nodes those from index `first` on see, 0 or `low` in float32 [len - first, len].

        The result may be shared: do not write into it.
        """
        total = len(self.parents)
        if total and self.depths[-1] == total - 1:  # one path
            return _later(total, float(self.low))[first:]
        rows = np.full((total - first, total), self.low, np.float32)
        for row, seen in zip(rows, self._seen[first:], strict=True):
            row[seen] = 0.0
        return rows

    def paths(self, first: int) -> list[list[int]]:
        """Return paths that hold all nodes from index `first` on, each from its root down, the oldest nodes last."""
        inner = set(self.parents[first:])
        return [self._seen[j] for j in range(len(self) - 1, first - 1, -1) if j not in inner]

    def check_path(self, path: Sequence[int]) -> None:
        """Raise ForetokenError unless `path` is empty or a chain of nodes, the first of which has parent -1."""
        before = -1
        for node in path:
            if not 0 <= node < len(self.parents) or self.parents[node] != before:
                raise ForetokenError(f"Path {list(path)} is not a root-first chain of the {len(self)} scored nodes.")
            before = node


class NewNodes:
    """The nodes that a forward scores: in each of its rows the last ones of a tree behind the committed tokens.

    n: the most of them in a row. Other rows are padded.
    used: the number of slots that the forward reads.
    """

    def __init__(self, trees: Sequence[GrowingTree], lengths: Sequence[int], firsts: Sequence[int]) -> None:
        """Take the nodes of some rows.

        trees: per row all its nodes; those of this forward are appended already.
        lengths: per row the number of committed tokens.
        firsts: per row the index in its tree of the first node of this forward.
        """
        self._rows = list(zip(trees, lengths, firsts, strict=True))
        self.n = self.used = 0
        for tree, length, first in self._rows:
            size = len(tree)
            self.n, self.used = max(self.n, size - first), max(self.used, length + size)

    def place(self, rows: slice, slots: int) -> Place:
        """Return where the nodes are written, padding included: behind a row's nodes, or in slot `slots`.

        rows: the rows of the forward.
        slots: the number of slots of a row; the cache has one more.
        """
        starts = [length + first for _, length, first in self._rows]
        if min(starts) == max(starts) and starts[0] + self.n <= slots + 1:
            return Place(rows, starts[0], self.n, self.used)
        of_nodes = [range(length + first, length + len(tree)) for tree, length, first in self._rows]
        return Place(rows, self.padded(of_nodes, slots), self.n, self.used)

    def padded(self, numbers: Iterable[Sequence[int]], padding: int = 0) -> list[list[int]]:
        """Return a number per node [b][n]; numbers: per row those of its own; padding: the number of the others."""
        return [[*of_row, *[padding] * (self.n - len(of_row))] for of_row in numbers]

    def positions(self) -> list[list[int]]:
        """Return the position of each node [b][n]."""
        return self.padded([[length + depth for depth in tree.depths[first:]] for tree, length, first in self._rows])

    def mask(self, window: int | None) -> np.ndarray | None:
        """Return the mask of the forward, 0 or low in float32 [b, 1, n, used]; None if every node sees every slot.

        A padded node sees slot 0, since a softmax over nothing is NaN in some kernels.

        window: how many positions a node sees, its own included; None: all.
        """
        if window is not None and self.used <= window:
            window = None
        if (
            self.n == 1
            and window is None
            and all(
                len(tree) > first and length + tree.depths[-1] + 1 == self.used for tree, length, first in self._rows
            )
        ):
            return None
        mask = np.full((len(self._rows), 1, self.n, self.used), self._rows[0][0].low, np.float32)
        for rows, (tree, length, first) in zip(mask[:, 0], self._rows, strict=True):
            total = len(tree)
            count = total - first
            rows[:count, :length] = 0.0
            rows[:count, length : length + total] = tree.rows(first)
            rows[count:, 0] = 0.0
            if window is not None and count:
                depths = np.asarray(tree.depths)
                positions = np.concatenate([np.arange(length), length + depths])
                far = (length + depths[first:])[:, None] - positions[None, :] >= window
                rows[:count, : length + total][far] = tree.low
        return mask


def causal_mask(start: int, n: int, low: float, window: int | None) -> np.ndarray:
    """Return the mask of a chain of n tokens after `start` committed ones, float32 [1, 1, n, start + n].

    low: what is added to the attention score of a hidden slot; 0 is added to that of a visible one.
    window: as in `NewNodes.mask`.
    """
    mask = np.zeros((1, 1, n, start + n), np.float32)
    mask[0, 0, :, start:] = _later(n, low)
    if window is not None:
        behind = (start + np.arange(n))[:, None] - np.arange(start + n)[None, :]
        mask[0, 0, behind >= window] = low
    return mask


def _later(n: int, low: float) -> np.ndarray:
    """Return a matrix with low right of the diagonal, else 0 [n, n]. It is shared: do not write into it."""
    return _later_of_size(1 << (n - 1).bit_length(), low)[:n, :n]


@lru_cache(maxsize=16)
def _later_of_size(size: int, low: float) -> np.ndarray:
    return np.triu(np.full((size, size), low, np.float32), 1)
