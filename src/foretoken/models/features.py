"""Hidden states of a model kept slot by slot, for drafters that read them; they come out of the scoring forward."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.models.cache import Slots

FINAL = -1  # the states after the final norm, which the LM head reads; layer l >= 0: the states that enter it


class FeatureStore(Slots):
    """[batch, slots + 1, f]: the states of `layers` side by side, in the same slots as the keys and values.

    `place` sets where a forward writes each layer's states, once. distinct: the layers wanted, each once.
    """

    def __init__(
        self, layers: tuple[int, ...], batch: int, slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.distinct = tuple(sorted(set(layers)))
        self._store = torch.zeros(batch, slots + 1, width, dtype=dtype, device=device)
        self.stores = [self._store[:, None]]
        self._at: tuple[Tensor, Tensor] | None = None
        self._new = self._store[:0]

    def place(self, rows: slice, start: int | Sequence[Sequence[int]], n: int) -> None:
        """Set where the next forward of `rows` writes: from slot `start` on, or at the slots [b][n] of every node."""
        of_rows = self._store[rows]
        if isinstance(start, int):
            self._at, self._new = None, of_rows[:, start : start + n]
        else:
            device = of_rows.device
            self._at = (torch.arange(len(start), device=device)[:, None], torch.tensor(start, device=device))
            self._new = of_rows

    @torch.inference_mode()
    def keep(self, states: Iterable[Float[Tensor, "b n d"]]) -> None:
        """Write the states of the layers `distinct` wherever they were asked for."""
        of_layer = dict(zip(self.distinct, states, strict=True))
        for layer, place in zip(self.layers, self._new.chunk(len(self.layers), -1), strict=True):
            if self._at is None:
                place.copy_(of_layer[layer])
            else:
                place.index_put_(self._at, of_layer[layer].to(place.dtype))

    def of_row(self, row: int, length: int) -> Float[Tensor, "t f"]:
        """The states of the first `length` tokens of a row; a view."""
        return self._store[row, :length]
