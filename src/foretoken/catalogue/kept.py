"""Keep what is made of a model's files in the cache directory, by one process at a time, for the next starts."""

import hashlib
import json
import logging
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foretoken.catalogue.known import models_folder
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_folder
from foretoken.gguf.split import parts_of

READ = (".json", ".safetensors", ".bin")  # endings of the files that a model in a folder may consist of
PACKED = "packed.safetensors"
ORIGIN = "origin.json"  # a file in each folder: which files the folder was made of, and what identifies what was made
FORMAT = 12  # the version of what is kept: raised whenever what is written, or how it is read, changes
LONGEST = 100  # characters of a model's name in a folder's; a file system takes 255 bytes
HEADER = 1 << 16  # a file is identified by so many bytes at its beginning
UNUSED = 30 * 86400  # seconds after the last use of a folder until `drop_unused` removes it
BLOCKS, BLOCK = 64, 1 << 12  # and by this number of blocks of so many bytes, spread over the file


class UnkeptWarning(UserWarning):
    """A warning that what was made of a model's files cannot be kept, so that every start makes it anew."""


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of the file `path` inside `with`; where another process has it, say so and wait.

    what: what the other process does, such as "fetches a model".
    """
    from filelock import FileLock, Timeout  # not for those who ask for names of files alone

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logging.getLogger("foretoken").info(f"another process {what}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def model_files(source: Path) -> list[Path]:
    """Return the files that a model may consist of; source: its file, or the first part of it, or its folder."""
    if source.is_file():
        return parts_of(source)
    files = (path for path in source.glob("[!.]*") if path.suffix in READ and path.is_file())
    return sorted(path for path in files if os.access(path, os.R_OK))


def nothing_kept() -> bool:
    """Whether nothing was kept of any model yet, as at the first start on a machine."""
    models = models_folder()
    with suppress(OSError):  # of a folder in which this user may not look
        return not any(path.is_dir() and path != models for path in models.parent.glob("*"))
    return True


def can_keep() -> bool:
    """Whether this user may write in the cache directory, or make it."""
    try:
        check_folder(models_folder().parent)
    except ForetokenError:
        return False
    return True


def kept(source: Path, section: str, make: Callable[[Path], None]) -> Path | None:
    """Return a folder with what `make` makes of a model; None, with a warning, where it cannot be kept.

    It is made at the first call, and made anew where a file of the model has changed since or the folder is damaged.

    source: the model's file or folder.
    section: the part of the cache directory in which such folders stand.
    make: called with the path of a folder that is not there yet, which it makes and fills.
    """
    contents = {os.path.relpath(path, source): _content(path) for path in model_files(source)}
    source = source.resolve()
    stem = re.sub(r"[^\w.-]", "_", source.stem if source.is_file() else source.name, flags=re.ASCII)
    name = f"{stem[:LONGEST]}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:12]}"
    folder = models_folder().parent / section / name
    origin: dict[str, object] = {"format": FORMAT, "files": contents}
    if _is_whole(folder, origin):
        with suppress(OSError):  # of a folder in which this user may not write
            os.utime(folder)  # its last use
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{name}.lock"), f"reads {source.name} for the first time"):
            if not _is_whole(folder, origin):  # another process may have made it meanwhile
                _make(make, folder, origin)
    except OSError as error:
        warnings.warn(
            f"Every start takes longer, since what is made of {source} for the next ones cannot be kept in "
            f"{folder.parent} ({error.strerror or error}): name a directory with room, in which this "
            "program may write, in FORETOKEN_HOME.",
            UnkeptWarning,
            stacklevel=2,
        )
        return None
    return folder


def drop_unused(folder: Path) -> None:
    """Remove what was kept of the same model in the sections beside a folder's, and was not used for a month.

    Other versions and other machines may share the cache directory, so that what they use stays.

    folder: from `kept`.
    """
    for other in folder.parent.parent.glob(f"*/{folder.name}"):
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > UNUSED:
                shutil.rmtree(other)


def _make(make: Callable[[Path], None], folder: Path, origin: dict[str, object]) -> None:
    """Make a folder under another name beside the final one, and rename it when it is whole."""
    unfinished = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    try:
        make(unfinished)
        files = [path for path in sorted(unfinished.rglob("*")) if path.is_file()]
        made = {str(path.relative_to(unfinished)): _saved(path) for path in files}
        (unfinished / ORIGIN).write_text(json.dumps(origin | {"made": made}))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _content(path: Path) -> list[object]:
    """Return size, hash of parts and time of the last change of a file, which differ where its content does."""
    return [*_identity(path), path.stat().st_mtime_ns]


def _saved(path: Path) -> list[object]:
    """Have the system write a file to the disk now, before it gets its final name, and return its `_identity`."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _identity(path)


def _identity(path: Path) -> list[object]:
    """Return the size and a hash of parts of a file."""
    about = path.stat()
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(HEADER))
        for number in range(BLOCKS):
            file.seek(number * max(about.st_size - BLOCK, 0) // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return [about.st_size, digest.hexdigest()]


def _is_whole(folder: Path, origin: dict[str, object]) -> bool:
    """Whether a folder was made of files with the content in `origin`, and all that was made is there."""
    try:
        found = json.loads((folder / ORIGIN).read_text())
        made = found.pop("made")
        return found == origin and all(_identity(folder / name) == known for name, known in made.items())
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return False
