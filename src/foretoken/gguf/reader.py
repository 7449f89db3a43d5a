"""Open GGUF files: tensors stay on disk, mapped into memory, and each value of the metadata is read at most once."""

import sys
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from numpy.typing import NDArray

from foretoken.core.errors import ForetokenError
from foretoken.gguf.split import parts_of

SPLIT = ("split.no", "split.count", "split.tensors.count")  # the last is the number of tensors in all parts
AGAIN = "get all parts of one model again"


class Reader(GGUFReader):
    """The reader of the library `gguf`, with every value of the metadata unpacked at most once.

    A list of the metadata is one part of its field. The library makes arrays of each entry, which takes two seconds for
    a vocabulary.

    split: the values of the keys SPLIT, 0 where the file lacks them.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at `path`; the library raises errors of several classes where it cannot be read."""
        self._metadata: dict[str, Any] = {}
        super().__init__(path)
        self.split = tuple(int(self.metadata(key, 0)) for key in SPLIT)

    @property
    def data(self) -> NDArray[np.uint8]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bytes of the file."""
        return self._bytes

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        """Keep `mapped`, the library's memmap of the file, as a plain array: each slice of a memmap costs far more."""
        self._bytes = mapped.view(np.ndarray)

    def _get(
        self, offset: int | np.integer, dtype: Any, count: int | np.integer = 1, override_order: Any = None
    ) -> NDArray[Any]:
        """Return numbers of the file as the library does. Raises ValueError where the file ends before them.

        offset: the place of the first one's first byte.
        dtype, count: their type and number.
        override_order: the order of their bytes; None: that of the file.
        """
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"it has {len(self.data)} bytes, and what its header names goes on to byte {end}")
        return super()._get(int(offset), dtype, int(count), override_order)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int | np.integer
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Return the size of a value in bytes, its parts, which of them are data, and its types.

        orig_offs: where it begins in the file.
        raw_type: the number of its type.
        """
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, int(raw_type))
        kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        if kind == GGUFValueType.ARRAY:  # lists in a list, which no known key has
            return super()._get_field_parts(orig_offs, int(raw_type))
        count, first = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if kind == GGUFValueType.STRING:
            entries, end = self._texts(first, count)
        else:
            entries = self._get(first, self.gguf_scalar_to_np[kind], count)
            end = first + entries.nbytes
        if len(entries) < count or end > len(self.data):
            raise ValueError("a list goes beyond its end")
        return end - orig_offs, [entries], [0], [GGUFValueType.ARRAY, kind]

    def _texts(self, at: int, count: int) -> tuple[list[bytes], int]:
        """Return the texts of a list, in UTF-8, as far as the file goes, and where it ends; at: where it begins."""
        little = (sys.byteorder == "little") == (self.byte_order == "I")
        length, texts, view = Struct("<Q" if little else ">Q"), list[bytes](), memoryview(self._bytes.data)
        while len(texts) < count and at + 8 <= len(view):
            end = at + 8 + length.unpack_from(view, at)[0]
            texts.append(bytes(view[at + 8 : end]))
            at = end
        return texts, at

    def metadata(self, key: str, default: Any = None) -> Any:
        """Return the value of the file's metadata under `key`, or `default` where the file does not have it."""
        if key not in self._metadata:
            field = self.get_field(key)
            if field is not None and field.types == [GGUFValueType.ARRAY, GGUFValueType.STRING]:
                self._metadata[key] = [text.decode() for text in field.parts[field.data[0]]]
            else:
                self._metadata[key] = None if field is None else field.contents()
        value = self._metadata[key]
        return default if value is None else value

    def of_model(self, key: str, default: Any = None) -> Any:
        """Return the value whose key is the architecture's name, a dot and `key`; `default` where there is none.

        A list of values per layer that are all the same is returned as this value; a layer with 0 has nothing of the
        kind, as LFM2's short convolutions have no key heads. Raises ForetokenError where the others differ.
        """
        value = self.metadata(f"{self.metadata('general.architecture', '')}.{key}", default)
        if not isinstance(value, list):
            return value
        found = set(value) - {0} or set(value)
        if len(found) != 1:
            raise ForetokenError(f"The layers of the model in the GGUF file differ in {key}, which is not supported.")
        return found.pop()


def open_gguf(path: Path) -> Reader:
    """Open the GGUF model at `path`, its file or any of its parts.

    Returns the reader of the file, or of the first part, which has the metadata, with the tensors of all parts. Raises
    ForetokenError for a file that is not there, is no GGUF file, is cut off or has another byte order, and for parts
    that are not all those of one model.
    """
    parts = parts_of(path)
    readers = [_opened(part) for part in parts]
    count = readers[0].split[1]
    if len(parts) > 1:
        readers[0].tensors = _joined(parts, readers)
    elif count > 1:
        raise ForetokenError(
            f"{path} is one of {count} parts of a model, and its name does not say which: give all parts their own "
            f"names again, which end like -00001-of-{count:05}.gguf."
        )
    return readers[0]


def _joined(parts: list[Path], readers: list[Reader]) -> list[ReaderTensor]:
    """Return the tensors of all `parts` of a model. Raises ForetokenError for parts that are not all those of one."""
    total, owners = readers[0].split[2], dict[str, Path]()
    for number, (part, reader) in enumerate(zip(parts, readers, strict=True)):
        if reader.split != (wanted := (number, len(parts), total)):
            raise ForetokenError(
                f"{part} does not belong to the parts beside it: its {', '.join(SPLIT)} are {reader.split} and should "
                f"be {wanted}; {AGAIN}."
            )
        for tensor in reader.tensors:
            if (owner := owners.setdefault(tensor.name, part)) is not part:
                raise ForetokenError(f"Tensor {tensor.name} is in {owner} and in {part}: {AGAIN}.")
    if len(owners) != total:
        raise ForetokenError(f"{parts[0]} and its other parts have {len(owners)} tensors and not {total}: {AGAIN}.")
    return [tensor for reader in readers for tensor in reader.tensors]


def _opened(path: Path) -> Reader:
    """Open one GGUF file. Raises ForetokenError where it cannot be read, or has another byte order."""
    try:
        reader = Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError, TypeError, AttributeError) as error:
        raise ForetokenError(
            f"Cannot read {path} as a GGUF file: it is damaged, cut off or newer than what is known ({error}). Get it "
            "again, or another file of this model."
        ) from error
    if reader.byte_order != "I":
        raise ForetokenError(
            f"{path} is a GGUF file with the byte order of other processors: convert it with `gguf-convert-endian`, or "
            "get another file of this model."
        )
    return reader
