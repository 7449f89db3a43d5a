"""Files that appear whole or not at all."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from safetensors import SafetensorError

from foretoken.core.errors import ForetokenError


def write(path: Path, how: Callable[[Path], object]) -> None:
    """Written under a temporary name, then moved; nothing is left behind where that fails."""
    temporary = Path(f"{path}.tmp")
    try:
        how(temporary)
        temporary.replace(path)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        raise ForetokenError(f"Cannot write {path}: {getattr(error, 'strerror', None) or error}.") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def append(path: Path, text: str) -> None:
    """At the end of a file that grows line by line."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ForetokenError(f"Cannot write {path}: {error.strerror}.") from error


def read_text(path: str, what: str = "text file", encoding: str = "utf-8") -> str:
    """The UTF-8 text in a file. what: what the file is called where it cannot be read."""
    try:
        return Path(path).read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ForetokenError(f"Cannot read {what} {path}: {why}.") from error


def check_readable(path: str) -> None:
    """Before long work: refuse a data file that cannot be read."""
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise ForetokenError(f"Cannot read data file {path}: {error.strerror}.") from error


def check_file(path: Path) -> None:
    """Before long work: refuse a file that cannot be written at its end."""
    if path.is_dir():
        raise ForetokenError(f"Cannot write {path}: it is a folder.")
    _try_in(path.parent, f"Cannot write {path}")


def check_folder(path: Path) -> None:
    """The same of a folder, which need not be there yet."""
    _try_in(next(folder for folder in (path, *path.absolute().parents) if folder.exists()), f"Cannot use {path}")


def _try_in(folder: Path, otherwise: str) -> None:
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ForetokenError(f"{otherwise}: {error.strerror}.") from error
