"""Write weights to a safetensors file one part after the other, such as those of a GGUF file."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.gguf.held import held, holder
from foretoken.gguf.tensors import CHUNK, EMBEDDING, GATES_AND_UPS, HEAD, ROUTER, Weight
from foretoken.kernel.memory import LINE
from foretoken.kernel.quantised import KINDS, packed_bytes
from foretoken.kernel.sizes import COLUMNS

# The types of tensors that are written: name in safetensors files -> torch dtype.
PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}


@dataclass(frozen=True)
class Stored:
    """One tensor of a safetensors file.

    name: its name in transformers.
    dtype: safetensors' name of its type, a key of PLAIN.
    shape: that of the tensor.
    make: yields its values or their bytes, in parts, in the order of the file.
    kind: the kind of its blocks, such as q4_k; "" where it was not quantised. A tensor in U8 has such blocks or panels
        of them, any other had them in the GGUF file and was dequantised.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Iterator[NDArray[np.generic]]]
    kind: str = ""

    @property
    def nbytes(self) -> int:
        """The size of the tensor in the file, in bytes."""
        return int(np.prod(self.shape)) * PLAIN[self.dtype].itemsize


def in_bfloat16(weight: Weight) -> Stored:
    """Return a `weight` of a GGUF file to be written in bfloat16, dequantised and rounded."""

    def make() -> Iterator[NDArray[np.int16]]:
        for values in weight.chunks():
            rounded = torch.from_numpy(np.require(values, requirements="W")).to(torch.bfloat16)
            yield rounded.view(torch.int16).numpy()

    return Stored(weight.name, "BF16", weight.shape, make)


def packed(weights: Sequence[Weight]) -> list[Stored]:
    """Return tensors in the form that the kernel reads, panels first, so that each panel starts at a cache line.

    Matrices that `_packs` finds become panels, except the embedding, whose rows stay as they are. Other quantised ones
    become bfloat16. Vectors become float32, and all else stays as in the file. An embedding that is the LM head too is
    written twice, as rows and as panels. A stack of experts is one matrix with the outputs of all of them.

    weights: those of the GGUF file.
    """
    panels: list[Stored] = []
    others: list[Stored] = []
    names = {weight.name for weight in weights}
    for weight in weights:
        rows, packs, kind = weight.name == EMBEDDING, _packs(weight), holder(weight.kind)
        if len(weight.shape) == 1:
            others.append(Stored(weight.name, "F32", weight.shape, weight.chunks))
        elif weight.kind.upper() in PLAIN:
            others.append(Stored(weight.name, weight.kind.upper(), weight.shape, partial(_raw, weight)))
        elif not packs:
            others.append(replace(in_bfloat16(weight), kind=weight.kind))
        elif rows:
            shape = (weight.shape[0], weight.shape[1] // KINDS[kind].weights * KINDS[kind].block_bytes)
            others.append(Stored(weight.name, "U8", shape, partial(_rows, weight), kind))
        if packs and (not rows or HEAD not in names):
            size = packed_bytes(kind, math.prod(weight.shape[:-1]), weight.shape[-1])
            panels.append(Stored(HEAD if rows else weight.name, "U8", (size,), partial(_panels, weight), kind))
    return panels + others


def _packs(weight: Weight) -> bool:
    """Whether a matrix can be panels: of a kind that the kernel has or holds, no router, and no experts between panels.

    Of a layer's two stacks of experts both can or neither (models.experts.is_mixture): the inputs of gate and up are
    the outputs of the down matrix. Where its own inputs fill blocks of 32, the outputs of gate and up fill panels.
    """
    sides = weight.shape[1:] if weight.name.endswith(GATES_AND_UPS) else weight.shape[1:2]
    between = len(weight.shape) == 3 and any(side % COLUMNS for side in sides)
    return holder(weight.kind) in KINDS and not between and not weight.name.endswith(ROUTER)


def _raw(weight: Weight) -> Iterator[NDArray[np.uint8]]:
    yield weight.raw()


def _rows(weight: Weight) -> Iterator[NDArray[np.uint8]]:
    """Yield some rows after the other, of blocks that the kernel has."""
    raw = weight.raw()
    rows = max(1, CHUNK // weight.shape[-1] // COLUMNS) * COLUMNS  # of whole panels
    for first in range(0, len(raw), rows):
        yield held(weight.kind, raw[first : first + rows])


def _panels(weight: Weight) -> Iterator[NDArray[np.uint8]]:
    from foretoken.kernel.packing import to_panels  # imports numba

    for rows in _rows(weight):
        yield to_panels(holder(weight.kind), rows)


def write_stored(
    tensors: Sequence[Stored], path: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write a safetensors file: the length of a JSON header, the header, then the tensors one after the other.

    The library's own `save_file` needs all tensors in memory at once.

    tensors: what the file is to hold, in this order.
    path: the file to write.
    progress: called with the number of values written so far, and that of all.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"} | {x.name: x.kind for x in tensors if x.kind}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % LINE)  # so that the first tensor starts at a cache line
    total, written = sum(int(np.prod(tensor.shape)) for tensor in tensors), 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            for part in tensor.make():
                file.write(np.ascontiguousarray(part).data)
                written += part.size
                progress(written, total)
