"""What is made of a GGUF file once, kept in the cache directory so that the next start finds it."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path

from filelock import FileLock

from foretoken.catalogue.known import models_folder

WEIGHTS = "packed.safetensors"
ORIGIN = "origin.json"  # which file this was made of, and the sizes of what was made
FORMAT = 1  # of what is kept: raised whenever another version could not read it
HEADER = 1 << 16  # bytes of the file that are compared


class UnkeptWarning(UserWarning):
    """What was made of a GGUF file cannot be kept, so that every start makes it anew."""


def converted(source: Path) -> Path | None:
    """A folder with the configuration, the tokenizer and the packed weights (WEIGHTS) of a GGUF file.

    It is made at the first call for a file, and made anew where the file has changed since or the folder is damaged.
    Returns None, with a warning, where it cannot be kept.
    Raises ForetokenError for a file that is not a whole GGUF file of a known architecture.
    """
    source = source.resolve()
    name = f"{source.stem}-{hashlib.sha256(str(source).encode()).hexdigest()[:12]}"
    folder = models_folder().with_name("gguf") / name
    origin = _origin(source)
    if _is_whole(folder, origin):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{name}.lock")):
            if not _is_whole(folder, origin):  # another process may have made it meanwhile
                _make(source, folder, origin)
    except OSError as error:
        warnings.warn(
            f"What was made of {source} cannot be kept in {folder.parent} ({error.strerror or error}), so that every "
            "start makes it anew: free some space, or name a directory on another disk in FORETOKEN_HOME.",
            UnkeptWarning,
            stacklevel=2,
        )
        return None
    return folder


def _make(source: Path, folder: Path, origin: dict[str, object]) -> None:
    """In a folder of its own beside the final one, which is moved when it is whole."""
    from foretoken.gguf.folder import write_packed  # takes seconds to import: torch, transformers

    unfinished = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    try:
        write_packed(source, unfinished, WEIGHTS)
        sizes = {path.name: path.stat().st_size for path in unfinished.iterdir()}
        (unfinished / ORIGIN).write_text(json.dumps(origin | {"sizes": sizes}))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _origin(source: Path) -> dict[str, object]:
    """What tells one content of a file from another, without reading all of it."""
    about = source.stat()
    with source.open("rb") as file:
        header = hashlib.sha256(file.read(HEADER)).hexdigest()
    return {"format": FORMAT, "bytes": about.st_size, "modified": about.st_mtime_ns, "header": header}


def _is_whole(folder: Path, origin: dict[str, object]) -> bool:
    """Whether the folder was made of this content, and all that was made is there."""
    try:
        found = json.loads((folder / ORIGIN).read_text())
        sizes = found.pop("sizes")
        return found == origin and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return False
