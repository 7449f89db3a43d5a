"""Hidden states of a model kept slot by slot, for drafters that read them; they come out of the scoring forward."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from foretoken.core.shapes import Float

FINAL = -1  # the states after the final norm, which the LM head reads; layer l >= 0: the states that enter it


class FeatureStore:
    """[batch, slots + 1, f]: the states of `layers` side by side, in the same slots as the keys and values.

    `place` sets where a forward writes each layer's states, once. distinct: the layers wanted, each once.
    """

    def __init__(
        self, layers: tuple[int, ...], batch: int, slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.distinct = tuple(sorted(set(layers)))
        self._store = torch.zeros(batch, slots + 1, width, dtype=dtype, device=device)
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
    def write(self, layer: int, states: Float[Tensor, "b n d"]) -> None:
        """Keep what enters `layer`, wherever it was asked for."""
        d = states.shape[-1]
        for i, wanted in enumerate(self.layers):
            if wanted == layer:
                place = self._new[..., i * d : (i + 1) * d]
                if self._at is None:
                    place.copy_(states)
                else:
                    place.index_put_(self._at, states.to(place.dtype))

    def write_all(self, states: Iterable[Float[Tensor, "b n d"]]) -> None:
        """Keep the states of the layers `distinct`."""
        for layer, of_layer in zip(self.distinct, states, strict=True):
            self.write(layer, of_layer)

    @torch.inference_mode()
    def move(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Copy the slots start + nodes of a row to start, start + 1, ..."""
        source = torch.tensor(nodes, device=self._store.device) + start
        self._store[row, start : start + len(nodes)] = self._store[row, source]

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, used: int) -> None:
        self._store[target, :used] = self._store[source, :used]

    def read(self, row: int, length: int) -> Float[Tensor, "t f"]:
        return self._store[row, :length]

    @torch.inference_mode()
    def write_row(self, row: int, start: int, states: Float[Tensor, "t f"]) -> None:
        """Put states that were read from another row into slots start, start + 1, ... of this one."""
        self._store[row, start : start + len(states)] = states
