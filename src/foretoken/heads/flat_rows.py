"""Drafting with Medusa and Hydra: what a level's scores depend on is kept a row, not a node."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.heads.flat import Hydra, Medusa
from foretoken.heads.layer import cached
from foretoken.heads.rows import LOW, HeadRow, HeadRows, R
from foretoken.heads.slots import CHUNK, HeadSlots, on_device, slot_cache
from foretoken.models.growing_tree import GrowingTree


class FlatRows(HeadRows[R]):
    """Committed tokens need no forward: their states are the target's."""

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row].length += len(tokens)

    def _fresh(self, firsts: list[int]) -> list[int]:
        """Rows that score their first node since the last `keep`."""
        return [i for i, (row, first) in enumerate(zip(self.rows, firsts, strict=True)) if first == 0 < len(row.tree)]

    def _copy_slots(self, source: int, target: int) -> None: ...

    def _keep_slots(self, row: int, nodes: list[int]) -> None: ...


@dataclass
class MedusaRow(HeadRow):
    """scores: of all levels [k, v], from the last of the target's states."""

    scores: Tensor = field(default_factory=lambda: torch.empty(0))


class MedusaRows(FlatRows[MedusaRow]):
    """One call for all levels of all rows."""

    def __init__(self, head: Medusa, batch: int) -> None:
        super().__init__(head.target, batch)
        self.head = head

    def _new_row(self) -> MedusaRow:
        return MedusaRow()

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ v"]]:
        fresh = [self.rows[i] for i in self._fresh(firsts)]
        if fresh:
            states = torch.stack([row.features[-1] for row in fresh])
            for row, scores in zip(fresh, self.head.levels(states), strict=True):
                row.scores = scores
        out = []
        for row, first in zip(self.rows, firsts, strict=True):
            levels = [row.level(node) for node in range(first, len(row.tree))]
            out.append(row.scores[torch.tensor(levels, device=row.scores.device)] if levels else self._none())
        return out

    def parallel_scores(self, pairs: Sequence[tuple[int, int]]) -> Float[Tensor, "n m v"]:
        """Scores of all levels below each (row, root)."""
        return torch.stack([self.rows[row].scores for row, _ in pairs])


@dataclass
class HydraRow(HeadRow):
    """read: states that the prefix layer has seen; prefix: what it made of the last."""

    read: int = 0
    prefix: Tensor = field(default_factory=lambda: torch.empty(0))


class HydraRows(FlatRows[HydraRow]):
    """One call a level; before the first, the prefix layer on the states that are new."""

    @torch.inference_mode()
    def __init__(self, head: Hydra, batch: int, slots: int) -> None:
        super().__init__(head.target, batch)
        self.head = head
        self.slots = None
        if head.prefix is not None:
            self.slots = HeadSlots(slot_cache(head.shape, 1, head.target, batch, slots), slots)

    def _new_row(self) -> HydraRow:
        return HydraRow()

    @torch.inference_mode()
    def _copy_slots(self, source: int, target: int) -> None:
        if self.slots is not None:
            self.slots.cache.copy_row(source, target, self.rows[source].read)

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ v"]]:
        fresh = self._fresh(firsts)
        if fresh:
            self._read_states(fresh)
        device = self.target.device
        logits = [
            torch.empty(len(row.tree) - first, self.target.vocab_size, device=device)
            for row, first in zip(self.rows, firsts, strict=True)
        ]
        by_level: dict[int, list[tuple[int, int]]] = {}
        for i, (row, first) in enumerate(zip(self.rows, firsts, strict=True)):
            for node in range(first, len(row.tree)):
                if row.tree.depths[node] >= len(row.features) - row.length:  # not above the last committed token
                    by_level.setdefault(row.level(node), []).append((i, node))
        for level, nodes in by_level.items():
            paths = [[self.rows[i].tokens[j] for j in self.rows[i].above(node)] for i, node in nodes]
            embedded = self.target.embed(torch.tensor(paths, device=device))
            prefix = torch.stack([self.rows[i].prefix for i, _ in nodes])
            scores = self.head.level(level, prefix, list(embedded.unbind(1)))
            for (i, node), score in zip(nodes, scores, strict=True):
                logits[i][node - firsts[i]] = score
        return logits

    def _read_states(self, rows: list[int]) -> None:
        """The prefix layer on every state of these rows that it has not seen, in one call where that is one chunk."""
        if self.slots is None:
            for i in rows:
                self.rows[i].prefix = self.rows[i].features[-1] / self.head.feature_scale
            return
        while any(self.rows[i].read < len(self.rows[i].features) for i in rows):
            counts = [min(CHUNK, len(row.features) - row.read) for row in self.rows]
            n, chains = max(counts), []
            for count in counts:
                chains.append(GrowingTree(LOW))
                chains[-1].grow(range(-1, count - 1))
            mask = self.slots.aim(slice(0, len(counts)), chains, [row.read for row in self.rows], [0] * len(counts))
            known = [f if len(f) else f.new_zeros(1, f.shape[-1]) for f in (row.features for row in self.rows)]
            at = [[min(row.read + i, len(f) - 1) for i in range(n)] for row, f in zip(self.rows, known, strict=True)]
            places = torch.tensor(at, device=known[0].device)
            new = torch.stack([f[of_row] for f, of_row in zip(known, places, strict=True)])
            cos, sin = self.target.angles(places)
            states = self.head.prefix_states(new, cos, sin, cached(self.slots.cache, 0, on_device(mask, self.target)))
            for i, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
                if count:
                    row.prefix = states[i, count - 1]
                    row.read += count
