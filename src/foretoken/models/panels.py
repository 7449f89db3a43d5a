"""Weights laid out for few rows: what a CPU does best when a handful of tree nodes is scored at a time.

torch's `linear` slows down steeply from 1 row to 5, since its kernel is made for many rows. Here every weight is read
once for five rows, or more where registers suffice (tile.py). A float32 weight whose values are bfloat16 values, as
those of nearly all published models are, is stored in half the space, and no value changes. A weight of a model that
computes in bfloat16 meets rows that are rounded to bfloat16, as there; sums are float32.
"""

from functools import cache
from typing import no_type_check

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.kernel import compile as loops
from foretoken.kernel.memory import Arena
from foretoken.kernel.quantised import KINDS, packed_bytes, unpack
from foretoken.kernel.quantised import pack as pack_quantised
from foretoken.kernel.sizes import COLUMNS, DOTTED, HALVED, WHOLE
from foretoken.models.mapped import NO_FILES, MappedFiles

PART = 64 * COLUMNS  # rows that are laid out at a time
PACKED = (torch.float32, torch.bfloat16)


class PanelLinear(nn.Module):
    """nn.Linear over panels [out / 64, words, 64]: x [..., in] -> [..., out], on a CPU, inference only.

    form: WHOLE, words are float32 weights. HALVED: two weights a word, the upper halves of their float32 values, where
    in is even and the lower halves are all zero. DOTTED: two weights a word, of a linear layer in bfloat16.
    panels: float32, or int16 [out / 64, words, 64, 2], since torch can do little with uint16.
    """

    def __init__(
        self, linear: nn.Linear | Conv1D, arena: Arena, dtype: torch.dtype | None = None, files: MappedFiles = NO_FILES
    ) -> None:
        """dtype: what the layer computes in, by default its weight's own. files: what is read of them is given back."""
        super().__init__()
        weight = linear.weight.detach()
        if isinstance(linear, Conv1D):  # GPT-2's linear layer, stored the other way round
            weight = weight.T
        self.out_features, self.in_features = weight.shape
        dotted = (dtype or weight.dtype) == torch.bfloat16
        self.form = DOTTED if dotted else HALVED if _halves(weight) else WHOLE
        # Neither parameter nor buffer: the layout can be neither saved nor moved.
        self.panels = _panels(weight, self.form, arena, files)
        self.bias = linear.bias if dtype is None or linear.bias is None else nn.Parameter(linear.bias.to(dtype), False)

    @property
    def address(self) -> int:
        """Of the panels, which are there as long as this module is."""
        return self.panels.data_ptr()

    @no_type_check  # torch.compile traces it
    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        out = product(x, self.panels, self.form, self.out_features)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        form = ("float32", "float32 in 16 bits", "bfloat16")[self.form]
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, {form}"


class PackedLinear(PanelLinear):
    """The same over panels of quantised weights, which come as kernel/quantised.py packs them.

    form: of the kind of weights. panels: uint8, in one axis.
    """

    def __init__(
        self,
        kind: str,
        panels: NDArray[np.uint8],
        in_features: int,
        out_features: int,
        bias: Float[Tensor, " o"] | None = None,
    ) -> None:
        """kind: a name among quantised.KINDS.
        panels: what quantised.pack made of the matrix, in memory or in a mapped file.
        """
        nn.Module.__init__(self)
        check_quantised(kind)
        if panels.nbytes != packed_bytes(kind, out_features, in_features):
            raise ValueError(f"{panels.nbytes} bytes are not a {kind} matrix of {in_features} x {out_features}.")
        self.in_features, self.out_features, self.kind, self.form = in_features, out_features, kind, KINDS[kind].form
        self.panels = torch.from_numpy(panels)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, {self.kind}"


