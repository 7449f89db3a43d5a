"""The hidden states of a model, kept slot by slot for drafters that read them; the scoring forward yields them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.models.cache import Slots, indices

FINAL = -1  # stands for the states after the final norm, which the LM head reads; l >= 0: those that enter layer l


class FeatureStore(Slots):
    """The hidden states of a batch [batch, slots + 1, f], in the same slots as the keys and values.

    A slot holds the states of all wanted layers side by side, f numbers. `place` sets where the next forward's states
    go, and `keep` writes them.

    layers: the wanted layers in the order in which their states stand; one may stand there more than once.
    distinct: the wanted layers in ascending order, each once.
    """

    def __init__(
        self, layers: tuple[int, ...], batch: int, slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the store.

        batch, slots: rows, and slots per row.
        width: f, the number of layers times the width of a state.
        dtype, device: those of the store.
        """
        self.layers = layers
        self.distinct = tuple(sorted(set(layers)))
        self._store = torch.zeros(batch, slots + 1, width, dtype=dtype, device=device)
        self.stores = [self._store[:, None]]
        self._at: tuple[Tensor, Tensor] | None = None
        self._new = self._store[:0]

    def place(self, rows: slice, start: int | Sequence[Sequence[int]], n: int) -> None:
        """Set where `keep` writes the states of the next forward; rows, start, n: as in `SlotCache.place`."""
        of_rows = self._store[rows]
        if isinstance(start, int):
            self._at, self._new = None, of_rows[:, start : start + n]
        else:
            self._at, self._new = indices(start, of_rows.device), of_rows

    @torch.inference_mode()
    def keep(self, states: Iterable[Float[Tensor, "b n d"]]) -> None:
        """Write the states of the forward for which `place` was called; states: per layer of `distinct` [b, n, d]."""
        of_layer = dict(zip(self.distinct, states, strict=True))
        for layer, place in zip(self.layers, self._new.chunk(len(self.layers), -1), strict=True):
            if self._at is None:
                place.copy_(of_layer[layer])
            else:
                place.index_put_(self._at, of_layer[layer].to(place.dtype))

    def of_row(self, row: int, length: int) -> Float[Tensor, "t f"]:
        """Return the states of the first `length` tokens of the row with index `row` [length, f], as a view."""
        return self._store[row, :length]
