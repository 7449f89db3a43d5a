"""Reading and writing of files with errors that a user understands; a written file appears whole or not at all."""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryFile

from foretoken.core.errors import ForetokenError
from foretoken.core.limits import shown


def write(path: Path, how: Callable[[Path], object], private: bool = False) -> None:
    """Write a file under a temporary name, then move it to its place; where that fails nothing is left behind.

    path: the file, or a link to it. One that exists keeps its permissions. A device or a pipe, such as /dev/null, is
        written to as it is.
    how: writes the content to the path that it is called with.
    private: whether only its owner may read a file that did not exist.

    Raises ForetokenError where the file cannot be written.
    """
    temporary = path
    try:
        if _is_device(path):
            how(path)
        else:
            file = path.resolve()
            temporary = file.with_name(f".{token_hex(8)}.tmp")  # for this call: others may write the same file
            allowed = stat.S_IMODE(file.stat().st_mode) if file.exists() else 0o600 if private else None
            if allowed is not None:
                temporary.touch(mode=0o600)
                temporary.chmod(allowed)
            how(temporary)
            temporary.replace(file)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk, while it handles another
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise ForetokenError(f"Cannot write {path}: {getattr(cause, 'strerror', None) or cause}.") from error
    finally:
        if temporary != path:
            with suppress(OSError):
                temporary.unlink()


def append(path: Path, text: str) -> None:
    """Append `text` to the file at `path`; raises ForetokenError where it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ForetokenError(f"Cannot write {path}: {error.strerror}.") from error


def read_text(path: str, what: str = "text file", encoding: str = "utf-8") -> str:
    """Return the text in a file.

    path: the file.
    what: what the error calls it.
    encoding: utf-8, or utf-8-sig to drop a byte order mark.

    Raises ForetokenError where the file cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ForetokenError(f"Cannot read {what} {shown(path)}: {why}.") from error


def check_readable(path: str) -> None:
    """Refuse a data file at `path` that cannot be read; for the time before long work."""
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise ForetokenError(f"Cannot read data file {path}: {error.strerror}.") from error


def check_file(path: Path) -> None:
    """Refuse a `path` at which no file can be written; for the time before long work."""
    try:
        folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ForetokenError(f"Cannot write {path}: {error.strerror}.") from error
        folder = False  # there may be nothing yet
    if folder:
        raise ForetokenError(f"Cannot write {path}: it is a folder.")
    if _is_device(path):
        if not os.access(path, os.W_OK):
            raise ForetokenError(f"Cannot write {path}: Permission denied.")
        return
    _try_in(path.resolve().parent, f"Cannot write {path}")


def check_folder(path: Path) -> None:
    """Refuse a `path` at which no folder can be used, or made if there is none; for the time before long work."""
    _try_in(next(folder for folder in (path, *path.absolute().parents) if folder.exists()), f"Cannot use {path}")


def _is_device(path: Path) -> bool:
    """Whether something stands at a path that is neither a file nor a folder; a move to it would take its place."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _try_in(folder: Path, otherwise: str) -> None:
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ForetokenError(f"{otherwise}: {error.strerror}.") from error
