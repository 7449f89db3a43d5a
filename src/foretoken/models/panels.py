"""Linear layers whose weights are laid out in panels, so that a CPU is fast when it scores a handful of tree nodes.

torch's `linear` slows down steeply from 1 row of input to 5, since its kernel is made for many rows. Here every weight
is read once for several rows (kernel/tile.py says how many). A float32 weight whose values are all
bfloat16 values, as those of nearly all published models are, is stored in half the space without any change. In a model
that computes in bfloat16, the inputs are rounded to bfloat16, as torch does there; sums are float32.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import chain
from typing import Any, no_type_check

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.kernel import compile as loops
from foretoken.kernel.memory import Arena
from foretoken.kernel.quantised import KINDS, packed_bytes, unpack
from foretoken.kernel.sizes import COLUMNS, DOTTED, HALVED, WHOLE
from foretoken.models.experts import STACKS, PanelMixture, is_mixture, router_of
from foretoken.models.mapped import NO_FILES, MappedFiles, weight_files

PART = 64 * COLUMNS  # rows of a matrix that are laid out at a time
PACKED = (torch.float32, torch.bfloat16)  # the dtypes of models whose weights can be laid out


class PanelLinear(nn.Module):
    """A linear layer over panels, for inference on a CPU.

    A panel holds 64 outputs. A *word* is 32 bits of an output's weights, and stands beside the same word of the other
    outputs.

    in_features, out_features: as in nn.Linear.
    form: WHOLE: a word is one float32 weight. HALVED: a word is two float32 weights of which only the upper halves are
        stored; in_features is even and all lower halves are zero. DOTTED: a word is two weights of a layer that
        computes in bfloat16.
    panels: float32 [out / 64, words, 64], or int16 [out / 64, words, 64, 2], since torch can do little with uint16. The
        last panel is filled up with zeros.
    bias: the bias [out] or None.
    """

    def __init__(
        self, linear: nn.Linear | Conv1D, arena: Arena, dtype: torch.dtype | None = None, files: MappedFiles = NO_FILES
    ) -> None:
        """Lay out the weights of a layer.

        linear: the layer, which is not changed.
        arena: where the panels are allocated.
        dtype: what the layer computes in, by default the dtype of its weight.
        files: the mapped files of which `linear` may hold views; pages that were read are given back to the system.
        """
        super().__init__()
        weight = linear.weight.detach()
        if isinstance(linear, Conv1D):  # GPT-2's linear layer, stored the other way round
            weight = weight.T
        self.out_features, self.in_features = weight.shape
        dotted = (dtype or weight.dtype) == torch.bfloat16
        self.form = DOTTED if dotted else HALVED if _halves(weight) else WHOLE
        # Neither a parameter nor a buffer, since panels must be neither saved nor moved.
        self.panels = _panels(weight, self.form, arena, files)
        self.bias = linear.bias if dtype is None or linear.bias is None else nn.Parameter(linear.bias.to(dtype), False)

    @property
    def weight(self) -> Float[Tensor, " none"]:
        """An empty tensor in the place of the weight: the code of some models asks for its dtype, and for no more."""
        return torch.empty(0, dtype=torch.bfloat16 if self.form == DOTTED else torch.float32)

    @property
    def address(self) -> int:
        """The memory address of the panels, which live as long as this module."""
        return self.panels.data_ptr()

    @no_type_check  # torch.compile traces it
    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        """Return the layer's outputs [..., out] for inputs x [..., in], in the dtype of x."""
        out = product(x, self.panels, self.form, self.out_features)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        kind = getattr(self, "kind", None) or ("float32", "float32 in 16 bits", "bfloat16")[self.form]
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, {kind}"


