"""Weights laid out for few rows: what a CPU does best when a handful of tree nodes is scored at a time.

`linear` on a CPU slows down steeply from 1 row to 5, since its kernel is made for many rows. oneDNN's packed kernel
reads every weight once; it costs some 25 us per call, so small matrices do not gain. Those are stored transposed,
which at 2 to 17 rows takes 0.6 to 0.8 of the time, and the query, key and value weights of a layer side by side, so
that one product serves all three.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foretoken.core.shapes import Float

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
    """Lay out the linear weights of a model anew, in place, where it runs in float32 on a CPU; else leave it as it is.

    Only for a model of our own that is used for nothing but inference: packed weights cannot be trained, saved or
    moved. The originals are freed, but for one tied to the embedding, which stays as it is.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32 or not _works():
        return
    embedding = model.get_input_embeddings()
    tied = getattr(embedding, "weight", None)
    for parent in list(model.modules()):
        small: dict[str, nn.Linear] = {}
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear | Conv1D) or type(child) not in (nn.Linear, Conv1D):
                continue
            if child.weight.dtype != torch.float32:
                continue
            if child.weight.numel() >= SMALLEST:
                setattr(parent, name, PackedLinear(child))
            elif isinstance(child, nn.Linear) and child.weight is not tied:
                small[name] = child
        together = [small.pop(name) for name in ("q_proj", "k_proj", "v_proj") if name in small]
        if together:
            _transpose(together)
        for linear in small.values():
            _transpose([linear])


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


def _transpose(linears: Sequence[nn.Linear]) -> None:
    """Store the weights by input rather than by output, side by side; shapes and values stay."""
    stored = torch.cat([p.weight.detach() for p in linears]).T.contiguous().T  # strides (1, all outputs)
    _split(linears, "weight", stored)
    if all(p.bias is not None for p in linears):
        _split(linears, "bias", torch.cat([p.bias.detach() for p in linears]))


def _split(linears: Sequence[nn.Linear], name: str, joint: Tensor) -> None:
    for linear, part in zip(linears, joint.split([p.out_features for p in linears]), strict=True):
        setattr(linear, name, nn.Parameter(part, requires_grad=False))


def _joint(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over parts that follow each other in one storage, along their first axis."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != end or part.stride() != first.stride():
            return None
        end += len(part) * part.stride(0)
    return first.detach().as_strided((sum(len(p) for p in parts), *first.shape[1:]), first.stride())


def _works() -> bool:
    """Whether this build of torch has the packed kernel for float32, and it is right."""
    weight, x = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(2, 3)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        y = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(y, x @ weight.T)
