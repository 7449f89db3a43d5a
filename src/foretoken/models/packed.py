"""Load GGUF files as models whose linear layers and embedding hold the file's quantised weights, packed."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from foretoken.catalogue.kept import PACKED, kept
from foretoken.core.limits import few
from foretoken.gguf.folder import Contents, contents, write_contents
from foretoken.gguf.stored import PLAIN, packed
from foretoken.kernel.compile import compile_ahead
from foretoken.models.causal_lm import CausalLM
from foretoken.models.experts import PanelMixture
from foretoken.models.hf_model import HFModel
from foretoken.models.kept_model import (
    Weights,
    bare_model,
    dtype_of,
    filled,
    kept_model,
    laid_out,
    mapped_weights,
)  # fmt: skip
from foretoken.models.panels import PanelLinear
from foretoken.models.skeleton import Skeleton, without_weights


class DequantisedWarning(UserWarning):
    """A warning that some weights of a GGUF file take more memory than in the file."""


def packed_model(source: str) -> HFModel | Skeleton:
    """Return the model in a GGUF file for a CPU, its quantised weights packed as they are.

    Quantised weights of a kind that the kernel does not have become bfloat16, and one warning says so. The model
    computes in float32, or in bfloat16 if all matrices of the file are bfloat16.

    Returns the skeleton of the model in the file `source` where it was kept, which it is if our kernel runs the model;
    else the model. Raises ForetokenError for a file that cannot be read.
    """
    folder = kept_file(Path(source), compile_ahead)
    if folder is None:
        found = contents(Path(source), compile_ahead)
        weights = _in_memory(found)
        model = laid_out(without_weights(found.config, found.generation_config, dtype_of(weights)), weights)
    else:
        weights = mapped_weights([folder / PACKED])
        make = partial(bare_model, folder, dtype_of(weights))
        model = kept_model(Path(source), str(folder), make, lambda: weights)
    _warn_of_dequantised(source, weights)
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
    folder = kept_file(Path(source))
    return contents(Path(source)).tokenizer if folder is None else PreTrainedTokenizerFast.from_pretrained(folder)


def num_weights(model: nn.Module) -> int:
    """Return the number of weights of `model`, packed or not, without those of a packed embedding."""
    panels = [module for module in model.modules() if isinstance(module, PanelLinear)]
    others = sum(weight.numel() for weight in model.parameters())
    return others + sum(module.in_features * module.out_features for module in panels)


def share_read(drafter: CausalLM, target: CausalLM) -> float:
    """Return the bytes of weights that a draft token reads, as a share of those that a token of the target reads.

    It is 0 where a draft token may take a smaller share of the time: where other means run one of them, where only the
    target is quantised, since packed weights take more time per byte, and for mixtures of experts, which read a part of
    their weights.

    drafter, target: the models.
    """
    alike = drafter.execution == target.execution and (drafter.quantised or not target.quantised)
    read, of_target = _bytes_read(drafter.weights), _bytes_read(target.weights)
    return read / of_target if alike and read and of_target else 0.0


def _bytes_read(model: nn.Module) -> int | None:
    """Return the bytes of all weights but those of embeddings; None for a mixture of experts, whose stand in stacks."""
    total = 0
    for module in model.modules():
        if isinstance(module, PanelMixture):
            return None
        if isinstance(module, PanelLinear):
            total += module.panels.nbytes
        if not isinstance(module, nn.Embedding):
            matrices = (buffer for buffer in module.buffers(recurse=False) if buffer.ndim > 1)  # those of GPTQ and AWQ
            for weight in chain(module.parameters(recurse=False), matrices):
                if weight.ndim > 2 and weight.shape[1] > 1:  # [channels, 1, taps] are a convolution's
                    return None
                total += weight.nbytes
    return total


def kept_file(source: Path, accepted: Callable[[], object] = lambda: None) -> Path | None:
    """Return a cache folder with configuration, tokenizer and packed weights of a GGUF file, which is made if need be.

    source: the file.
    accepted: as in `contents`; also called where the folder is there, and maybe twice.

    Returns None where it cannot be kept. Raises ForetokenError for a file that is not a whole GGUF file of a known
    architecture.
    """

    def make(folder: Path) -> None:
        found = contents(source, accepted)
        write_contents(found, folder, packed(found.weights), PACKED)

    folder = kept(source, "gguf", make)
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
        f"The kernel does not support these weights of type {', '.join(kinds)}: {few(names)} of {source} run in "
        f"bfloat16 and take {need / 1e6:.0f} MB instead of {in_file / 1e6:.0f} MB.",
        DequantisedWarning,
        stacklevel=3,
    )
