"""The hidden states of a model, kept slot by slot for drafters that read them; the scoring forward yields them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.models.cache import Place, Slots

FINAL = -1  # stands for the states after the final norm, which the LM head reads; l >= 0: those that enter layer l


class FeatureStore(Slots):
    """The hidden states of a batch [batch, slots + 1, f], in the same slots as the keys and values.

    A slot holds the states of all wanted layers side by side, f numbers.

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

    @torch.inference_mode()
    def keep(self, at: Place, states: Iterable[Float[Tensor, "b n d"]]) -> None:
        """Write the states of a forward; at: where its nodes stand; states: per layer of `distinct` [b, n, d]."""
        new, indices = self._store[at.rows], None
        if isinstance(at.start, int):
            new = new[:, at.start : at.start + at.n]
        else:
            indices = at.indices(new.device)
        of_layer = dict(zip(self.distinct, states, strict=True))
        for layer, part in zip(self.layers, new.chunk(len(self.layers), -1), strict=True):
            if indices is None:
                part.copy_(of_layer[layer])
            else:
                part.index_put_(indices, of_layer[layer].to(part.dtype))

    def of_row(self, row: int, length: int) -> Float[Tensor, "t f"]:
        """Return the states of the first `length` tokens of the row with index `row` [length, f], as a view."""
        return self._store[row, :length]
