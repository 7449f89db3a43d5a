"""Read the tensors of a GGUF file as weights under transformers' names, a few rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np
from numpy.typing import NDArray

from foretoken.core.errors import ForetokenError
from foretoken.gguf.architectures import Architecture, architecture_of
from foretoken.gguf.reader import Reader

CHUNK = 1 << 22  # weights dequantised at once: 16 MiB of float32, and a few times as much inside the library
FREQUENCIES = "rope_freqs.weight"  # a tensor that is no weight: config.py reads it
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Weight:
    """One tensor of the file.

    name: its name in transformers.
    shape: the shape of the torch tensor.
    stored: the library's description of it, with a view of its bytes.
    rows: per row of the torch tensor (or element of a vector) its place in the file; None: the order is the same.
    offset: what is subtracted from every value of the file.
    """

    name: str
    shape: tuple[int, ...]
    stored: gguf.ReaderTensor
    rows: NDArray[np.int64] | None
    offset: float

    @property
    def kind(self) -> str:
        """The type of its values in the file, such as q4_k or f32."""
        return self.stored.tensor_type.name.lower()

    def raw(self) -> NDArray[np.uint8]:
        """Return the bytes of each row [out, bytes], as stored, in the order of the torch tensor."""
        data = self.stored.data.view(np.uint8)
        return data if self.rows is None else data[self.rows]

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """Yield the values in the order of the torch tensor, in flat float32 arrays of at most about CHUNK values."""
        data = self.stored.data
        step = max(1, CHUNK // int(np.prod(self.shape[1:])))
        for start in range(0, self.shape[0], step):
            some = data[start : start + step] if self.rows is None else data[self.rows[start : start + step]]
            values = gguf.dequantize(some, self.stored.tensor_type).reshape(-1)
            yield values - np.float32(self.offset) if self.offset else values


def gguf_weights(reader: Reader) -> list[Weight]:
    """Return all weights of the file in `reader`, without its table of rotary frequencies.

    Raises ForetokenError for a tensor that the file's architecture does not have, or whose type the library `gguf`
    cannot read.
    """
    architecture = architecture_of(reader)
    heads = reader.of_model("attention.head_count", 1)
    of_rotary = {"attn_q": heads, "attn_k": reader.of_model("attention.head_count_kv", heads)}
    weights: list[Weight] = []
    for kind, tensor in {tensor.tensor_type: tensor for tensor in reversed(reader.tensors)}.items():
        try:
            gguf.dequantize(tensor.data[:1], kind)
        except NotImplementedError as error:
            raise ForetokenError(
                f"The GGUF file has a tensor {tensor.name} of type {kind.name}, which is not read: take another file "
                "of this model."
            ) from error
    for tensor in reader.tensors:
        if tensor.name == FREQUENCIES:
            continue
        part = tensor.name.split(".")[-2] if "." in tensor.name else tensor.name
        shape = tuple(int(n) for n in reversed(tensor.shape))
        rows = None
        if architecture.interleaved and part in of_rotary:
            rows = _halves(shape[0], of_rotary[part])
        offset = architecture.norm_offset if part.endswith("norm") else 0.0
        weights.append(Weight(_name(tensor.name, architecture), shape, tensor, rows, offset))
    return weights


def _name(stored: str, architecture: Architecture) -> str:
    """Return transformers' name of a tensor of the file."""
    match stored.split("."):
        case [outer, kind] if outer in _OUTER:
            return f"{_OUTER[outer]}.{kind}"
        case ["blk", layer, part, kind] if part in architecture.layer:
            return f"model.layers.{layer}.{architecture.layer[part]}.{kind}"
        case _:
            raise ForetokenError(
                f"The GGUF file has a tensor {stored}, which {architecture.class_name} does not: it cannot be read."
            )


def _halves(rows: int, heads: int) -> NDArray[np.int64]:
    """Return the place in the file of each row of a query or key matrix [rows].

    In the file, the rows of the two halves of a head alternate.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
