"""Models as our kernel runs them: made of weights that are mapped files, and, from the second start on, of a skeleton.

transformers makes a model once. What it consists of is kept (skeleton.py) after the model has passed the probe, so that
later starts need neither transformers' code nor the probe.
"""

import functools
import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig

from foretoken import kernel, models
from foretoken.catalogue.kept import drop_unused, kept
from foretoken.gguf.tensors import ROUTER
from foretoken.kernel.processor import FEATURES, MATRIX, NAME
from foretoken.models.causal_lm import CausalLM
from foretoken.models.experts import STACKS, put_stack, stack_sizes
from foretoken.models.hf_model import HFModel
from foretoken.models.layout import layout
from foretoken.models.llama_kernel import FAMILY, llama_kernel
from foretoken.models.mapped import read_ahead, weight_files
from foretoken.models.panels import PackedEmbedding, PackedLinear, one_thread
from foretoken.models.panels import pack as lay_out
from foretoken.models.skeleton import Skeleton, modules_of, read_skeleton, without_weights, write_skeleton

M = TypeVar("M", bound=HFModel | Skeleton)
Weights = Mapping[str, tuple[Tensor, str]]  # name -> (values or packed bytes, its kind of blocks in the file or "")


def kept_model(
    source: Path, name: str, make: Callable[[], HFModel], weights: Callable[[], Weights]
) -> HFModel | Skeleton:
    """Return a model over weights in mapped files; its skeleton where our kernel runs it.

    The skeleton is made and kept at the first call. It is kept apart from weights and tokenizers, since it also depends
    on transformers and on the code that runs it.

    source: the model's file or folder.
    name: where it comes from, for its configuration.
    make: makes it by transformers' code, without values or with those of `weights`; else it is not kept.
    weights: reads them.

    Returns the skeleton, laid out, where it can be kept; else the model that was made, laid out if it had no values.
    Raises ForetokenError for a model that fails the probe.
    """
    made: list[HFModel | Skeleton] = []

    def write(own: Path) -> None:
        own.mkdir(parents=True)
        made[:] = [model := make()]
        values = weights()
        if type(model).__name__ not in FAMILY or not _holds(model, values):
            return
        modules = modules_of(model)
        laid_out(model, values).eval()
        # An embedding that is neither packed nor torch's own, such as Gemma's, has code that draft heads call.
        known = type(model.get_input_embeddings()) in (PackedEmbedding, nn.Embedding)
        usual: Any = model.config  # a skeleton makes the whole model with transformers' usual attention
        if known and usual._attn_implementation == "sdpa" and llama_kernel(model) is not None:
            with one_thread():
                write_skeleton(own, modules, model, layout(model))
        if (written := read_skeleton(own)) is not None:
            made.clear()
            del model
            gc.collect()  # its memory is needed, and it stands in a circle of references
            written.config.name_or_path = name
            CausalLM(laid_out(written, values))  # by which it is probed
            made[:] = [written]

    own = kept(source, f"skeletons/{version('transformers')}-{_what_runs()}", write)
    if own is not None and made:
        drop_unused(own)
    found = None if own is None or made else read_skeleton(own)
    model = found or (made[0] if made else make())
    model.config.name_or_path = name
    if isinstance(model, Skeleton):
        model.probed = True
    return laid_out(model, weights()) if any(weight.is_meta for weight in model.parameters()) else model


def _holds(model: HFModel, weights: Weights) -> bool:
    """Whether a model has the `weights` and no others, by name and bit for bit, all floats, or no values yet."""
    own, parameters = model.state_dict(), {name for name, _ in model.named_parameters()}
    if any(own[name].is_meta for name in parameters):
        return True
    files = weight_files()

    def same(one: Tensor, other: Tensor) -> bool:
        equal = one.is_floating_point() and one.dtype == other.dtype and torch.equal(one, other)
        for each in one, other:
            files.forget(each)
        return equal

    return parameters <= weights.keys() <= own.keys() and all(
        same(values, own[name]) for name, (values, _) in weights.items()
    )


@functools.cache
def _what_runs() -> str:
    """Return 12 digits of what runs a model, apart from transformers: our code, its compiler and the processor."""
    files = [path for part in (kernel, models) for path in sorted(Path(part.__path__[0]).glob("*.py"))]
    code = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return hashlib.sha256(repr([version("numba"), NAME, FEATURES, MATRIX, code]).encode()).hexdigest()[:12]


