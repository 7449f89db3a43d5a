"""Load GGUF files as models whose linear layers and embedding hold the file's quantised weights, packed."""

import functools
import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from foretoken import kernel, models
from foretoken.catalogue.kept import WEIGHTS, kept
from foretoken.core.making import making
from foretoken.gguf.folder import Contents, contents, write_packed
from foretoken.gguf.stored import PLAIN, packed
from foretoken.kernel.compile import compile_ahead
from foretoken.kernel.processor import FEATURES, MATRIX, NAME
from foretoken.models.causal_lm import CausalLM
from foretoken.models.hf_model import HFModel
from foretoken.models.layout import layout
from foretoken.models.llama_kernel import llama_kernel
from foretoken.models.mapped import read_ahead, weight_files
from foretoken.models.panels import PackedEmbedding, PackedLinear, PanelLinear, one_thread
from foretoken.models.panels import pack as lay_out
from foretoken.models.skeleton import Skeleton, modules_of, read_skeleton, write_skeleton

M = TypeVar("M", bound=HFModel | Skeleton)
Weights = Mapping[str, tuple[Tensor, str]]  # name -> (values or packed bytes, its kind of blocks in the file or "")


class DequantisedWarning(UserWarning):
    """A warning that some weights of a GGUF file take more memory than in the file."""


def packed_model(source: str) -> HFModel | Skeleton:
    """Return the model in a GGUF file for a CPU, its quantised weights packed as they are.

    Quantised weights of a kind that the kernel does not have become bfloat16, and one warning says so. The model
    computes in float32, or in bfloat16 if all matrices of the file are bfloat16.

    source: the path of the file.

    Returns the model's skeleton where it was kept, which it is if our kernel runs the model; else the model. Raises
    ForetokenError for a file that cannot be read.
    """
    folder = laid_out(Path(source), compile_ahead)
    if folder is None:
        found = contents(Path(source), compile_ahead)
        # The configuration as if it had been written and read again: its order decides the model's fingerprint.
        config = type(found.config).from_dict(json.loads(found.config.to_json_string()))
        weights = _in_memory(found)
        model = without_weights(config, found.generation_config, _dtype(weights))
    else:
        weights = kept_weights(folder)
        model = _skeleton(Path(source), folder, weights) or _of(folder, weights)
    _warn_of_dequantised(source, weights)
    return _laid_out(model, weights)


def _of(folder: Path, weights: Weights) -> HFModel:
    """Return transformers' model of a cache folder of a GGUF file; `weights`, those in it, are not put in."""
    return without_weights(*kept_configs(folder), _dtype(weights))


def _skeleton(source: Path, folder: Path, weights: Weights) -> Skeleton | None:
    """Return the skeleton of the model in a GGUF file, without weights; it is made and kept at the first call.

    It is kept apart from the weights, since it also depends on transformers and on the code that runs it, and
    tokenizers are read without it. Before it is kept it passes the probe, so that later starts need none.

    source: the file.
    folder: the cache folder with its configurations.
    weights: those in the folder.

    Returns None where it cannot be kept, and for a model that our kernel does not run. Raises ForetokenError for a
    model that fails the probe.
    """

    def write(own: Path) -> None:
        own.mkdir(parents=True)
        model = _of(folder, weights)
        modules = modules_of(model)
        _laid_out(model, weights).eval()
        # An embedding that is neither packed nor torch's own, such as Gemma's, has code that draft heads call.
        known = type(model.get_input_embeddings()) in (PackedEmbedding, nn.Embedding)
        if known and llama_kernel(model) is not None:
            with one_thread():
                write_skeleton(own, modules, model, layout(model))
        if (written := read(own)) is not None:
            CausalLM(_laid_out(written, weights))  # by which it is probed

    def read(own: Path) -> Skeleton | None:
        found = read_skeleton(own, GenerationConfig.from_pretrained(folder), without_weights)
        if found is not None:
            found.config.name_or_path = str(folder)
        return found

    own = kept(source, [source], f"skeletons/{version('transformers')}", write, _what_runs())
    found = None if own is None else read(own)
    if found is not None:
        found.probed = True
    return found


@functools.cache
def _what_runs() -> str:
    """Return a hash of what runs a packed model, apart from transformers: our code, its compiler and the processor."""
    files = [path for part in (kernel, models) for path in sorted(Path(part.__path__[0]).glob("*.py"))]
    code = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return hashlib.sha256(repr([version("numba"), NAME, FEATURES, MATRIX, code]).encode()).hexdigest()


def _laid_out(model: M, weights: Weights) -> M:
    """Put the weights of a GGUF file into a model, all matrices packed, and return it."""
    lay_out(filled(model, weights), _dtype(weights), weight_files())
    return model


def _dtype(weights: Weights) -> torch.dtype:
    """Return what a model with some `weights` computes in."""
    matrices = [tensor.dtype for tensor, _ in weights.values() if tensor.ndim > 1 or tensor.dtype == torch.uint8]
    return torch.bfloat16 if all(found == torch.bfloat16 for found in matrices) else torch.float32


