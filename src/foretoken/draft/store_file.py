"""A store of texts of earlier requests that a file keeps from one process to the next."""

import atexit
import time
import warnings
from collections.abc import Sequence as Seq
from pathlib import Path
from threading import Lock

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from foretoken.core.errors import ForetokenError
from foretoken.core.files import alone_in, check_file, write
from foretoken.draft.store import CAPACITY, Store

FORMAT = "foretoken texts, 1"
EVERY = 60.0  # seconds between two writes at least; one takes some milliseconds


class StoreFileWarning(RuntimeWarning):
    """The texts of earlier requests could not be written; decoding goes on with those in memory."""


class KeptStore(Store):
    """A store that begins with the texts of a file; new ones are written there now and then, and at the end."""

    def __init__(self, path: str, vocab_size: int, capacity: int = CAPACITY) -> None:
        """Read the file at `path`, if there is one; vocab_size, capacity: as in `read` and in Store.

        Raises ForetokenError for a file that cannot be written, is none of ours, or is of another vocabulary.
        """
        super().__init__(capacity)
        self._path, self._vocab_size = Path(path), vocab_size
        check_file(self._path)
        self._index.extend(self._in_file())
        self._written, self._saving = time.monotonic(), Lock()
        self._unsaved: list[int] = []
        atexit.register(self.save)

    def add(self, ids: Seq[int]) -> list[int]:
        new = super().add(ids)
        with self._saving:
            self._unsaved = [*self._unsaved, *new][-self._capacity :]
        if time.monotonic() - self._written >= EVERY:
            self.save()
        return new

    def save(self) -> None:
        """Append the texts since the last write to those in the file, to which other processes may have written.

        Where that fails a warning says so, and no error, by which a text would be lost.
        """
        about = {"format": FORMAT, "vocab_size": str(self._vocab_size)}
        with self._saving:
            self._written = time.monotonic()
            try:
                with alone_in(self._path.resolve().parent):
                    tokens = np.append(self._in_file(), np.array(self._unsaved, np.int32))[-self._capacity :]
                    write(self._path, lambda file: file.write_bytes(save({"tokens": tokens}, about)))
            except (ForetokenError, OSError) as error:
                why = f"Cannot write {self._path}: {error.strerror}." if isinstance(error, OSError) else str(error)
                warnings.warn(why, StoreFileWarning, stacklevel=2)
            else:
                self._unsaved = []

    def _in_file(self) -> np.ndarray:
        """Return the token ids and borders in the file [n] int32, none where there is no file."""
        return read(str(self._path), self._vocab_size) if self._path.exists() else np.empty(0, np.int32)


def read(path: str, vocab_size: int) -> np.ndarray:
    """Return the token ids and borders in the file at `path`, oldest first [n] int32.

    vocab_size: that of the target, whose token ids the file must have.

    Raises ForetokenError for a file that cannot be read, is none of ours, or is of another vocabulary.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            about, names = file.metadata() or {}, list(file.keys())
            tokens = file.get_tensor("tokens") if names == ["tokens"] else None
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or "it is no file of texts"
        raise ForetokenError(f"Cannot read the suffix store {path}: {why}; name another file.") from error
    if about.get("format") != FORMAT or tokens is None or tokens.dtype != np.int32 or tokens.ndim != 1:
        raise ForetokenError(f"Cannot read the suffix store {path}: it is no file of texts; name another file.")
    if about.get("vocab_size") != str(vocab_size):
        raise ForetokenError(
            f"The suffix store {path} has the tokens of a vocabulary of {about.get('vocab_size')}, and the target has "
            f"{vocab_size}: name another file."
        )
    if len(tokens) and not -1 <= tokens.min() <= tokens.max() < vocab_size:
        raise ForetokenError(f"The suffix store {path} has tokens that the target has not: name another file.")
    return tokens
