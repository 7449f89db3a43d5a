"""Open GGUF files: tensors stay on disk, mapped into memory, and each value of the metadata is read at most once."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from foretoken.core.errors import ForetokenError


class Reader(GGUFReader):
    """The reader of the library `gguf`, with every value of the metadata unpacked at most once.

    The file's bytes are kept as a plain array over the mapped file: the library takes millions of small slices to read
    a vocabulary, and each costs several times as much on a `numpy.memmap`.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at `path`; the library raises errors of several classes where it cannot be read."""
        self._metadata: dict[str, Any] = {}
        super().__init__(path)

    @property
    def data(self) -> NDArray[np.uint8]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bytes of the file."""
        return self._bytes

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        """Keep `mapped`, the library's memmap of the file, as a plain array."""
        self._bytes = mapped.view(np.ndarray)

    def metadata(self, key: str, default: Any = None) -> Any:
        """Return the value of the file's metadata under `key`, or `default` where the file does not have it."""
        if key not in self._metadata:
            field = self.get_field(key)
            self._metadata[key] = None if field is None else field.contents()
        value = self._metadata[key]
        return default if value is None else value

    def of_model(self, key: str, default: Any = None) -> Any:
        """Return the value whose key is the architecture's name, a dot and `key`; `default` where there is none.

        A list of values per layer that are all the same is returned as this value. Raises ForetokenError where they
        are not.
        """
        value = self.metadata(f"{self.metadata('general.architecture', '')}.{key}", default)
        if not isinstance(value, list):
            return value
        if not value or any(each != value[0] for each in value):
            raise ForetokenError(f"The layers of the model in the GGUF file differ in {key}, which is not read.")
        return value[0]


def open_gguf(path: Path) -> Reader:
    """Open the GGUF file at `path`.

    Raises ForetokenError for a file that is not there, is no GGUF file, is cut off, has another byte order, or is one
    part of a model.
    """
    try:
        reader = Reader(path)
        parts = int(reader.metadata("split.count", 1))
    except (ValueError, IndexError, KeyError, OverflowError, OSError, TypeError) as error:
        raise ForetokenError(
            f"Cannot read {path} as a GGUF file: it is damaged, cut off or newer than what is known ({error}). Get it "
            "again, or another file of this model."
        ) from error
    if reader.byte_order != "I":
        raise ForetokenError(
            f"{path} is a GGUF file with the byte order of other processors: convert it with `gguf-convert-endian`, or "
            "get another file of this model."
        )
    if parts > 1:
        raise ForetokenError(
            f"{path} is one of {parts} parts of a model: join them with `llama-gguf-split --merge`, and give the "
            "file that comes out."
        )
    return reader
