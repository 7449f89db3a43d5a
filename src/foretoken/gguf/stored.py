"""The weights of a GGUF file as they are written to a safetensors file, one part after the other."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.gguf.tensors import Weight

LINE = 64  # bytes of a cache line, at whose start every tensor should stand
PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}


@dataclass(frozen=True)
class Stored:
    """One tensor of a safetensors file.

    dtype: safetensors' name of it. make: its bytes, in parts. kind: the GGUF file's type of it, such as q4_k, where
    that is a quantised one: of the blocks in a tensor of bytes, or of what was dequantised.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Iterator[NDArray[np.generic]]]
    kind: str = ""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * PLAIN[self.dtype].itemsize


def in_bfloat16(weight: Weight) -> Stored:
    """A weight, dequantised and rounded."""

    def make() -> Iterator[NDArray[np.int16]]:
        for values in weight.chunks():
            rounded = torch.from_numpy(np.require(values, requirements="W")).to(torch.bfloat16)
            yield rounded.view(torch.int16).numpy()

    return Stored(weight.name, "BF16", weight.shape, make)


def write_stored(
    tensors: Sequence[Stored], path: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """A safetensors file: the length of a JSON header, the header, then the tensors one after the other.

    The library's own `save_file` needs all tensors in memory at once. progress: called with the values written so far
    and their number.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"} | {x.name: x.kind for x in tensors if x.kind}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % LINE)
    total, written = sum(int(np.prod(tensor.shape)) for tensor in tensors), 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            for part in tensor.make():
                file.write(np.ascontiguousarray(part).data)
                written += part.size
                progress(written, total)
