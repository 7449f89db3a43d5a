"""Drafting with EAGLE, EAGLE-3 and Gumiho: rows with the cache of the head's layers.

Slot j - 1 holds token x_j, since a row's first token is never scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError, NotFiniteError
from foretoken.core.shapes import Float
from foretoken.core.truncated import Truncation
from foretoken.heads.kernel import EagleKernel, EagleSlots
from foretoken.heads.layer import cached
from foretoken.heads.rows import HeadRow, HeadRows
from foretoken.heads.serial import Eagle, Eagle3, Gumiho
from foretoken.heads.slots import CHUNK, HeadSlots, on_device, slot_cache
from foretoken.kernel.sizes import ALL

SerialHead = Eagle | Gumiho | Eagle3


@dataclass
class SerialRow(HeadRow):
    """states: the head's own, one a node. parallel: Gumiho's scores [m, v] of the levels below a depth-1 node."""

    states: list[Tensor] = field(default_factory=list)
    parallel: dict[int, Tensor] = field(default_factory=dict)

    def forget_tree(self) -> None:
        super().forget_tree()
        self.states, self.parallel = [], {}


class SerialRows(HeadRows[SerialRow]):
    """EAGLE and EAGLE-3: one forward a level, each node on its parent's state."""

    @torch.inference_mode()
    def __init__(self, head: SerialHead, kernel: EagleKernel | None, batch: int, slots: int) -> None:
        super().__init__(head.target, batch, head.columns if isinstance(head, Eagle3) else None)
        self.head = head
        if kernel is None:
            self.cache = slot_cache(head.shape, head.num_layers, head.target, batch, slots)
        else:
            self.cache = EagleSlots(kernel, batch, slots)
        self.slots = HeadSlots(self.cache, slots)

    def _new_row(self) -> SerialRow:
        return SerialRow()

    @torch.inference_mode()
    def _copy_slots(self, source: int, target: int) -> None:
        row = self.rows[source]
        self.cache.copy_row(source, target, row.length - 1 + len(row.tree))

    @torch.inference_mode()
    def _keep_slots(self, row: int, nodes: list[int]) -> None:
        self.slots.move(row, self.rows[row].length - 1, nodes)

    @torch.inference_mode()
    def extend(self, row: int, tokens: Sequence[int]) -> None:
        of_row = self.rows[row]
        for i in range(0, len(tokens), CHUNK):
            chunk = list(tokens[i : i + CHUNK])
            start, n = of_row.length - 1, len(chunk)
            mask = self.slots.aim_chain(row, start, n)
            states = self._enter(of_row.features[None, start : start + n])
            self._forward([chunk], states, np.arange(start, start + n)[None], mask)
            of_row.length += n

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ c"]]:
        out = self._run_serial(firsts)
        if out is None:
            return [self._none() for _ in firsts]
        logits = self._logits(out)
        return [
            logits[r, : len(row.tree) - first] for r, (row, first) in enumerate(zip(self.rows, firsts, strict=True))
        ]

    def _logits(self, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n c"]:
        """Over the head's own vocabulary."""
        if isinstance(self.cache, EagleSlots):
            return self.cache.logits(states)
        return self.head.draft_logits(states) if isinstance(self.head, Eagle3) else self.head.logits(states)

    def _enter(self, features: Float[Tensor, "*n f"]) -> Float[Tensor, "*n d"]:
        """The target's states as the head's own; the kernel computes with float32 states."""
        return self.head.enter(features.float() if isinstance(self.cache, EagleSlots) else features)

    def drafts_chains(self, row: int, nodes: int) -> bool:
        """Whether `draft_chain` can be called where it scores so many nodes."""
        return isinstance(self.cache, EagleSlots) and self.cache.drafts_chains and not len(self.rows[row].tree)

    @torch.inference_mode()
    def draft_chain(
        self, row: int, tokens: Sequence[int], u: Float[Tensor, "n 1"], temperature: float, floor: float = 0.0,
        truncation: Truncation = ALL,
    ) -> tuple[list[int], Float[Tensor, "_ v"]]:  # fmt: skip
        """As models.rows.Rows.draft_chain: one compiled call, whose tokens and q are those of `score` and draw."""
        assert isinstance(self.cache, EagleSlots)
        of_row, start = self.rows[row], self.rows[row].length - 1
        self.slots.check_room(start + len(tokens) + len(u) - 1)
        of_row.tree.grow(range(-1, len(tokens) - 1))
        states = self._inputs(of_row, 0, len(tokens))
        u = u[: self.head.depth]
        drafted, q, made = self.cache.draft_chain(row, tokens, states, start, u, temperature, floor, truncation)
        if not drafted:
            raise NotFiniteError(f"The {self.head.kind} head of {self.target.name} gave NaN or infinite logits.")
        read = [*tokens, *drafted[:-1]]
        of_row.tree.grow(range(len(tokens) - 1, len(read) - 1))
        of_row.tokens += read
        of_row.states += made.unbind(0)
        return drafted, q

    def _run_serial(self, firsts: list[int]) -> Float[Tensor, "b n d"] | None:
        """The states of the newest nodes of all rows, also remembered; rows with fewer are padded."""
        tokens = [row.tokens[first:] for row, first in zip(self.rows, firsts, strict=True)]
        n = max(map(len, tokens))
        if not n:
            return None
        inputs, positions = [], np.zeros((len(tokens), n), np.int64)
        for i, (row, first, new) in enumerate(zip(self.rows, firsts, tokens, strict=True)):
            inputs.append(self._inputs(row, first, n))
            positions[i, : len(new)] = np.array(row.tree.depths[first:], np.int64) + row.length - 1
        trees, lengths = [row.tree for row in self.rows], [row.length - 1 for row in self.rows]
        mask = self.slots.aim(slice(0, len(tokens)), trees, lengths, firsts)
        out = self._forward([[*t, *[0] * (n - len(t))] for t in tokens], torch.stack(inputs), positions, mask)
        for i, (row, new) in enumerate(zip(self.rows, tokens, strict=True)):
            row.states += out[i, : len(new)].unbind(0)
        return out

    def _inputs(self, row: SerialRow, first: int, n: int) -> Float[Tensor, "n d"]:
        """The states that the nodes from `first` on take: the target's where known, else the parent's; padded to n."""
        tree, features = row.tree, row.features
        at = [row.length - 1 + depth for depth in tree.depths[first:]]
        known = sum(i < len(features) for i in at)  # they come first: the pending text, then drafted nodes
        parts = [self._enter(features[at[0] : at[0] + known])] if known else []
        parts += [row.states[parent][None] for parent in tree.parents[first + known :]]
        if len(at) < n:
            parts.append(torch.zeros(n - len(at), self.head.shape.hidden, device=self.target.device))
        dtype = torch.float32 if isinstance(self.cache, EagleSlots) else self.target.dtype
        return torch.cat([part.to(dtype) for part in parts])

    def _forward(self, ids: list[list[int]], states: Tensor, positions: np.ndarray, mask: np.ndarray | None) -> Tensor:
        device = self.target.device
        embedded = self.target.embed(torch.tensor(ids, device=device))
        if isinstance(self.cache, EagleSlots):
            return self.cache.step(embedded, states, positions, mask)
        cos, sin = self.target.angles(torch.from_numpy(positions).to(device))
        seen = on_device(mask, self.target)
        attends = [cached(self.cache, layer, seen) for layer in range(self.head.num_layers)]
        return self.head.step(embedded, states, cos, sin, attends)


class GumihoRows(SerialRows):
    """The first two levels by the serial part, all others at once by the MLPs of each depth-1 node."""

    head: Gumiho  # pyright: ignore[reportIncompatibleVariableOverride]

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ v"]]:
        new = [range(first, len(row.tree)) for row, first in zip(self.rows, firsts, strict=True)]
        levels = [[row.level(node) for node in nodes] for row, nodes in zip(self.rows, new, strict=True)]
        if all(level < Gumiho.SERIAL for of_row in levels for level in of_row):
            return super()._score(firsts)
        if any(level < Gumiho.SERIAL for of_row in levels for level in of_row):
            raise ForetokenError("A forward of Gumiho's head takes nodes of its serial or of its parallel levels only.")
        # Parallel levels need no slots: their nodes are in the tree as names only.
        pairs = [[row.above(node)[1] for node in nodes] for row, nodes in zip(self.rows, new, strict=True)]
        self._run_parallel({(row, pair) for row, of_row in enumerate(pairs) for pair in of_row})
        out = []
        for row, of_row, its_levels in zip(self.rows, pairs, levels, strict=True):
            scores = [row.parallel[p][level - Gumiho.SERIAL] for p, level in zip(of_row, its_levels, strict=True)]
            out.append(torch.stack(scores) if scores else self._none())
            row.states += row.states[:1] * len(of_row)  # never read: their children are parallel too
        return out

    @torch.inference_mode()
    def parallel_scores(self, pairs: Sequence[tuple[int, int]]) -> Float[Tensor, "n m v"]:
        """Scores of all parallel levels below each (row, depth-1 node)."""
        self._run_parallel(set(pairs))
        return torch.stack([self.rows[row].parallel[node] for row, node in pairs])

    def _run_parallel(self, pairs: set[tuple[int, int]]) -> None:
        """All MLPs and their LM head, for every pair not known yet, in one call each."""
        new = sorted((row, node) for row, node in pairs if node not in self.rows[row].parallel)
        if not new:
            return
        of_rows = [(self.rows[row], node) for row, node in new]
        first = torch.stack([row.states[row.tree.parents[node]] for row, node in of_rows])
        second = torch.stack([row.states[node] for row, node in of_rows])
        parallel = self.cache.parallel if isinstance(self.cache, EagleSlots) else self.head.parallel
        logits = self.head.logits(parallel(first, second))
        for (row, node), scores in zip(of_rows, logits, strict=True):
            row.parallel[node] = scores
