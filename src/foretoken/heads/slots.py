"""The keys and values of a head's own layers, slot by slot, and the masks of its forwards."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.heads.layer import LayerShape
from foretoken.heads.rows import LOW
from foretoken.models.cache import Plane, SlotCache
from foretoken.models.growing_tree import GrowingTree, additive_mask, causal_mask
from foretoken.models.parts import TargetParts

CHUNK = 512  # tokens per prefill forward: bounds the mask and the activations


class HeadSlots:
    def __init__(self, shape: LayerShape, layers: int, target: TargetParts, batch: int, slots: int) -> None:
        plane = Plane(shape.kv_heads, shape.head_dim, target.dtype, target.device)
        self.cache = SlotCache([(plane, plane)] * layers, batch, slots)
        self.slots = slots

    def aim(
        self, rows: slice, trees: Sequence[GrowingTree], lengths: Sequence[int], firsts: Sequence[int]
    ) -> Float[Tensor, "b 1 n used"] | None:
        """For the newest nodes of each tree, after `lengths` committed slots."""
        counts = [len(tree) - first for tree, first in zip(trees, firsts, strict=True)]
        n, used = max(counts), max(length + len(tree) for length, tree in zip(lengths, trees, strict=True))
        starts = [length + first for length, first in zip(lengths, firsts, strict=True)]
        if used > self.slots:
            raise ForetokenError(f"A head's row needs {used} slots and has {self.slots}: open with more slots.")
        if min(starts) == max(starts) and starts[0] + n <= self.slots + 1:
            self.cache.aim(rows, starts[0], n, used)
        else:
            places = [[*range(s, s + c), *[self.slots] * (n - c)] for s, c in zip(starts, counts, strict=True)]
            self.cache.aim(rows, places, n, used)
        mask = additive_mask(trees, lengths, firsts, n, used, None)
        plane = self.cache.stores[0]
        return None if mask is None else torch.from_numpy(mask).to(device=plane.device, dtype=plane.dtype)

    def aim_chain(self, row: int, start: int, n: int) -> Float[Tensor, "1 1 n used"]:
        """For n tokens of committed text from slot `start` on."""
        if start + n > self.slots:
            raise ForetokenError(f"A head's row needs {start + n} slots and has {self.slots}: open with more slots.")
        self.cache.aim(slice(row, row + 1), start, n, start + n)
        plane = self.cache.stores[0]
        mask = torch.from_numpy(causal_mask(start, n, LOW, None))
        return mask.to(device=plane.device, dtype=plane.dtype)

    def move(self, row: int, start: int, nodes: list[int]) -> None:
        if nodes != list(range(len(nodes))):
            self.cache.move(row, start, nodes)