class PackedEmbedding(nn.Module):
    """nn.Embedding over rows that stay in the blocks of a GGUF file: ids [...] -> float32 [..., d].

    form: of the kind of weights. raw: the rows as the file stores them, uint8 [vocabulary, bytes per row].
    """

    def __init__(self, kind: str, raw: NDArray[np.uint8], scale: float = 1.0) -> None:
        """kind: a name among quantised.KINDS. scale: what is looked up is multiplied by it."""
        super().__init__()
        known = KINDS[kind]
        self.kind, self.form, self.raw, self.scale = kind, known.form, raw, scale
        self.num_embeddings, self.embedding_dim = len(raw), raw.shape[1] // known.block_bytes * known.weights

    def forward(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n d"]:
        return self.stored(ids) * self.scale

    def stored(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n d"]:
        """What is looked up, before it is multiplied."""
        rows = unpack(self.kind, self.raw[ids.reshape(-1).numpy()])
        return torch.from_numpy(rows).view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.kind}"


# An operator of torch's own kind, so that torch.compile takes it as it is; as cheap to call as a Python function.
torch.library.define("foretoken::panel_product", "(Tensor x, Tensor panels, int form, int out_features) -> Tensor")
product = torch.ops.foretoken.panel_product.default


@torch.library.impl("foretoken::panel_product", "CPU")
def _product(x: Float[Tensor, "*n i"], panels: Tensor, form: int, out_features: int) -> Float[Tensor, "*n o"]:
    from foretoken.kernel.product import times

    k = x.shape[-1]
    rows = x.reshape(-1, k).float().contiguous().numpy()
    y = np.empty((len(rows), out_features), np.float32)
    times(rows, panels.data_ptr(), form, out_features, y, use_threads())
    return torch.from_numpy(y).view(*x.shape[:-1], out_features).to(x.dtype)


@torch.library.register_fake("foretoken::panel_product")
def _product_shape(x: Float[Tensor, "*n i"], panels: Tensor, form: int, out_features: int) -> Float[Tensor, "*n o"]:
    return x.new_empty(*x.shape[:-1], out_features)


def _halves(weight: Tensor) -> bool:
    """Whether all values of a weight are bfloat16 values, and two fill a word."""
    if weight.shape[1] % 2:
        return False
    return weight.dtype == torch.bfloat16 or all(
        torch.equal(part.bfloat16().to(part.dtype), part) for part in weight.split(PART)
    )


def _panels(weight: Tensor, form: int, arena: Arena, files: MappedFiles) -> Tensor:
    """Row by row of a panel its words become columns: a transposition of words of 32 bits, which torch does in all
    threads; a part of the rows at a time, so that there is no second copy of a large matrix."""
    out, k = weight.shape
    count, words = -(-out // COLUMNS), k if form == WHOLE else (k + 1) // 2
    columns = torch.from_numpy(arena.zeros((count, words, COLUMNS), np.int32))
    for first in range(0, out, PART):
        part = weight[first : first + PART].to(torch.float32 if form == WHOLE else torch.bfloat16)
        if form != WHOLE and k % 2:
            part = nn.functional.pad(part, (0, 1))
        rows = part.contiguous().view(torch.int32)
        whole, at = len(rows) // COLUMNS, first // COLUMNS
        columns[at : at + whole] = rows[: whole * COLUMNS].view(whole, COLUMNS, words).transpose(1, 2)
        if rest := len(rows) % COLUMNS:
            columns[at + whole, :, :rest] = rows[-rest:].T
        files.forget(weight[first : first + PART])
    return columns.view(torch.float32) if form == WHOLE else columns.view(torch.int16).unflatten(-1, (COLUMNS, 2))


def pack(model: PreTrainedModel, dtype: torch.dtype | None = None, files: MappedFiles = NO_FILES) -> None:
    """Lay out the linear weights of a model anew, in place, where it runs in float32 or bfloat16 on a CPU; else leave
    it as it is.

    Only for a model of our own that is used for nothing but inference: panels cannot be trained, saved or moved. The
    originals are freed, but for one tied to the embedding.

    Args:
        dtype: what the model is to compute in, by default its own dtype; weights that are no panels are converted.
        files: those whose weights were loaded and not changed since; what was read of them is given back.
    """
    dtype = dtype or model.dtype
    if model.device.type != "cpu":
        return
    if dtype in PACKED:
        pack_linears(model, dtype, files)
    if model.dtype != dtype:
        nn.Module.to(model, dtype)


def pack_linears(module: nn.Module, dtype: torch.dtype | None = None, files: MappedFiles = NO_FILES) -> None:
    """The same for any module on a CPU."""
    if not _works():
        return
    arena = Arena()
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D) and (dtype or child.weight.dtype) in PACKED:
                assert isinstance(child, nn.Linear | Conv1D)
                setattr(parent, name, PanelLinear(child, arena, dtype, files))
    # What is left of a file would keep its pages in memory; of an embedding few rows are ever read.
    tables = [table.weight for table in module.modules() if isinstance(table, nn.Embedding)]
    for parameter in module.parameters():
        if not any(parameter is table for table in tables):
            parameter.data = files.copied(parameter.data)


def use_threads() -> int | None:
    """As many threads as torch was given, which the compiled loops take from now on; None where it is one."""
    return loops.use_threads(torch.get_num_threads())


@cache
def check_quantised(name: str) -> None:
    """Raises ForetokenError where products with weights of a kind are wrong on this processor: they are made of other
    instructions on each, which were not all tried."""
    x, kind = torch.arange(3.0 * 256).view(3, 256).sin(), KINDS[name]
    blocks = (np.arange(70 * 256 // kind.weights * kind.block_bytes) * 37 % 251).astype(np.uint8)
    blocks = blocks.reshape(-1, kind.block_bytes)
    for at in (208,) if name == "q6_k" else (0, 2)[: 1 + kind.least]:
        blocks[:, at : at + 2] = 0, 44  # 1/16 as a float16
    raw = blocks.reshape(70, -1)
    with torch.inference_mode():
        got = product(x, torch.from_numpy(pack_quantised(name, raw)), kind.form, 70)
        want = x @ torch.from_numpy(unpack(name, raw)).T
    if not (got - want).abs().max() <= 0.02 * want.abs().max():  # rows are rounded to a 254th
        raise ForetokenError(
            f"Products with {name} weights are wrong on this processor: name a dtype, so that they are dequantised."
        )


@cache
def _works() -> bool:
    """Whether the compiled product is right on this machine: few rows and many, in one tile and in several, times a
    matrix of one chunk (tile.CHUNK) and one of many, in every form."""
    for out, k in ((70, 5), (330, 1100)):
        x, weight = torch.arange(40.0 * k).view(40, k).sin(), torch.arange(1.0 * out * k).view(out, k).cos()
        linear = nn.Linear(k, out, bias=False)
        with torch.inference_mode():
            for values in (weight, weight.bfloat16().float(), weight.bfloat16()):
                linear.weight = nn.Parameter(values, requires_grad=False)
                rows = x.to(values.dtype)
                packed, want = PanelLinear(linear, Arena()), rows.float() @ values.float().T
                for m in (1, 2, 7, 13, 29, 40):
                    if not torch.allclose(packed(rows[:m].float()), want[:m], atol=1e-5 * k):
                        return False
    return True
