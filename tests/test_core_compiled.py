"""Compiled loops on disk are not used any longer than the code that is in them."""

import ast
from pathlib import Path

import pytest
from numba import njit

import foretoken
from foretoken.core import compiled
from foretoken.core.compiled import CALLED, stamped

PACKAGE = Path(foretoken.__file__).parent


def _twice(x):  # type: ignore[no-untyped-def]
    return 2 * x


def hits(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Of the cache, where the files of CALLED read `text`."""
    (tmp_path / "called.py").write_text(text)
    monkeypatch.setattr(compiled, "CALLED", (tmp_path / "called.py",))
    compiled._content.cache_clear()
    function = stamped(njit(cache=True)(_twice))
    assert function(4) == 8
    return sum(function.stats.cache_hits.values())  # pyright: ignore[reportFunctionMemberAccess]


def test_what_a_loop_calls_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hits("before", monkeypatch, tmp_path)
    assert hits("before", monkeypatch, tmp_path) == 1
    assert hits("after", monkeypatch, tmp_path) == 0
    assert hits("after", monkeypatch, tmp_path) == 1
    monkeypatch.undo()
    compiled._content.cache_clear()


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