class PackedLinear(PanelLinear):
    """A linear layer over panels of quantised weights, which are packed by kernel/quantised.py.

    kind: a name among quantised.KINDS. form: the number of that kind. panels: their bytes, uint8 [bytes].
    """

    def __init__(
        self,
        kind: str,
        panels: NDArray[np.uint8],
        in_features: int,
        out_features: int,
        bias: Float[Tensor, " o"] | None = None,
    ) -> None:
        """Use panels that packing.to_panels returned for a matrix, in memory or in a mapped file.

        in_features, out_features, bias: as in nn.Linear.

        Raises ForetokenError where this processor computes wrong products with such weights, and ValueError where the
        number of bytes does not fit.
        """
        nn.Module.__init__(self)
        check_quantised(kind)
        if panels.nbytes != packed_bytes(kind, out_features, in_features):
            raise ValueError(f"{panels.nbytes} bytes are not a {kind} matrix of {in_features} x {out_features}.")
        self.in_features, self.out_features, self.kind, self.form = in_features, out_features, kind, KINDS[kind].form
        self.panels = torch.from_numpy(panels)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class PackedEmbedding(nn.Module):
    """An embedding over rows that stay quantised, in the blocks of a GGUF file.

    kind: a name among quantised.KINDS. form: the number of that kind.
    raw: the rows as the file stores them, uint8 [vocabulary, bytes per row].
    scale: what is looked up is multiplied by it.
    """

    def __init__(self, kind: str, raw: NDArray[np.uint8], scale: float = 1.0) -> None:
        super().__init__()
        known = KINDS[kind]
        self.kind, self.form, self.raw, self.scale = kind, known.form, raw, scale
        self.num_embeddings, self.embedding_dim = len(raw), raw.shape[1] // known.block_bytes * known.weights

    def forward(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n d"]:
        """Return the embeddings of the tokens `ids` [...], float32 [..., d]."""
        return self.stored(ids) * self.scale

    def stored(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n d"]:
        """Return the stored rows of the tokens `ids` [...], dequantised but not multiplied by the scale [..., d]."""
        rows = unpack(self.kind, self.raw[ids.reshape(-1).numpy()])
        return torch.from_numpy(rows).view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.kind}"


# A torch operator, so that torch.compile does not trace into it; it is as cheap to call as a Python function.
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
    """Whether all values of a weight are bfloat16 values, and their number per output is even."""
    if weight.shape[1] % 2:
        return False
    return weight.dtype == torch.bfloat16 or all(
        torch.equal(part.bfloat16().to(part.dtype), part) for part in weight.split(PART)
    )


def _panels(weight: Tensor, form: int, arena: Arena, files: MappedFiles) -> Tensor:
    """Return the panels of a weight [out, in].

    Outputs and words change places: a transposition of words of 32 bits, which torch does in all threads. It is done
    for a part of the outputs at a time, so that there is no second copy of a large matrix.
    """
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


def pack(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Lay out the linear weights of a model on a CPU in panels, in place, where it is to run in float32 or bfloat16.

    This is only for a model that nobody else holds and that is used for inference alone: panels cannot be trained,
    saved or moved. The original weights are freed, apart from one that is tied to the embedding. Those that are views
    of mapped files must be unchanged since they were loaded.

    model: the model; one on another device is left as it is.
    dtype: what the model is to compute in, by default its own dtype; weights outside panels are converted to it.
    """
    own: Any = model  # transformers' or a skeleton
    dtype = dtype or own.dtype
    if own.device.type != "cpu":
        return
    if dtype in PACKED:
        pack_linears(model, dtype)
    if own.dtype != dtype:
        nn.Module.to(model, dtype)


def pack_linears(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace all linear layers inside a module on a CPU by layers over panels.

    Nothing is replaced where the compiled product is found to be wrong on this machine, and no layer that
    `keeps_weight`.

    module: the module, whose children change.
    dtype: as in `pack`; without one each layer computes in that of its weight, and only float32 and bfloat16 ones are
        replaced.
    """
    linears: list[tuple[nn.Module, str]] = []  # by name, so that each one's weight is freed once it is replaced
    mixtures: list[tuple[nn.Module, str]] = []
    for path, parent in module.named_modules():
        for name, child in parent.named_children():
            known = type(child) in (nn.Linear, Conv1D) and (dtype or child.weight.dtype) in PACKED
            if known and not keeps_weight(module, f"{path}.{name}"):
                linears.append((parent, name))
            elif is_mixture(child):
                mixtures.append((parent, name))
    if linears and not _works():
        return
    arena, files = Arena(), weight_files()
    for parent, name in linears:
        setattr(parent, name, PanelLinear(getattr(parent, name), arena, dtype, files))
    for parent, name in mixtures:
        setattr(parent, name, _mixture(getattr(parent, name), arena, dtype, files))
    # Other weights are copied, since as views of a file they would keep its pages in memory. Embeddings stay: only few
    # of their rows are ever read.
    tables = [table.weight for table in module.modules() if isinstance(table, nn.Embedding)]
    for parameter in module.parameters():
        if not any(parameter is table for table in tables):
            parameter.data = files.copied(parameter.data)


def _mixture(block: Any, arena: Arena, dtype: torch.dtype | None, files: MappedFiles) -> PanelMixture:
    """Return an MLP with experts over panels. Its router is in float32 always: rounding may change who is chosen.

    block: what `is_mixture`, whose stacks may be quantised already.
    arena, dtype, files: as in PanelLinear.
    """

    def laid_out(weight: Tensor | PanelLinear, dtype: torch.dtype | None) -> PanelLinear:
        if isinstance(weight, PanelLinear):
            return weight
        linear = nn.Linear(1, 1, bias=False, device="meta")  # elsewhere it would draw random weights
        linear.weight = nn.Parameter(weight.detach().flatten(0, -2), requires_grad=False)
        return PanelLinear(linear, arena, dtype, files)

    router = laid_out(router_of(block).weight, torch.float32)
    return PanelMixture(block, router, *[laid_out(getattr(block.experts, name), dtype) for name in STACKS])


def keeps_weight(model: nn.Module, layer: str) -> bool:
    """Whether transformers keeps a layer of a model in float32, whatever dtype the others have.

    The code of such models reads the weight of such a layer instead of calling it, as the router of LongCat does.

    model: the model. layer: the layer's name in it.
    """
    kept = (getattr(model, f"_keep_in_fp32_modules{which}", None) or () for which in ("", "_strict"))
    return any(re.search(rf"(^|\.){name}(\.|$)", f"{layer}.weight") for name in chain(*kept))


def use_threads() -> int | None:
    """Let compiled loops use as many threads as torch; return their number, None where it is one."""
    return None if _alone.get() else loops.use_threads(torch.get_num_threads())


_alone = ContextVar("alone", default=False)  # whether products use one thread


@contextmanager
def one_thread() -> Iterator[None]:
    """Have products use one thread inside `with`, the few of a start: loops for several take longer to compile."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


@cache
def check_quantised(name: str) -> None:
    """Raise ForetokenError where products with weights of the kind `name` are wrong on this processor.

    The products use other instructions on each kind of processor, and not all of them could be tried.
    """
    from foretoken.kernel.packing import to_panels

    x, kind = torch.arange(3 * 256, dtype=torch.float32, device="cpu").view(3, 256).sin(), KINDS[name]
    blocks = (np.arange(70 * 256 // kind.weights * kind.block_bytes) * 37 % 251).astype(np.uint8)
    blocks = blocks.reshape(-1, kind.block_bytes)
    for at in (208,) if name == "q6_k" else (0, 2)[: 1 + kind.least]:
        blocks[:, at : at + 2] = 0, 44  # 1/16 as a float16
    raw = blocks.reshape(70, -1)
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), one_thread():
        got = product(x, torch.from_numpy(to_panels(name, raw)), kind.form, 70)
        want = x @ torch.from_numpy(unpack(name, raw)).T
    if not (got - want).abs().max() <= 0.02 * want.abs().max():  # the product rounds input rows to 8 bits
        raise ForetokenError(
            f"Products with {name} weights are wrong on this processor: name a dtype, so that they are dequantised."
        )


@cache
def _works() -> bool:
    """Whether the compiled product is right on this machine, for every form of weights that are not quantised.

    It is tried with few rows of input and many, in one tile and in several, and with a matrix of one chunk (tile.CHUNK)
    and one of many.
    """
    for out, k in ((70, 5), (330, 1100)):
        numbers = torch.arange(out * k, dtype=torch.float32, device="cpu")
        x, weight = numbers[: 40 * k].view(40, k).sin(), numbers.view(out, k).cos()
        linear = nn.Linear(k, out, bias=False, device="meta")  # elsewhere it would draw random weights
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            for values in (weight, weight.bfloat16().float(), weight.bfloat16()):
                linear.weight = nn.Parameter(values, requires_grad=False)
                rows = x.to(values.dtype)
                packed, want = PanelLinear(linear, Arena()), rows.float() @ values.float().T
                for m in (1, 2, 7, 13, 29, 40):
                    if not torch.allclose(packed(rows[:m].float()), want[:m], atol=1e-5 * k):
                        return False
    return True
