"""Compiled loops on disk are not used any longer than the code that is in them."""

import ast
from pathlib import Path

import pytest
from numba import config, njit
from numba.core.caching import CompileResultCacheImpl, IndexDataCacheFile

import foretoken
from foretoken.core import compiled
from foretoken.core.compiled import CALLED, CompiledCodeWarning, cached

PACKAGE = Path(foretoken.__file__).parent


def _twice(x):  # type: ignore[no-untyped-def]
    return 2 * x


def run() -> int:
    """How often the code came from disk: 1 or 0."""
    function = cached(njit(_twice))
    assert function(4) == 8
    return sum(function.stats.cache_hits.values())


def hits(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Of the cache, where the files of CALLED read `text`."""
    (tmp_path / "called.py").write_text(text)
    monkeypatch.setattr(compiled, "CALLED", (tmp_path / "called.py",))
    compiled._content.cache_clear()
    return run()


def test_what_a_loop_calls_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hits("before", monkeypatch, tmp_path)
    assert hits("before", monkeypatch, tmp_path) == 1
    assert hits("after", monkeypatch, tmp_path) == 0
    assert hits("after", monkeypatch, tmp_path) == 1
    monkeypatch.undo()
    compiled._content.cache_clear()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where numba keeps what it compiles."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_told", [])
    return tmp_path


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 0.5])
def test_a_file_that_is_cut_short_is_written_again(folder: Path, kind: str, left: float) -> None:
    run()
    (file,) = folder.rglob(f"*.{kind}")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(left * len(whole))])
    assert run() == 0
    assert run() == 1


def test_a_full_disk_is_told_once_and_leaves_no_index_of_old_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_save_data", full)
        with pytest.warns(CompiledCodeWarning, match=r"\(No space left on device\).*NUMBA_CACHE_DIR") as told:
            assert run() == run() == 0
    assert len(told) == 1
    assert not [*folder.rglob("*.nb?")]
    run()
    assert run() == 1


def test_without_any_folder_loops_run_and_one_warning_tells(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for locator in CompileResultCacheImpl._locator_classes:
        monkeypatch.setattr(locator, "from_function", lambda *_: None)
    with pytest.warns(CompiledCodeWarning, match="no folder can be written") as told:
        assert run() == run() == 0
    assert len(told) == 1


def has_loops(file: Path) -> bool:
    text = file.read_text()
    return any(word in text for word in ("machine_code(", "@intrinsic")) or file.stem.endswith(("_loop", "_loops"))


def test_every_file_whose_loops_or_constants_others_compile_is_listed() -> None:
    called = set()
    for file in PACKAGE.rglob("*.py"):
        if not has_loops(file):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foretoken."):
                other = PACKAGE.parent / (str(node.module).replace(".", "/") + ".py")
                constants = any(name.name.isupper() for name in node.names)
                if other.exists() and (has_loops(other) or constants):
                    called.add(other.relative_to(PACKAGE).as_posix())
    assert called <= set(CALLED)
    assert len(called) > 5
