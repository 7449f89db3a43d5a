"""The table of known models, and the cache directory in which their folders stand."""

import os
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.limits import shown

GGUF = ".gguf"  # stands behind the short name of a model where its GGUF file is meant
TABLE = Path(__file__).with_name("known.toml")


@dataclass(frozen=True)
class Package:
    """One Python package that carries a piece of a model.

    name, version: those of the package.
    bytes, sha256: size and hash of its wheel.
    member: the piece, a file inside the wheel.
    """

    name: str
    version: str
    bytes: int
    sha256: str
    member: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name.

    name: the short name.
    title, author, licence: the model's full name, who made it, and on which terms.
    precision: the precision of the weights in the GGUF file.
    gguf_bytes, gguf_sha256: size and hash of the GGUF file.
    folder_bytes: size of the folder that is made of it, rounded up.
    packages: their pieces, joined in this order, are the GGUF file.
    packed: whether the GGUF file itself is meant and not that folder; it is called NAME.gguf.
    """

    name: str
    title: str
    author: str
    licence: str
    precision: str
    gguf_bytes: int
    gguf_sha256: str
    folder_bytes: int
    packages: tuple[Package, ...]
    packed: bool = False

    @property
    def called(self) -> str:
        """The name that users give: the short name, with .gguf behind it where the GGUF file is meant."""
        return self.name + GGUF if self.packed else self.name

    @property
    def folder(self) -> Path:
        """The path of the fetched model: its folder, or its GGUF file where that is meant."""
        return models_folder() / self.called

    @property
    def fetched(self) -> bool:
        """Whether the folder or file is there."""
        return self.folder.is_file() if self.packed else (self.folder / "config.json").exists()

    @property
    def download_bytes(self) -> int:
        """The size of all packages, in bytes."""
        return sum(package.bytes for package in self.packages)

    @property
    def source(self) -> str:
        """The packages, in words."""
        first, last = self.packages[0], self.packages[-1]
        if first is last:
            return f"Python package {first}"
        return f"{len(self.packages)} Python packages, {first} to {last}"

    def json(self) -> dict[str, Any]:
        """Return the description that `foretoken fetch --json` prints."""
        return {
            "name": self.called,
            "title": self.title,
            "author": self.author,
            "licence": self.licence,
            "packages": [f"{package.name}=={package.version}" for package in self.packages],
            "download_bytes": self.download_bytes,
            "folder_bytes": self.gguf_bytes if self.packed else self.folder_bytes,
            "fetched": self.fetched,
            "folder": str(self.folder),
        }


def models_folder() -> Path:
    """Return `$FORETOKEN_HOME/models`; without that variable, `foretoken/models` in the user's cache directory.

    Raises ForetokenError where the home directory that the name begins with, or the user's, is not known.
    """
    home, cache = os.environ.get("FORETOKEN_HOME"), os.environ.get("XDG_CACHE_HOME")
    try:
        if home:
            return Path(home).expanduser().absolute() / "models"
        return (Path(cache) if cache else Path.home() / ".cache") / "foretoken" / "models"
    except RuntimeError as error:
        named = f"FORETOKEN_HOME is {home}, and this" if home else "Your"
        raise ForetokenError(f"{named} home directory is not known: set FORETOKEN_HOME to a folder.") from error


def known_models() -> dict[str, KnownModel]:
    """Return all known models by their short names."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    models = [
        KnownModel(**(entry | {"packages": tuple(Package(**package) for package in entry["packages"])}))
        for entry in table["models"]
    ]
    return {model.name: model for model in models}


def named(name: str) -> KnownModel:
    """Return the model with the short name `name`, in letters of any case, perhaps with .gguf behind it.

    Raises ForetokenError if there is none.
    """
    models, short = known_models(), name.lower().removesuffix(GGUF)
    if short not in models:
        raise ForetokenError(f"{shown(name)} is not a model that is known by name: choose one of {', '.join(models)}.")
    return replace(models[short], packed=name.lower().endswith(GGUF))


def known_model(name: str) -> Path | None:
    """Return the folder or file of the fetched model with the short name `name`, None if no model is known by it.

    Raises ForetokenError for a known model that has not been fetched.
    """
    if name.lower().removesuffix(GGUF) not in known_models():
        return None
    model = named(name)
    if not model.fetched:
        raise ForetokenError(f"Model {model.called} is not here yet: get it with `foretoken fetch {model.called}`.")
    return model.folder
