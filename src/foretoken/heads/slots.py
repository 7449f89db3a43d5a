"""The keys and values of a head's own layers, slot by slot, and the masks of its forwards."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.heads.layer import LayerShape
from foretoken.heads.rows import LOW
from foretoken.models.cache import Plane, SlotCache
from foretoken.models.growing_tree import GrowingTree, additive_mask, causal_mask
from foretoken.models.kernel_layers import KernelSlots
from foretoken.models.parts import TargetParts

CHUNK = 512  # tokens per prefill forward: bounds the mask and the activations


def slot_cache(shape: LayerShape, layers: int, target: TargetParts, batch: int, slots: int) -> SlotCache:
    plane = Plane(shape.kv_heads, shape.head_dim, target.dtype, target.device)
    return SlotCache([(plane, plane)] * layers, batch, slots)


def on_device(mask: np.ndarray | None, target: TargetParts) -> Float[torch.Tensor, "b 1 n used"] | None:
    return None if mask is None else torch.from_numpy(mask).to(device=target.device, dtype=target.dtype)


C = TypeVar("C", bound=SlotCache | KernelSlots)


class HeadSlots(Generic[C]):
    """Where the next forward writes and what it sees; masks are [b, 1, n, used] of 0 and low, None if all is seen."""

    def __init__(self, cache: C, slots: int) -> None:
        self.cache, self.slots = cache, slots

    def aim(
        self, rows: slice, trees: Sequence[GrowingTree], lengths: Sequence[int], firsts: Sequence[int]
    ) -> np.ndarray | None:
        """For the newest nodes of each tree, after `lengths` committed slots."""
        counts = [len(tree) - first for tree, first in zip(trees, firsts, strict=True)]
        n, used = max(counts), max(length + len(tree) for length, tree in zip(lengths, trees, strict=True))
        starts = [length + first for length, first in zip(lengths, firsts, strict=True)]
        self.check_room(used)
        if min(starts) == max(starts) and starts[0] + n <= self.slots + 1:
            self.cache.aim(rows, starts[0], n, used)
        else:
            places = [[*range(s, s + c), *[self.slots] * (n - c)] for s, c in zip(starts, counts, strict=True)]
            self.cache.aim(rows, places, n, used)
        return additive_mask(trees, lengths, firsts, n, used, None)

    def aim_chain(self, row: int, start: int, n: int) -> np.ndarray:
        """For n tokens of committed text from slot `start` on."""
        self.check_room(start + n)
        self.cache.aim(slice(row, row + 1), start, n, start + n)
        return causal_mask(start, n, LOW, None)

    def check_room(self, used: int) -> None:
        if used > self.slots:
            raise ForetokenError(f"A head's row needs {used} slots and has {self.slots}: open with more slots.")

    def move(self, row: int, start: int, nodes: list[int]) -> None:
        if nodes != list(range(len(nodes))):
            self.cache.move(row, start, nodes)
