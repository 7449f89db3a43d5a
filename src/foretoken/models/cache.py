"""The slot cache: keys and values of many rows in memory that is allocated once and only ever read as views.

All key and value planes of equal shape live in one tensor [planes, batch, heads, slots + 1, head_dim], so that one
slice serves every layer of a forward, and one copy per kept path moves every layer. The extra slot takes the writes of
padding; it is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Plane:
    """Shape of what one layer keeps per token: its keys, or its values."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device


class SlotCache(Cache):
    """A transformers `Cache` whose `update` writes into slots chosen beforehand by `aim` and returns views.

    planes: (keys, values) of every layer, None for a layer that keeps nothing of its own.
    """

    def __init__(self, planes: Sequence[tuple[Plane, Plane] | None], batch: int, slots: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self._order: list[tuple[int, int]] = []  # plane 2l and 2l+1 of layer l -> (group, index in the group)
        members: dict[Plane, int] = {}
        groups: list[Plane] = []
        counts: list[int] = []
        for pair in planes:
            for plane in pair or ():
                group = members.setdefault(plane, len(groups))
                if group == len(groups):
                    groups.append(plane)
                    counts.append(0)
                self._order.append((group, counts[group]))
                counts[group] += 1
        kept = iter(range(0, len(self._order), 2))
        self._layer = [None if pair is None else next(kept) for pair in planes]
        # Zeros, not empty: an unwritten slot is masked, but 0 * NaN would still be NaN.
        self.stores = [
            torch.zeros(c, batch, p.heads, slots + 1, p.dim, dtype=p.dtype, device=p.device)
            for p, c in zip(groups, counts, strict=True)
        ]
        self._reads: Sequence[Tensor] = ()
        self._writes: Sequence[Tensor] = ()
        self._at: tuple[Tensor, Tensor] | None = None
        self._used = self._new = self._start = 0
        self._rows = slice(0)

    @torch.inference_mode()
    def aim(self, rows: slice, start: int | Sequence[Sequence[int]], n: int, used: int) -> None:
        """Set where the next forward of `rows` writes its n nodes and that it reads slots [0, used).

        start: the first slot, when it is the same for all rows; else the slots [b][n] of every node.
        """
        self._used, self._new = used, n
        self._rows, self._start = rows, 0
        self._reads = self._spread([store[:, rows, :, :used].unbind(0) for store in self.stores])
        self._writes = ()
        if isinstance(start, int):
            self._start, self._at = start, None
        else:
            device = self.stores[0].device
            self._at = (torch.arange(len(start), device=device)[:, None], torch.tensor(start, device=device))

    def _open_writes(self) -> None:
        stores = [store[:, self._rows] for store in self.stores]
        if self._at is None:
            self._writes = self._spread([s.narrow(3, self._start, self._new).unbind(0) for s in stores])
        else:  # index_put wants the indexed axes side by side: [b, slots, heads, dim]
            self._writes = self._spread([s.transpose(2, 3).unbind(0) for s in stores])

    def _spread(self, views: list[tuple[Tensor, ...]]) -> Sequence[Tensor]:
        return views[0] if len(views) == 1 else [views[group][i] for group, i in self._order]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        i = self._layer[layer_idx]
        assert i is not None, f"layer {layer_idx} kept nothing when it was probed"
        if not self._writes:
            self._open_writes()
        if self._at is None:
            self._writes[i].copy_(key_states)
            self._writes[i + 1].copy_(value_states)
        else:
            self._writes[i].index_put_(self._at, key_states.transpose(1, 2))
            self._writes[i + 1].index_put_(self._at, value_states.transpose(1, 2))
        return self._reads[i], self._reads[i + 1]

    @torch.inference_mode()
    def move(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Copy the slots start + nodes of a row to start, start + 1, ... in every layer."""
        for store in self.stores:
            source = torch.tensor(nodes, device=store.device) + start
            of_row = store[:, row]
            of_row[:, :, start : start + len(nodes)] = of_row.index_select(2, source)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` slots of row `source` to row `target`."""
        for store in self.stores:
            store[:, target, :, :used] = store[:, source, :, :used]

    # What transformers asks a cache while it builds (or skips) its own mask:

    def __len__(self) -> int:
        return len(self._layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._used - self._new

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._used, 0

    is_sliding: ClassVar[list[bool]] = [False]  # pyright: ignore[reportIncompatibleMethodOverride]
    is_linear: ClassVar[list[bool]] = [False]  # pyright: ignore[reportIncompatibleMethodOverride]
    is_dummy: ClassVar[list[bool]] = [False]  # pyright: ignore[reportIncompatibleMethodOverride]
    is_compileable: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]
    is_initialized: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride]
