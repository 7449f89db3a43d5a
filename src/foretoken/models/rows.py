"""The rows of one model: committed text and token tree of each sequence, scored over one slot cache."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError, NotFiniteError
from foretoken.core.shapes import Float
from foretoken.core.truncated import Truncation
from foretoken.kernel.sizes import ALL
from foretoken.models.cache import SlotCache
from foretoken.models.features import FeatureStore, from_hidden_states
from foretoken.models.growing_tree import GrowingTree, additive_mask, causal_mask
from foretoken.models.llama_kernel import KernelRows
from foretoken.models.recorder import FORWARD, SCORING, Recorder, recorded
from foretoken.models.static import StaticRows

if TYPE_CHECKING:
    from foretoken.models.causal_lm import CausalLM

CHUNK = 512  # tokens per prefill forward: bounds the mask and the activations


class Rows:
    """The slot cache of up to `batch` sequences of one model; rows 0..len-1 are in use.

    Logits are inference tensors: work on them out of place (or inside torch.inference_mode).
    """

    lengths: list[int]  # committed slots of each row in use
    _kernel: KernelRows | StaticRows | None = None  # also of rows that are something else beneath
    recorder: Recorder | None = None

    @torch.inference_mode()
    def __init__(self, lm: "CausalLM", batch: int, slots: int, layers: tuple[int, ...] = ()) -> None:
        self._lm = lm
        self.recorder = lm.recorder
        self._batch, self._slots = batch, slots
        self._kernel = None if lm.kernel is None else lm.kernel.open(batch, slots)
        self._cache = SlotCache(lm._layout.planes, batch, slots) if self._kernel is None else self._kernel
        # finfo.min rather than -inf: a padded node that saw nothing would be NaN. Masks are built in float32.
        self._low = max(torch.finfo(lm.dtype).min, torch.finfo(torch.float32).min)
        self._windows = lm._layout.windows
        width = len(layers) * lm.hidden_size if layers else 0
        self._features = FeatureStore(layers, batch, slots, width, lm.dtype, lm.device) if layers else None
        self._trees: list[GrowingTree] = []
        self.lengths = []

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def vocab_size(self) -> int:
        return self._lm.vocab_size

    def join(self) -> int:
        """A new empty row at the end; returns its index."""
        if len(self.lengths) == self._batch:
            raise ForetokenError(f"All {self._batch} rows are in use: let one leave first or open more.")
        self.lengths.append(0)
        self._trees.append(GrowingTree(self._low))
        return len(self.lengths) - 1

    def leave(self, row: int) -> None:
        """Forget a row; the last row moves into its place."""
        self._check_row(row)
        last = len(self.lengths) - 1
        if row != last:
            used = self.lengths[last] + len(self._trees[last])
            self._cache.copy_row(last, row, used)
            if self._features is not None:
                self._features.copy_row(last, row, used)
            self.lengths[row], self._trees[row] = self.lengths[last], self._trees[last]
        self.lengths.pop()
        self._trees.pop()

    @recorded(SCORING)
    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Prefill: commit `tokens` to a row whose tree is empty, without computing logits."""
        self._check_row(row)
        if len(self._trees[row]):
            raise ForetokenError(f"Row {row} has {len(self._trees[row])} scored nodes: keep a path before extending.")
        self._check_room(row, len(tokens))
        if tokens:
            self._lm.check_position(self.lengths[row] + len(tokens) - 1)
        for i in range(0, len(tokens), CHUNK):
            chunk = tokens[i : i + CHUNK]
            start, n = self.lengths[row], len(chunk)
            self._aim(slice(row, row + 1), start, n, start + n)
            masks = {kind: causal_mask(start, n, self._low, window) for kind, window in self._windows.items()}
            self._forward([list(chunk)], [list(range(start, start + n))], masks, head=False)
            self.lengths[row] += n

    @recorded(SCORING)
    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "n v"]]:
        """Append nodes to the tree of every row and return their logits, in one forward.

        tokens[r], parents[r]: row r's new nodes; a parent is an index into row r's tree (the nodes scored since its
        last keep, those of this call included) or -1: the node follows the committed text. A node sees its row's
        committed slots, its ancestors and itself; its position is length + depth. Rows may bring none.
        Raises ForetokenError when a row's slots do not suffice or a parent is not an earlier node.
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
            logits = self._score(slice(low, high), tokens, counts, firsts)
        except BaseException:  # the nodes were not scored, so they are not in the tree
            for r in active:
                self._trees[r].drop(firsts[r])
            raise
        if min(counts) == max(counts):
            return list(logits.unbind())  # a slice takes as long as sixty products of a row
        none = logits[0, :0]
        return [logits[r - low, : counts[r]] if counts[r] else none for r in range(len(counts))]

    def _score(
        self, rows: slice, tokens: Sequence[Sequence[int]], counts: list[int], firsts: list[int]
    ) -> Float[Tensor, "b n v"]:
        trees, lengths, firsts, counts = self._trees[rows], self.lengths[rows], firsts[rows], counts[rows]
        n = max(counts)
        used = max(length + len(tree) for length, tree in zip(lengths, trees, strict=True))
        starts = [length + first for length, first in zip(lengths, firsts, strict=True)]
        ids = [[*t, *[0] * (n - len(t))] for t in tokens[rows]]
        positions = [
            [*(length + depth for depth in tree.depths[first:]), *[0] * (n - count)]
            for tree, length, first, count in zip(trees, lengths, firsts, counts, strict=True)
        ]
        if min(starts) == max(starts) and starts[0] + n <= self._slots + 1:
            self._aim(rows, starts[0], n, used)
        else:
            slots = [
                [*range(start, start + count), *[self._slots] * (n - count)]
                for start, count in zip(starts, counts, strict=True)
            ]
            self._aim(rows, slots, n, used)
        return self._forward(ids, positions, self._masks(trees, lengths, firsts, n, used), head=True)

    def _masks(
        self, trees: Sequence[GrowingTree], lengths: Sequence[int], firsts: Sequence[int], n: int, used: int
    ) -> dict[str, np.ndarray | None]:
        return {kind: additive_mask(trees, lengths, firsts, n, used, window) for kind, window in self._windows.items()}

    def _aim(self, rows: slice, start: int | list[list[int]], n: int, used: int) -> None:
        self._cache.aim(rows, start, n, used)
        if self._features is not None:
            self._features.aim(rows, start, n)

    @recorded(FORWARD)
    def _forward(
        self,
        ids: list[list[int]],
        positions: list[list[int]],
        masks: Mapping[str, np.ndarray | None],
        head: bool,
    ) -> Tensor:
        """Logits [b, n, v]; of no meaning where head is False."""
        if self._kernel is not None:
            return self._kernel(ids, positions, masks, head, self._features)
        return self._torch_forward(ids, positions, masks, head)

    @torch.inference_mode()
    def _torch_forward(
        self, ids: list[list[int]], positions: list[list[int]], masks: Mapping[str, np.ndarray | None], head: bool
    ) -> Tensor:
        lm = self._lm
        assert isinstance(self._cache, SlotCache)
        device, dtype = lm.device, lm.dtype
        tensors = {
            kind: None if mask is None else torch.from_numpy(mask).to(device=device, dtype=dtype)
            for kind, mask in masks.items()
        }
        # A model whose layers are all of one type takes (and some only take) the mask itself.
        mask = tensors if len(tensors) > 1 else next(iter(tensors.values()))
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(ids, device=device),
            "position_ids": torch.tensor(positions, device=device),
            "attention_mask": mask,
            "past_key_values": self._cache,
            "use_cache": True,
        }
        model = lm.model if head or lm._decoder is None else lm._decoder
        if self._features is None:
            return model(**inputs)[0]
        out = model(**inputs, output_hidden_states=True)
        from_hidden_states(out.hidden_states, self._features)
        return out[0]

    @recorded(SCORING)
    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one root-first chain of tree nodes per row (maybe empty) and forget the rest of every tree."""
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
                self._cache.move(row, start + placed, nodes)
                if self._features is not None:
                    self._features.move(row, start + placed, nodes)
            self.lengths[row] += len(path)
            self._trees[row].clear()

    def features(self, row: int) -> Float[Tensor, "t f"]:
        """The hidden states of a row's committed tokens, layer beside layer in the order asked for; a view."""
        self._check_row(row)
        if self._features is None:
            raise ForetokenError("These rows keep no hidden states: open them with the layers that are wanted.")
        return self._features.read(row, self.lengths[row])

    def cut(self, row: int, length: int) -> None:
        """Forget the committed tokens of a row from `length` on; its tree must be empty."""
        self._check_row(row)
        if len(self._trees[row]) or not 0 <= length <= self.lengths[row]:
            raise ForetokenError(
                f"Row {row} has {self.lengths[row]} tokens and {len(self._trees[row])} scored nodes: keep a path, then "
                "cut at most what is there."
            )
        self.lengths[row] = length

    def drafts_chains(self, row: int, nodes: int) -> bool:
        """Whether `draft_chain` can be called where it scores so many nodes."""
        if not self.scores_trees or self._features is not None:
            return False
        used = self.lengths[row] + nodes
        return all(window is None or used <= window for window in self._windows.values())

    @recorded(SCORING)
    @recorded(FORWARD)
    def draft_chain(
        self, row: int, tokens: Sequence[int], u: Float[Tensor, "n 1"], temperature: float, floor: float = 0.0,
        truncation: Truncation = ALL,
    ) -> tuple[list[int], Float[Tensor, "_ v"]]:  # fmt: skip
        """Read `tokens` after a row's committed text; draw the next from softmax(logits / temperature), truncated if
        that is asked for, by u[0]; read that, and so on: (tokens drawn, q of each). What was read are scored nodes of
        the row, whose tree was empty. At temperature 0 the likeliest are taken, and q has no rows. It ends where the
        product of q down to a draft, of the untempered q at temperature 0, is below `floor`.

        One compiled call; tokens and q are those of `score`, `softmax` and `draw_iid`. NotFiniteError where logits
        have NaN or +inf, or nothing finite.
        """
        assert isinstance(self._kernel, KernelRows)
        start = self._chain_start(row, len(tokens) + len(u) - 1)
        drafted, q = self._kernel.draft_chain(row, tokens, start, u, temperature, floor, truncation)
        if not drafted:
            raise NotFiniteError(f"Model {self._lm.name} gave NaN or infinite logits: check its weights and dtype.")
        self._trees[row].grow(range(-1, len(tokens) + len(drafted) - 2))
        return drafted, q

    @property
    def scores_trees(self) -> bool:
        """Whether `score_tree` can be called."""
        return isinstance(self._kernel, KernelRows) and self._kernel.drafts_chains

    @recorded(SCORING)
    def score_tree(
        self, row: int, tokens: Sequence[int], parents: Sequence[int], temperature: float
    ) -> Float[Tensor, "n v"] | None:
        """Append nodes to the tree of a row, as `score` does: softmax(logits / temperature) after each, at temperature
        0 the logits.

        One compiled call; what `score` and `softmax` give. None where some p is not finite, and nothing was scored.
        """
        assert isinstance(self._kernel, KernelRows)
        self._check_room(row, len(tokens))
        tree, length, first, out = self._trees[row], self.lengths[row], len(self._trees[row]), None
        try:
            tree.grow(parents)
            positions = [length + depth for depth in tree.depths[first:]]
            self._lm.check_position(max(positions))
            self._aim(slice(row, row + 1), length + first, len(tokens), length + len(tree))
            masks = self._masks([tree], [length], [first], len(tokens), length + len(tree))
            out = self._tempered(tokens, positions, masks, temperature)
        finally:
            if out is None:
                tree.drop(first)
        return out

    @recorded(FORWARD)
    def _tempered(
        self, tokens: Sequence[int], positions: list[int], masks: dict[str, np.ndarray | None], temperature: float
    ) -> Float[Tensor, "n v"] | None:
        """The compiled call of `score_tree`."""
        assert isinstance(self._kernel, KernelRows)
        return self._kernel.score_tree(tokens, positions, masks, temperature, self._features)

    def _chain_start(self, row: int, nodes: int) -> int:
        """The slot, and position, of the first of so many nodes that follow a row's committed text in one call."""
        assert not len(self._trees[row])
        assert self.drafts_chains(row, nodes)
        self._check_room(row, nodes)
        start = self.lengths[row]
        self._lm.check_position(start + nodes - 1)
        return start

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