def kept_weights(folder: Path) -> Weights:
    """Return the weights in a `folder` from `catalogue.kept`, as views of the mapped file."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        names, kinds = file.keys(), file.metadata()
        return {name: (file.get_tensor(name), kinds.get(name, "")) for name in names}


def kept_configs(folder: Path) -> tuple[PreTrainedConfig, GenerationConfig]:
    """Return the configurations, of model and generation, in a `folder` from `catalogue.kept`."""
    from transformers import AutoConfig  # takes a second

    return AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)


def filled(model: M, weights: Weights) -> M:
    """Put weights into a model, in place, and return it.

    Packed bytes become packed modules. Other weights are converted to the model's dtype, except those of linear layers,
    which `panels.pack` lays out from any dtype.

    model: from `without_weights`.
    weights: by their names in transformers. An LM head that is not among them is tied to the embedding.
    """
    dtype = model.dtype
    blocks = {name: tensor for name, (tensor, _) in weights.items() if tensor.dtype == torch.uint8}
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in blocks}
    read_ahead([blocks[name] for name, owner in owners.items() if isinstance(owner, nn.Linear)])  # not the embedding
    for name, (tensor, kind) in weights.items():
        path, _, part = name.rpartition(".")
        module: Any = model.get_submodule(path)
        if tensor.dtype == torch.uint8 and isinstance(module, nn.Linear):
            bias, _ = weights.get(f"{path}.bias", (None, ""))
            sizes = module.in_features, module.out_features
            model.set_submodule(path, PackedLinear(kind, tensor.numpy(), *sizes, bias))
        elif tensor.dtype == torch.uint8:
            scale = getattr(module, "scalar_embed_scale", 1.0)  # Gemma's
            model.set_submodule(path, PackedEmbedding(kind, tensor.numpy(), scale=scale))
        elif not isinstance(module, PackedLinear):  # a packed layer has its bias already
            own = type(module) is nn.Linear and part == "weight"
            values = tensor if own else tensor.to(dtype)
            computed = part in dict(module.named_buffers(recurse=False))
            setattr(module, part, values if computed else nn.Parameter(values, requires_grad=False))
    if model.config.tie_word_embeddings and "lm_head.weight" not in weights:
        head: Any = model.get_output_embeddings()
        head.weight = model.get_input_embeddings().weight
    return model


def dequantised_model(source: str, dtype: torch.dtype) -> HFModel:
    """Return the model in the GGUF file at the path `source`, with ordinary weights in `dtype`."""
    found = contents(Path(source))
    weights: dict[str, tuple[Tensor, str]] = {}
    for weight in found.weights:
        values, done = torch.empty(weight.shape, dtype=dtype), 0
        for chunk in weight.chunks():
            values.view(-1)[done : done + len(chunk)] = torch.from_numpy(np.require(chunk, requirements="W"))
            done += len(chunk)
        weights[weight.name] = values, ""
    return filled(without_weights(found.config, found.generation_config, dtype), weights)


def stored_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer in the GGUF file at the path `source`."""
    folder = laid_out(Path(source))
    return contents(Path(source)).tokenizer if folder is None else PreTrainedTokenizerFast.from_pretrained(folder)


def num_weights(model: nn.Module) -> int:
    """Return the number of weights of `model`, packed or not, without those of a packed embedding."""
    panels = [module for module in model.modules() if isinstance(module, PanelLinear)]
    others = sum(weight.numel() for weight in model.parameters())
    return others + sum(module.in_features * module.out_features for module in panels)


def laid_out(source: Path, accepted: Callable[[], object] = lambda: None) -> Path | None:
    """Return a cache folder with configuration, tokenizer and packed weights of a GGUF file, which is made if need be.

    source: the file.
    accepted: as in `contents`; also called where the folder is there, and maybe twice.

    Returns None where it cannot be kept. Raises ForetokenError for a file that is not a whole GGUF file of a known
    architecture.
    """

    def make(folder: Path) -> None:
        found = contents(source, accepted)
        write_packed(found, folder, WEIGHTS)

    folder = kept(source, [source], "gguf", make)
    if folder is not None:
        accepted()
    return folder


def _in_memory(found: Contents) -> Weights:
    """Return the packed weights of a GGUF file without writing them to the cache."""
    made: dict[str, tuple[Tensor, str]] = {}
    for stored in packed(found.weights):
        raw = np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in stored.make()])
        made[stored.name] = torch.from_numpy(raw).view(PLAIN[stored.dtype]).view(stored.shape), stored.kind
    return made


def _warn_of_dequantised(source: str, weights: Weights) -> None:
    found = {name: (tensor, kind) for name, (tensor, kind) in weights.items() if kind and tensor.dtype != torch.uint8}
    if not found:
        return
    names, kinds = list(found), sorted({kind for _, kind in found.values()})
    need = sum(tensor.nbytes for tensor, _ in found.values())
    in_file = 0.0
    for tensor, kind in found.values():
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
        in_file += tensor.numel() / block * size
    warnings.warn(
        f"The kernel does not read weights of type {', '.join(kinds)}: {few(names)} of {source} run in bfloat16 and "
        f"take {need / 1e6:.0f} MB instead of {in_file / 1e6:.0f} MB.",
        DequantisedWarning,
        stacklevel=3,
    )


def few(names: list[str]) -> str:
    """Return up to three of the `names` as text, and how many others there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def without_weights(config: PreTrainedConfig, generation: GenerationConfig, dtype: torch.dtype) -> HFModel:
    """Return a model whose parameters have no values and take no memory; its buffers are computed as usual.

    config: the configuration, which names the class.
    generation: the generation configuration.
    dtype: that of the model.
    """
    from transformers import AutoModelForCausalLM  # takes seconds

    with making, _no_parameters():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = generation
    return model


@contextmanager
def _no_parameters() -> Iterator[None]:
    """Let parameters that this thread makes inside the block take no memory; buffers are made as usual."""
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == thread:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
