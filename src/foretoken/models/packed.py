"""GGUF files -> models whose linear layers and embedding hold the weights as the file has them, packed."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from foretoken.catalogue.kept import WEIGHTS, kept
from foretoken.gguf.folder import Contents, contents, write_packed
from foretoken.gguf.stored import PLAIN, packed
from foretoken.models.mapped import weight_files
from foretoken.models.panels import PackedEmbedding, PackedLinear, PanelLinear
from foretoken.models.panels import pack as lay_out

Weights = Mapping[str, tuple[Tensor, str]]  # each with its type in the file, "" for what is not quantised there


class DequantisedWarning(UserWarning):
    """Some weights of a GGUF file take more memory than in the file."""


def packed_model(source: str) -> PreTrainedModel:
    """The model in a GGUF file, its quantised weights as they are there.

    All else, of a type that the kernel does not have, is in bfloat16, of which one warning tells. The model computes in
    float32; in bfloat16 if all matrices of the file are bfloat16.
    Raises ForetokenError for a file that cannot be read.
    """
    folder = _kept(Path(source))
    if folder is None:
        found = contents(Path(source))
        # As a file has it that was written and read again, in the same order, on which the fingerprint depends.
        config = type(found.config).from_dict(json.loads(found.config.to_json_string()))
        generation, weights = found.generation_config, _in_memory(found)
    else:
        config, generation, weights = read_kept(folder)
    _warn_of_dequantised(source, weights)
    matrices = [tensor.dtype for tensor, _ in weights.values() if tensor.ndim > 1 or tensor.dtype == torch.uint8]
    dtype = torch.bfloat16 if all(found == torch.bfloat16 for found in matrices) else torch.float32
    model = filled(without_weights(config, generation, dtype), weights)
    lay_out(model, dtype, weight_files())
    return model


def read_kept(folder: Path) -> tuple[PreTrainedConfig, GenerationConfig, Weights]:
    """(configuration, generation configuration, weights) in a folder that was kept, the weights views of its file."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        kinds = file.metadata()
        weights = {name: (file.get_tensor(name), kinds.get(name, "")) for name in file.keys()}  # noqa: SIM118
    return AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder), weights


def filled(model: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """The model with its weights: bytes become packed modules; all else gets the model's dtype, but for what linear
    layers hold, which is laid out from any dtype."""
    dtype = model.dtype
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
        elif not isinstance(module, PackedLinear):  # whose bias it would be
            own = type(module) is nn.Linear and part == "weight"
            values = tensor if own else tensor.to(dtype)
            computed = part in dict(module.named_buffers(recurse=False))
            setattr(module, part, values if computed else nn.Parameter(values, requires_grad=False))
    if model.config.tie_word_embeddings and "lm_head.weight" not in weights:
        head: Any = model.get_output_embeddings()
        head.weight = model.get_input_embeddings().weight
    return model


def dequantised_model(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model in a GGUF file with ordinary weights in `dtype`."""
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
    """The tokenizer in a GGUF file."""
    folder = _kept(Path(source))
    return contents(Path(source)).tokenizer if folder is None else PreTrainedTokenizerFast.from_pretrained(folder)


def num_weights(model: PreTrainedModel) -> int:
    """How many there are, packed or not; those of an embedding that is looked up packed are left out."""
    panels = [module for module in model.modules() if isinstance(module, PanelLinear)]
    return model.num_parameters() + sum(module.in_features * module.out_features for module in panels)


def block_type(kind: str) -> gguf.GGMLQuantizationType:
    """The library's own name of a kind."""
    return gguf.GGMLQuantizationType[kind.upper()]


def _kept(source: Path) -> Path | None:
    """A folder with the configuration, the tokenizer and the packed weights of a GGUF file; None where there is no room
    for it. Raises ForetokenError for a file that is not a whole GGUF file of a known architecture."""
    return kept(source, [source], "gguf", lambda folder: write_packed(source, folder, WEIGHTS))


def _in_memory(found: Contents) -> Weights:
    """The same without a file."""
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
        block, size = gguf.GGML_QUANT_SIZES[block_type(kind)]
        in_file += tensor.numel() / block * size
    warnings.warn(
        f"The kernel does not read weights of type {', '.join(kinds)}: {few(names)} of {source} run in bfloat16 and "
        f"take {need / 1e6:.0f} MB instead of {in_file / 1e6:.0f} MB.",
        DequantisedWarning,
        stacklevel=3,
    )


def few(names: list[str]) -> str:
    """Up to three of them, and how many there are beside."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def without_weights(config: PreTrainedConfig, generation: GenerationConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model's modules with all that is computed from the configuration, and parameters that take no memory."""
    with _no_parameters():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = generation
    return model


@contextmanager
def _no_parameters() -> Iterator[None]:
    """Parameters that are made meanwhile take no memory; buffers are made as ever."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
