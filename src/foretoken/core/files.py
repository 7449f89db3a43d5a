"""Reading and writing of files with errors that a user understands; a written file appears whole or not at all."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryFile

from foretoken.core.errors import ForetokenError
from foretoken.core.limits import shown

LEFT_S = 3600.0  # age in seconds of a temporary file that no process can still be writing


@contextmanager
def _or_refuse(failed: str) -> Iterator[None]:
    """Raise ForetokenError for an error of the system inside `with`: what `failed`, and why."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle; ValueError: a NUL in a name
        context = error.__context__  # torch.save raises a RuntimeError of its own as it handles the system's
        cause = context if isinstance(context, OSError) and isinstance(error, RuntimeError) else error
        raise ForetokenError(f"{failed}: {getattr(cause, 'strerror', None) or cause}.") from error


def write(path: Path, how: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, then move it to its place; where that fails nothing is left behind.

    path: the file, or a link to it. One that exists keeps its permissions. A device or a pipe, such as /dev/null, is
        written to as it is.
    how: writes the content to the path that it is called with.

    Raises ForetokenError where the file cannot be written.
    """
    with _or_refuse(f"Cannot write {path}"):
        if _is_device(path):
            how(path)
            return
        file = path.resolve()
        temporary = file.with_name(f".{file.name[:50]}.{token_hex(4)}.tmp")  # of this call: others may write it too
        there = file.stat() if file.exists() else None
        _check_writable(file)
        _remove_left(file)
        try:
            if there is not None:
                temporary.touch(mode=0o600)  # until it has the permissions of the one that is there
            how(temporary)
            if there is not None:
                with suppress(OSError):  # only root may give a file to another
                    os.chown(temporary, there.st_uid, there.st_gid)
                temporary.chmod(there.st_mode & 0o777)
            temporary.replace(file)
        finally:
            with suppress(OSError):
                temporary.unlink()


def append(path: Path, text: str) -> None:
    """Append `text` to the file at `path`; raises ForetokenError where it cannot be written."""
    with _or_refuse(f"Cannot write {path}"), path.open("a", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let no other process be inside `with` for the same folder; where the system has no such locks nothing is held.

    Raises OSError where the folder cannot be opened.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which gives the lock back


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
    with _or_refuse(f"Cannot read data file {path}"):
        Path(path).open("rb").close()


def check_file(path: Path) -> None:
    """Refuse a `path` at which no file can be written; for the time before long work."""
    with _or_refuse(f"Cannot write {path}"):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        parent = path.resolve().parent
        _check_writable(path)
        if _is_device(path):
            return
        if path.is_file() and _is_open(path):
            raise FileExistsError(errno.EEXIST, "it stands for a file that is open already; name that file")
        TemporaryFile(dir=parent).close()


def check_folder(path: Path) -> None:
    """Refuse a `path` at which no folder can be used, or made if there is none; for the time before long work."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ForetokenError(
            f"Cannot use {path}: its name is not UTF-8, so that weights in it could not be read; name another folder."
        ) from error
    with _or_refuse(f"Cannot use {path}"):
        TemporaryFile(dir=next(folder for folder in (path, *path.absolute().parents) if folder.exists())).close()


def _is_device(path: Path) -> bool:
    """Whether something stands at a path that is neither a file nor a folder; a move to it would take its place."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _check_writable(path: Path) -> None:
    """Raise PermissionError for a file or device that is write-protected, although it could be replaced."""
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _remove_left(file: Path) -> None:
    """Remove what `write` left beside a file where its process was killed: its temporary files of an hour ago."""
    for left in file.parent.glob(f".{escape(file.name[:50])}.????????.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_S:
                left.unlink()


def _is_open(path: Path) -> bool:
    """Whether a path such as /dev/stdout leads to its file through /proc, where the open files of a program stand."""
    while path.is_symlink():
        folder = path.parent.resolve()
        if folder.parts[1:2] == ("proc",):
            return True
        path = folder / path.readlink()
    return False
