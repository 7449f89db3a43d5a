"""Weights laid out for few rows: what a CPU does best when a handful of tree nodes is scored at a time.

On this CPU `linear` slows down from 1 to 5 rows almost as if it were called five times, since its kernel is made for
many rows. oneDNN's packed kernel reads every weight once. It costs some 25 us per call, so small matrices stay.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ROWS = 8  # rows that the packed layout is made for; the kernel takes any number
SMALLEST = 2**19  # weights from which on the packed kernel wins at 5 rows by more than it may lose at 1


class PackedLinear(nn.Module):
    """nn.Linear over a weight in oneDNN's own layout: x [..., in] -> [..., out], float32 on a CPU, inference only."""

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        weight = linear.weight.detach()
        if isinstance(linear, Conv1D):  # GPT-2's linear layer, stored the other way round
            weight = weight.T.contiguous()
        self.out_features, self.in_features = weight.shape
        # Neither parameter nor buffer: the layout is opaque, so it can be neither saved nor moved.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.bias = linear.bias

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack(model: PreTrainedModel) -> None:
    """Pack the linear layers of a model in place, where it runs in float32 on a CPU; else leave it as it is.

    Only for a model of our own that is used for nothing but inference: packed weights cannot be trained, saved or
    moved. The originals are freed, but for one tied to the embedding. Matrices below SMALLEST stay; the query, key
    and value ones of a layer are placed side by side, so that one product can serve all three.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32 or not _works():
        return
    for parent in list(model.modules()):
        projections = [getattr(parent, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        linears = [p for p in projections if type(p) is nn.Linear]
        if len(linears) == 3 and all(p.weight.numel() < SMALLEST for p in linears):
            _place_side_by_side(linears)
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear | Conv1D) or type(child) not in (nn.Linear, Conv1D):
                continue
            if child.weight.dtype == torch.float32 and child.weight.numel() >= SMALLEST:
                setattr(parent, name, PackedLinear(child))


def side_by_side(linears: Sequence[nn.Module]) -> tuple[Float[Tensor, "o i"], Float[Tensor, " o"] | None] | None:
    """The weight and bias of linear layers as one, without a copy; None unless `pack` placed them so."""
    if not all(type(p) is nn.Linear for p in linears):
        return None
    weight = _joint([p.weight for p in linears if isinstance(p, nn.Linear)])
    if weight is None:
        return None
    biases = [p.bias for p in linears if isinstance(p, nn.Linear) and p.bias is not None]
    if not biases:
        return weight, None
    bias = _joint(biases) if len(biases) == len(linears) else None
    return None if bias is None else (weight, bias)


def _place_side_by_side(linears: Sequence[nn.Linear]) -> None:
    for name in ("weight", "bias"):
        parts = [getattr(p, name) for p in linears]
        if any(p is None for p in parts):
            continue
        joint = torch.cat([p.detach() for p in parts])
        for linear, part in zip(linears, joint.split([len(p) for p in parts]), strict=True):
            setattr(linear, name, nn.Parameter(part, requires_grad=False))


def _joint(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over parts that follow each other in one storage, along their first axis."""
    end = parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
        if not same or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    size = (sum(len(p) for p in parts), *parts[0].shape[1:])
    return parts[0].detach().as_strided(size, parts[0].stride())


def _works() -> bool:
    """Whether this build of torch has the packed kernel for float32, and it is right."""
    weight, x = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(2, 3)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        y = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(y, x @ weight.T)