def laid_out(model: M, weights: Weights) -> M:
    """Put weights into a model, all matrices in the form that our kernel reads, and return it."""
    lay_out(filled(model, weights), computes_in(model))
    return model


def computes_in(model: HFModel | Skeleton) -> torch.dtype:
    """Return what a model with its weights computes in on a CPU where no dtype was named: its own but for two cases.

    float32 holds all values of float16, for which processors have no units. And the kernel mixes no bfloat16 with
    quantised layers, beside which those stay whose rows fill no blocks.
    """
    mixed = {nn.Linear, PackedLinear} <= {type(module) for module in model.modules()}
    return torch.float32 if mixed or model.dtype == torch.float16 else model.dtype


def dtype_of(weights: Weights) -> torch.dtype:
    """Return what a model with some `weights` computes in."""
    matrices = [  # without convolutions [channels, 1, taps] and routers, which GGUF files have in float32
        tensor.dtype
        for name, (tensor, _) in weights.items()
        if tensor.dtype == torch.uint8 or (tensor.ndim > 1 and tensor.shape[1] > 1 and not name.endswith(ROUTER))
    ]
    return torch.bfloat16 if all(found == torch.bfloat16 for found in matrices) else torch.float32


def mapped_weights(files: Sequence[Path]) -> Weights:
    """Return the weights in safetensors `files` as views of the mapped files; one that is in several of the last.

    What is quantised in them is named in their metadata, by name of the weight.
    """
    weights: dict[str, tuple[Tensor, str]] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            names, kinds = file.keys(), file.metadata() or {}
            weights |= {name: (file.get_tensor(name), kinds.get(name, "")) for name in names}
    return weights


def filled(model: M, weights: Weights) -> M:
    """Put weights into a model, in place, and return it.

    Packed bytes become packed modules. Other weights are converted to the model's dtype, except those of linear layers,
    which `panels.pack` lays out from any dtype.

    model, weights: from `without_weights` and `mapped_weights`. An LM head that is not among the weights is tied.
    """
    dtype = model.dtype
    blocks = {name: tensor for name, (tensor, _) in weights.items() if tensor.dtype == torch.uint8}
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in blocks}
    rows = type(model.get_input_embeddings())  # of which few are ever read
    read_ahead([blocks[name] for name, owner in owners.items() if type(owner) is not rows])
    for name, (tensor, kind) in weights.items():
        path, _, part = name.rpartition(".")
        module: Any = model.get_submodule(path)
        if tensor.dtype == torch.uint8 and isinstance(module, nn.Linear):
            bias, _ = weights.get(f"{path}.bias", (None, ""))
            sizes = module.in_features, module.out_features
            model.set_submodule(path, PackedLinear(kind, tensor.numpy(), *sizes, bias))
        elif tensor.dtype == torch.uint8 and part in STACKS:
            put_stack(module, part, PackedLinear(kind, tensor.numpy(), *stack_sizes(module, part)))
        elif tensor.dtype == torch.uint8:
            scale = getattr(module, "scalar_embed_scale", 1.0)  # Gemma's
            model.set_submodule(path, PackedEmbedding(kind, tensor.numpy(), scale=scale))
        elif not isinstance(module, PackedLinear):  # a packed layer has its bias already
            own = type(module) is nn.Linear and part == "weight"
            values = tensor if own else tensor.to(dtype)
            computed = part in dict(module.named_buffers(recurse=False))
            setattr(module, part, values if computed else nn.Parameter(values, requires_grad=False))
    head: Any = model.get_output_embeddings()
    if model.config.tie_word_embeddings and "lm_head.weight" not in weights and not isinstance(head, PackedLinear):
        head.weight = model.get_input_embeddings().weight
    return model


def bare_model(folder: Path, dtype: torch.dtype | None = None) -> HFModel:
    """Return the model in a `folder` from `catalogue.kept`, without weights; dtype: by default its checkpoint's."""
    from transformers import AutoConfig  # takes a second

    config: Any = AutoConfig.from_pretrained(folder)
    return without_weights(config, GenerationConfig.from_pretrained(folder), dtype or config.dtype)
