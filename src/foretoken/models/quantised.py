"""Quantise the linear layers of checkpoints to a kind of blocks, once; later starts read the result from the cache."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foretoken.catalogue.kept import PACKED, kept
from foretoken.core.errors import ForetokenError
from foretoken.gguf.stored import PLAIN, Stored, write_stored
from foretoken.kernel.quantised import KINDS
from foretoken.models.experts import STACKS, is_mixture, put_stack
from foretoken.models.folder import on_disk
from foretoken.models.hf_model import HFModel
from foretoken.models.mapped import weight_files
from foretoken.models.named import HEAD_KIND
from foretoken.models.panels import PART, PackedLinear, keeps_weight

BLOCK = 32  # a matrix can be quantised to some kind of blocks if its rows are multiples of so many weights
NAMES = {dtype: name for name, dtype in PLAIN.items()}  # torch dtype -> its name in safetensors files


class UnpackableError(ForetokenError):
    """No layer of a model can be quantised."""


def kept_quantised(source: str, kind: str, load: Callable[[], HFModel]) -> Path | HFModel:
    """Return the cache folder with a model whose linear layers are quantised; it is made at the first call.

    source: the model's folder or GGUF file, or a hub id.
    kind: the kind of blocks, see `pack_quantised`.
    load: reads the checkpoint; it is called only where nothing was kept.

    Returns the folder, with configurations and with weights under the names of transformers' modules; or, where it
    cannot be kept, the model.
    """
    made: list[HFModel] = []

    def write(folder: Path) -> None:
        model = pack_quantised(load(), kind)
        made.append(model)
        folder.mkdir(parents=True)
        model.config.dtype = model.dtype
        model.config.save_pretrained(folder)
        assert model.generation_config is not None
        model.generation_config.save_pretrained(folder)
        write_stored(list(_stored(model)), folder / PACKED)

    found = on_disk(source)
    folder = None if found is None else kept(found, f"quantised/{kind}", write)
    return folder or (made[0] if made else pack_quantised(load(), kind))


def pack_quantised(model: HFModel, kind: str) -> HFModel:
    """Quantise the linear layers and the experts of a model in place, and return it.

    Layers whose rows are not whole blocks stay as they are, and so do those that `keeps_weight`.

    model: the model, with ordinary weights on a CPU.
    kind: the kind of blocks, a name among models.named.QUANTISED. The LM head gets HEAD_KIND instead, and for q4_k,
        whose blocks have 256 weights, layers whose rows are no multiple of that get q4_1.

    Raises UnpackableError where no layer but the LM head can be quantised; nothing has been then.
    """
    from foretoken.kernel.packing import to_panels  # imports numba

    last, files = model.get_output_embeddings(), weight_files()
    chosen: list[tuple[nn.Module, str, str]] = []
    for parent, name in _matrices(model):
        module = getattr(parent, name)
        width = _weight(module).shape[-1]
        own = HEAD_KIND if module is last else kind
        if own == "q4_k" and width % KINDS[own].weights:
            own = "q4_1"
        if width % KINDS[own].weights == 0:
            chosen.append((parent, name, own))
    if all(getattr(parent, name) is last for parent, name, _ in chosen):
        raise UnpackableError(
            f"The weights in {model.name_or_path} cannot be quantised to {kind}: its layers have no nn.Linear with "
            f"rows of multiples of {BLOCK} weights. Leave that option out."
        )
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # numpy lets other threads work meanwhile
        for parent, name, own in chosen:
            module = getattr(parent, name)
            weight = _weight(module).detach().flatten(0, -2)
            out, width = weight.shape
            rows = list(threads.map(partial(_quantised, kind=own), weight.split(PART)))
            panels = to_panels(own, np.concatenate(rows))
            put = setattr if isinstance(module, nn.Linear) else put_stack
            put(parent, name, PackedLinear(own, panels, width, out, getattr(module, "bias", None)))
            files.forget(weight)
    return model


def _matrices(model: HFModel) -> list[tuple[nn.Module, str]]:
    """Return what is quantised, linear layers and stacks of experts, by the module that it is in and its name there."""
    found: list[tuple[nn.Module, str]] = []
    for path, module in model.named_modules():
        if type(module) is nn.Linear and not keeps_weight(model, path):
            parent, _, name = path.rpartition(".")
            found.append((model.get_submodule(parent), name))
        elif is_mixture(module):
            found += [(module.get_submodule("experts"), name) for name in STACKS]
    return found


def _weight(matrix: nn.Module | Tensor) -> Tensor:
    """Return the weight of a linear layer; a stack of experts is one itself."""
    return matrix.weight if isinstance(matrix, nn.Linear) else cast(Tensor, matrix)


def _quantised(rows: Tensor, kind: str) -> NDArray[np.uint8]:
    if kind == "q4_k":
        from foretoken.kernel.q4_k import quantise_q4_k  # imports numba

        return quantise_q4_k(rows.float().numpy())
    return gguf.quantize(rows.float().numpy(), gguf.GGMLQuantizationType[kind.upper()])


def _stored(model: HFModel) -> Iterator[Stored]:
    """Yield all weights of a model to be written, panels first, so that each panel starts at a cache line of the file.

    Tensors of integers are left out, since they are computed from the configuration.
    """
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            panels = module.panels
            name = path if ".experts." in path else f"{path}.weight"
            yield Stored(name, "U8", tuple(panels.shape), partial(_bytes, panels), module.kind)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            yield Stored(name, NAMES[tensor.dtype], tuple(tensor.shape), partial(_bytes, tensor))


def _bytes(tensor: Tensor) -> Iterator[NDArray[Any]]:
    """Yield the bytes of a tensor, in one part."""
    yield tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
