"""Weights laid out for few rows: what a CPU does best when a handful of tree nodes is scored at a time.

torch's `linear` slows down steeply from 1 row to 5, since its kernel is made for many rows. Here every weight is read
once for up to six rows (tile.py). A weight whose float32 values are bfloat16 values, as those of nearly all published
models are, is stored in half the space, and no value changes.
"""

from functools import cache
from typing import no_type_check

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foretoken.core.shapes import Float

COLUMNS = 64  # tile.PANEL, which this module must not import: numba takes half a second


class PanelLinear(nn.Module):
    """nn.Linear over panels [out / 64, in, 64]: x [..., in] -> [..., out], float32 on a CPU, inference only.

    panels: uint16, the upper halves of the float32 values, where the lower halves are all zero; else float32.
    """

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        weight = linear.weight.detach()
        if isinstance(linear, Conv1D):  # GPT-2's linear layer, stored the other way round
            weight = weight.T
        self.out_features, self.in_features = weight.shape
        # Neither parameter nor buffer: the layout can be neither saved nor moved.
        self.panels = _panels(weight.numpy())
        self._panels = torch.from_numpy(self.panels)  # the same memory
        self.bias = linear.bias

    @property
    def bits(self) -> Tensor:
        """The panels as a tensor, of int16 where they are halved, since torch can do little with uint16."""
        return self._panels.view(torch.int16) if self.halved else self._panels

    @property
    def halved(self) -> bool:
        return self.panels.dtype == np.uint16

    @no_type_check  # torch.compile traces it
    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        out = product(x, self._panels, self.out_features)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        bits = 16 if self.halved else 32
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, {bits} bits"


# An operator of torch's own kind, so that torch.compile takes it as it is; as cheap to call as a Python function.
torch.library.define("foretoken::panel_product", "(Tensor x, Tensor panels, int out_features) -> Tensor")
product = torch.ops.foretoken.panel_product.default


@torch.library.impl("foretoken::panel_product", "CPU")
def _product(x: Float[Tensor, "*n i"], panels: Tensor, out_features: int) -> Float[Tensor, "*n o"]:
    from foretoken.models.tile import times

    k = panels.shape[1]
    rows = x.reshape(-1, k).contiguous().numpy()
    m = len(rows)
    y = np.empty((m, out_features), np.float32)
    halved = panels.dtype == torch.uint16
    times(rows, k, k, m, panels.data_ptr(), halved, y, 0, out_features, out_features, use_threads())
    return torch.from_numpy(y).view(*x.shape[:-1], out_features)


@torch.library.register_fake("foretoken::panel_product")
def _product_shape(x: Float[Tensor, "*n i"], panels: Tensor, out_features: int) -> Float[Tensor, "*n o"]:
    return x.new_empty(*x.shape[:-1], out_features)


def _panels(weight: np.ndarray) -> np.ndarray:
    out, k = weight.shape
    count = -(-out // COLUMNS)
    panels = np.zeros((count, k, COLUMNS), np.float32)
    for i in range(count):  # panel by panel: no second copy of a large matrix
        part = weight[i * COLUMNS : (i + 1) * COLUMNS]
        panels[i, :, : len(part)] = part.T
    bits = panels.view(np.uint16).reshape(count, k, COLUMNS, 2)  # little-endian: lower half first
    return panels if bits[..., 0].any() else np.ascontiguousarray(bits[..., 1])


def pack(model: PreTrainedModel) -> None:
    """Lay out the linear weights of a model anew, in place, where it runs in float32 on a CPU; else leave it as it is.

    Only for a model of our own that is used for nothing but inference: panels cannot be trained, saved or moved. The
    originals are freed, but for one tied to the embedding.
    """
    if model.device.type == "cpu" and model.dtype == torch.float32:
        pack_linears(model)


def pack_linears(module: nn.Module) -> None:
    """The same for any module in float32 on a CPU."""
    if not _works():
        return
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D) and child.weight.dtype == torch.float32:
                assert isinstance(child, nn.Linear | Conv1D)
                setattr(parent, name, PanelLinear(child))


def use_threads() -> bool | None:
    """True where torch was given more than one thread, and the compiled loops take as many; else None."""
    threads = torch.get_num_threads()
    if threads > 1:
        from numba import config, set_num_threads

        set_num_threads(min(threads, config.NUMBA_NUM_THREADS))  # pyright: ignore[reportAttributeAccessIssue]
    return True if threads > 1 else None


@cache
def _works() -> bool:
    """Whether the compiled product is right on this machine: 13 rows times a matrix of one chunk (tile.CHUNK) and
    one of many, in both formats."""
    for out, k in ((70, 5), (330, 1100)):
        x, weight = torch.arange(13.0 * k).view(13, k).sin(), torch.arange(1.0 * out * k).view(out, k).cos()
        linear = nn.Linear(k, out, bias=False)
        with torch.inference_mode():
            for values in (weight, weight.bfloat16().float()):
                linear.weight = nn.Parameter(values, requires_grad=False)
                if not torch.allclose(PanelLinear(linear)(x), x @ values.T, atol=1e-5 * k):
                    return False
    return True
