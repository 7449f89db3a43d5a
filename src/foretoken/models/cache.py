"""The slot cache: keys and values of many rows in memory that is allocated once and only ever read as views.

All key and value planes of equal shape live in one tensor [planes, batch, heads, slots + 1, head_dim], so that one
slice serves every layer of a forward, and one copy per kept path moves every layer. The extra slot takes the writes of
padding; it is never read.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any, ClassVar, NamedTuple, no_type_check

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Plane:
    """The shape of what one layer keeps per token: its keys, or its values.

    heads: number of heads that have keys and values of their own.
    dim: numbers per head.
    dtype, device: of the tensor.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device


@no_type_check  # torch.compile traces it, and cannot trace the shape checks that the tests add to functions
class NodeCache(Cache):
    """The part of a transformers `Cache` that is read while transformers builds (or skips) its own mask.

    of_layer: per layer the index of the first of its two planes, None for a layer that keeps nothing.
    used: number of slots that the forward reads.
    new: number of nodes per row that it brings.
    """

    is_sliding: ClassVar[list[bool]] = [False]  # pyright: ignore[reportIncompatibleMethodOverride]
    is_linear: ClassVar[list[bool]] = [False]  # pyright: ignore[reportIncompatibleMethodOverride]
    is_dummy: ClassVar[list[bool]] = [False]  # pyright: ignore[reportIncompatibleMethodOverride]
    is_compileable: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]
    is_initialized: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, of_layer, used=0, new=0):
        self.layers = []
        self.of_layer, self.used, self.new = of_layer, used, new

    def __len__(self):
        return len(self.of_layer)

    def get_seq_length(self, layer_idx=0):
        """Return the number of slots that were filled before this forward; layer_idx: any, all layers are alike."""
        return self.used - self.new

    def get_mask_sizes(self, query_length, layer_idx=0):
        """Return (number of slots that are read, first of them); query_length and layer_idx change nothing."""
        return self.used, 0


Planes = Sequence[tuple[Plane, Plane] | None]  # keys and values of every layer, None for one that keeps nothing


def first_planes(planes: Planes) -> tuple[int | None, ...]:
    """Return per layer the index of its first plane among all `planes`, None for a layer that keeps nothing."""
    kept = count(0, 2)
    return tuple(None if pair is None else next(kept) for pair in planes)


class Place(NamedTuple):
    """The slots that a forward writes and reads.

    rows: the rows of the forward, b of them.
    start: the slot of the first of a row's n nodes where they stand one behind the other and it is the same for all
        rows; else the slots of all nodes [b][n].
    n: the number of nodes per row.
    used: the forward reads the slots [0, used), those of its own nodes included.
    """

    rows: slice
    start: int | list[list[int]]
    n: int
    used: int

    @property
    def slots(self) -> np.ndarray:
        """The slot of each node [b, n]."""
        if isinstance(self.start, int):
            return np.arange(self.start, self.start + self.n)[None].repeat(self.rows.stop - self.rows.start, 0)
        return np.array(self.start)

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return which of the b rows [b, 1], and what slot [b, n], each node has, on `device`."""
        slots = torch.from_numpy(self.slots).to(device)
        return torch.arange(len(slots), device=device)[:, None], slots


class Slots:
    """Tensors that keep something of each token of each row, one token per slot.

    stores: the tensors, each [..., rows, heads, slots, dim].
    """

    stores: Sequence[Tensor]

    @torch.inference_mode()
    def move(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Copy some slots of a row to the slots start, start + 1, ..., in every layer.

        row: the index of the row.
        start: the first slot that is written.
        nodes: the copied slots, counted from `start`.
        """
        for store in self.stores:
            source = torch.tensor(nodes, device=store.device) + start
            of_row = store.select(-4, row)
            of_row[..., start : start + len(nodes), :] = of_row.index_select(-2, source)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` slots of row `source` to row `target`, in every layer."""
        for to, of in zip(self._views(target, 0, used), self._views(source, 0, used), strict=True):
            to.copy_(of)

    @torch.inference_mode()
    def read(self, row: int, start: int, end: int) -> tuple[Tensor, ...]:
        """Return a copy of slots [start, end) of the row with index `row`, of every layer, for `write`."""
        return tuple(view.clone() for view in self._views(row, start, end))

    @torch.inference_mode()
    def write(self, row: int, start: int, end: int, parts: Sequence[Tensor]) -> None:
        """Put `parts`, which `read` returned, into the same slots of another row; row, start, end: as there."""
        for view, part in zip(self._views(row, start, end), parts, strict=True):
            view.copy_(part)

    def _views(self, row: int, start: int, end: int) -> list[Tensor]:
        return [store.select(-4, row)[..., start:end, :] for store in self.stores]


class SlotCache(NodeCache, Slots):
    """A transformers `Cache` whose `update` writes into slots chosen beforehand by `place` and returns views."""

    at: Place

    def __init__(self, planes: Planes, batch: int, slots: int) -> None:
        """Allocate the cache; planes: shapes of all layers' keys and values; batch: rows; slots: per row."""
        super().__init__(first_planes(planes))
        kept = [plane for pair in planes for plane in pair or ()]
        groups = Counter(kept)
        places = {plane: zip(repeat(group), count()) for group, plane in enumerate(groups)}
        self._order = [next(places[plane]) for plane in kept]  # of every plane: (group, index in the group)
        # Zeros, not empty: an unwritten slot is masked, but 0 * NaN would still be NaN.
        self.stores = [
            torch.zeros(size, batch, p.heads, slots + 1, p.dim, dtype=p.dtype, device=p.device)
            for p, size in groups.items()
        ]
        self._reads: Sequence[Tensor] = ()
        self._writes: Sequence[Tensor] = ()
        self._indices: tuple[Tensor, Tensor] | None = None  # where nodes do not stand one behind the other

    @torch.inference_mode()
    def place(self, at: Place) -> None:
        """Set which slots the next forward reads and writes; at: these slots."""
        self.at, self.used, self.new = at, at.used, at.n
        stores = [store[:, at.rows] for store in self.stores]
        self._reads = self._spread([s[:, :, :, : at.used].unbind(0) for s in stores])
        if isinstance(at.start, int):
            self._indices = None
            self._writes = self._spread([s.narrow(3, at.start, at.n).unbind(0) for s in stores])
        else:  # index_put wants the indexed axes side by side: [b, slots, heads, dim]
            self._indices = at.indices(self.stores[0].device)
            self._writes = self._spread([s.transpose(2, 3).unbind(0) for s in stores])

    def _spread(self, views: list[tuple[Tensor, ...]]) -> Sequence[Tensor]:
        return views[0] if len(views) == 1 else [views[group][i] for group, i in self._order]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values, and return views of all keys and values that the forward reads.

        key_states, value_states: those of the nodes [b, heads, n, dim].
        layer_idx: the index of the layer.
        """
        i = self.of_layer[layer_idx]
        assert i is not None, f"layer {layer_idx} kept nothing when it was probed"
        if self._indices is None:
            self._writes[i].copy_(key_states)
            self._writes[i + 1].copy_(value_states)
        else:
            self._writes[i].index_put_(self._indices, key_states.transpose(1, 2))
            self._writes[i + 1].index_put_(self._indices, value_states.transpose(1, 2))
        return self._reads[i], self._reads[i + 1]
