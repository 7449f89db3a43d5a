"""The rows of one model: committed text and token tree of each sequence, scored over one slot cache."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.interfaces import Saved
from foretoken.core.shapes import Float
from foretoken.models.cache import Place
from foretoken.models.features import FeatureStore
from foretoken.models.growing_tree import GrowingTree, NewNodes, causal_mask, lowest
from foretoken.models.llama_kernel import KernelRows
from foretoken.models.modules import ModuleSlots
from foretoken.models.static import StaticRows

if TYPE_CHECKING:
    from foretoken.models.causal_lm import CausalLM

CHUNK = 512  # tokens per prefill forward: bounds the mask and the activations
# The same in our kernel. It reads prompts of SmolLM2 and Qwen2.5-Coder-1.5B 2 to 6% faster than by 512, and so by 64 to
# 256: what it reads of many rows, for each panel anew, does not stay in the second cache (docs/LOG.md, 2026-11-30).
KERNEL_CHUNK = 192


class Rows:
    """Up to `batch` sequences of one model in a common slot cache; rows 0..len-1 are in use.

    A row has committed tokens, and behind them the nodes of its tree: those that were scored since its last `keep`.
    Logits are inference tensors: work on them out of place (or inside torch.inference_mode).
    """

    lengths: list[int]  # the number of committed tokens of each row in use, one slot each

    @torch.inference_mode()
    def __init__(
        self,
        lm: "CausalLM",
        batch: int,
        slots: int,
        layers: tuple[int, ...] = (),
        cache: ModuleSlots | KernelRows | None = None,
    ) -> None:
        """Open rows of the model `lm`; batch, slots, layers: as in `CausalLM.open`; cache: the one to use, if any."""
        self._lm = lm
        self._batch, self._slots = batch, slots
        self.cache: ModuleSlots | StaticRows | KernelRows = cache or lm.backend.open(batch, slots)
        self._low = lowest(lm.dtype)
        self._windows = lm._layout.windows
        width = len(layers) * lm.hidden_size
        self._features = FeatureStore(layers, batch, slots, width, lm.dtype, lm.device) if layers else None
        self._kept = (self.cache,) if self._features is None else (self.cache, self._features)
        self._trees: list[GrowingTree] = []
        self.lengths = []
        lm.opened(self)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def vocab_size(self) -> int:
        return self._lm.vocab_size

    def join(self) -> int:
        """Add an empty row at the end and return its index."""
        if len(self.lengths) == self._batch:
            raise ForetokenError(f"All {self._batch} rows are in use: let one leave first or open more.")
        self.lengths.append(0)
        self._trees.append(GrowingTree(self._low))
        return len(self.lengths) - 1

    def leave(self, row: int) -> None:
        """Forget the row with index `row`; the last row moves into its place."""
        self._check_row(row)
        last = len(self.lengths) - 1
        if row != last:
            used = self.lengths[last] + len(self._trees[last])
            for kept in self._kept:
                kept.copy_row(last, row, used)
            self.lengths[row], self._trees[row] = self.lengths[last], self._trees[last]
        self.lengths.pop()
        self._trees.pop()

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Read tokens and commit them, without computing logits (prefill).

        row: the index of the row, whose tree must be empty.
        tokens: ids that follow its committed tokens.
        """
        self._check_row(row)
        if len(self._trees[row]):
            raise ForetokenError(f"Row {row} has {len(self._trees[row])} scored nodes: keep a path before extending.")
        self._check_room(row, len(tokens))
        if tokens:
            self._lm.check_position(self.lengths[row] + len(tokens) - 1)
        most = KERNEL_CHUNK if isinstance(self.cache, KernelRows) else CHUNK
        for i in range(0, len(tokens), most):
            self._commit(row, tokens[i : i + most])

    def _commit(self, row: int, tokens: Sequence[int]) -> None:
        """Read tokens that follow the committed ones of the row with index `row`, by one forward, and commit them."""
        start, n = self.lengths[row], len(tokens)
        self.cache.place(Place(slice(row, row + 1), start, n, start + n))
        masks = {kind: causal_mask(start, n, self._low, window) for kind, window in self._windows.items()}
        self._forward([list(tokens)], [list(range(start, start + n))], masks, head=False)
        self.lengths[row] += n

    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "n v"]]:
        """Append nodes to the tree of every row, in one forward, and return their logits, per row [n, v].

        A node sees the committed tokens of its row, its ancestors and itself. Its position is the row's length plus
        the node's depth.

        tokens: per row the ids of the new nodes, which may be none.
        parents: per row the parent of each new node: the index of an earlier node of the row's tree, nodes of this call
            included, or -1 where the node follows the committed tokens.

        Raises ForetokenError where a row's slots do not suffice or a parent is not an earlier node.
        """
        counts = self._counts(tokens, parents)
        active = [r for r, count in enumerate(counts) if count]
        if not active:
            return [torch.empty(0, self._lm.vocab_size, dtype=self._lm.dtype, device=self._lm.device) for _ in counts]
        low, high = active[0], active[-1] + 1
        firsts = [len(tree) for tree in self._trees]
        try:
            for r in active:
                self._check_room(r, counts[r])
                self._trees[r].grow(parents[r])
                self._lm.check_position(self.lengths[r] + max(self._trees[r].depths[firsts[r] :]))
            logits = self._score(slice(low, high), tokens, firsts)
        except BaseException:  # the nodes were not scored, so they are not in the tree
            for r in active:
                self._trees[r].drop(firsts[r])
            raise
        if min(counts) == max(counts):
            return list(logits.unbind())  # one call; to slice row by row takes longer
        none = logits[0, :0]
        return [logits[r - low, : counts[r]] if counts[r] else none for r in range(len(counts))]

    def _score(self, rows: slice, tokens: Sequence[Sequence[int]], firsts: list[int]) -> Float[Tensor, "b n v"]:
        """Score the new nodes of the rows in `rows`; tokens, firsts: of every row, their ids and the first's index."""
        new = NewNodes(self._trees[rows], self.lengths[rows], firsts[rows])
        self.cache.place(new.place(rows, self._slots))
        return self._forward(new.padded(tokens[rows]), new.positions(), self._masks(new), head=True)

    def _masks(self, new: NewNodes) -> dict[str, np.ndarray | None]:
        return {kind: new.mask(window) for kind, window in self._windows.items()}

    def _forward(
        self, ids: list[list[int]], positions: list[list[int]], masks: Mapping[str, np.ndarray | None], head: bool
    ) -> Tensor:
        """Return the logits [b, n, v]; where `head` is False the result has no meaning."""
        return self.cache(ids, positions, masks, head, self._features)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one path of each row's tree and forget the rest of the tree.

        paths: per row the indices of the nodes of a chain that follows the committed tokens, the first one first; it
            may be empty.

        Raises ForetokenError where a path is not such a chain, or there is not one path per row.
        """
        if len(paths) != len(self.lengths):
            raise ForetokenError(f"Got {len(paths)} paths for {len(self.lengths)} rows: give one per row.")
        for tree, path in zip(self._trees, paths, strict=True):
            tree.check_path(path)
        for row, path in enumerate(paths):
            start = self.lengths[row]
            placed = 0  # nodes that stand in their place already
            while placed < len(path) and path[placed] == placed:
                placed += 1
            if placed < len(path):
                # node i stands in slot start + i and goes to slot start + (its place in the path)
                nodes = [node - placed for node in path[placed:]]
                for kept in self._kept:
                    kept.move(row, start + placed, nodes)
            self.lengths[row] += len(path)
            self._trees[row].clear()

    def features(self, row: int) -> Float[Tensor, "t f"]:
        """Return the hidden states of the committed tokens of `row` [t, f], as a view.

        Those of all layers stand side by side, in the order in which `CausalLM.open` was given the layers.
        """
        self._check_row(row)
        if self._features is None:
            raise ForetokenError("These rows keep no hidden states: open them with the layers that are wanted.")
        return self._features.of_row(row, self.lengths[row])

    def cut(self, row: int, length: int) -> None:
        """Forget the committed tokens of `row` from number `length` on; its tree must be empty."""
        self._check_row(row)
        if len(self._trees[row]) or not 0 <= length <= self.lengths[row]:
            raise ForetokenError(
                f"Row {row} has {self.lengths[row]} tokens and {len(self._trees[row])} scored nodes: keep a path, then "
                "cut at most what is there."
            )
        self.lengths[row] = length

    def save(self, row: int, start: int, end: int) -> Saved | None:
        """Return a copy of what is kept of some committed tokens, hidden states included.

        row: the index of the row.
        start, end: the tokens are those from number `start` up to `end`, which is excluded.

        Returns None where the row has fewer than `end` tokens.
        """
        self._check_row(row)
        if not 0 <= start <= end <= self.lengths[row]:
            return None
        return Saved(start, end, tuple(part for kept in self._kept for part in kept.read(row, start, end)))

    @torch.inference_mode()
    def restore(self, row: int, saved: Saved) -> None:
        """Commit tokens without a forward, by what `save` returned for the same text.

        row: the index of the row, which has exactly `saved.start` committed tokens and an empty tree.
        saved: from `save` of rows of the same model with the same layers.
        """
        self._check_row(row)
        if len(self._trees[row]) or self.lengths[row] != saved.start:
            raise ForetokenError(
                f"Row {row} has {self.lengths[row]} tokens and {len(self._trees[row])} scored nodes: restore what "
                "follows the tokens that are there."
            )
        self._check_room(row, saved.end - saved.start)
        parts = list(saved.parts)
        if self._features is not None:
            self._features.write(row, saved.start, saved.end, [parts.pop()])
        self.cache.write(row, saved.start, saved.end, parts)
        self.lengths[row] = saved.end

    def _counts(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[int]:
        if len(tokens) != len(self.lengths) or len(parents) != len(self.lengths):
            raise ForetokenError(
                f"Got nodes of {len(tokens)} and parents of {len(parents)} rows where {len(self.lengths)} are in use."
            )
        counts = [len(t) for t in tokens]
        if counts != [len(p) for p in parents]:
            raise ForetokenError("Every scored node needs one parent: tokens and parents differ in length.")
        return counts

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self.lengths):
            raise ForetokenError(f"There is no row {row}: {len(self.lengths)} rows are in use.")

    def _check_room(self, row: int, n: int) -> None:
        taken = self.lengths[row] + len(self._trees[row])
        if taken + n > self._slots:
            raise ForetokenError(
                f"Row {row} has {self._slots} slots, {taken} of them taken, so that {n} more tokens do not fit: "
                "open with more slots."
            )
