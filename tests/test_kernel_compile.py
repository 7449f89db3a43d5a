"""Compiled loops on disk are not used any longer than the code that is in them."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from numba import config, njit, typeof
from numba.core.caching import CompileResultCacheImpl, IndexDataCacheFile, NullCache

from foretoken.kernel import compile, layer, product
from foretoken.kernel.compile import CompiledCodeWarning, Loop, cached

# A package with the loop x -> 5 x + 12, compiled from four other files; `unused` is not among them.
FILES = {
    "loop": """
from foretoken.kernel.compile import compiled
from foretoken_made.callee import callee
from foretoken_made import far
from foretoken_made.constant import CONSTANT
from foretoken_made.intrinsic import one
def _loop(x):
    return callee(x) + far.other(x) + CONSTANT + one(x)
loop = compiled(_loop)
""",
    "callee": "from foretoken.kernel.compile import compiled\n@compiled\ndef callee(x):\n    return 2 * x\n",
    "far": "from foretoken.kernel.compile import compiled\n@compiled\ndef other(x):\n    return 3 * x\n",
    "constant": "CONSTANT = 5\n",
    "intrinsic": """
from numba.extending import intrinsic
from foretoken_made.helper import value
@intrinsic
def one(typing, x):
    def code(context, builder, signature, arguments):
        return value(arguments[0])
    return x(x), code
""",
    "helper": "from llvmlite import ir\ndef value(x):\n    return ir.Constant(x.type, 7)\n",
    "unused": "UNUSED = 1\n",
    "quadruple": """
from foretoken.kernel.addresses import alive, whole
from foretoken.kernel.compile import compiled, linked
@linked("foretoken_made_double", 2, 1)
def double(x, n, more):
    numbers = whole(x, (n,))
    for i in range(n):
        numbers[i] = 2 * numbers[i] + int(more)
@linked("foretoken_made_quadruple", 2)
def twice(x, n):
    double(x, n, 0)
    double(x, n, 1.5)
@compiled
def quadruple(x):
    twice(x.ctypes.data, len(x))
    alive(x)
""",
    "child": """
from foretoken.kernel import compile
compile._is_ours = lambda module: module.startswith("foretoken")
import foretoken_made.quadruple
""",
    "pair": "from typing import NamedTuple\nclass Pair(NamedTuple):\n    left: int\n    right: int\n",
    "pairs": """
from foretoken.kernel.compile import compiled
@compiled
def loop(pairs):
    return 10 * pairs[0].left + pairs[0].right
""",
}


def _twice(x):  # type: ignore[no-untyped-def]
    return 2 * x


def run() -> int:
    """How often the code came from disk: 1 or 0."""
    function = cached(njit(_twice))
    assert function(4) == 8
    return sum(function.stats.cache_hits.values())


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where numba keeps what it compiles."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    compile._warn.cache_clear()
    return tmp_path


@pytest.fixture
def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of FILES, the modules of which are read anew by `load`."""
    package = folder / "foretoken_made"
    package.mkdir()
    for name, text in FILES.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python takes a file of the same second and size for old
    monkeypatch.setattr(compile, "_is_ours", lambda module: module.startswith("foretoken_made"))
    return package


def load(x: int) -> tuple[int, int]:
    """The value of the loop of FILES at x, its modules imported anew, and how often its code came from disk."""
    compile._content.cache_clear()
    for name in [name for name in sys.modules if name.startswith("foretoken_made")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    loop = importlib.import_module("foretoken_made.loop").loop
    return loop(x), sum(loop._code.stats.cache_hits.values())


@pytest.mark.parametrize(
    ("file", "old", "new", "result"),
    [
        ("callee", "2 * x", "4 * x", 68),
        ("far", "3 * x", "4 * x", 60),
        ("constant", "5", "6", 53),
        ("helper", "7", "9", 54),
        ("unused", "1", "2", None),
    ],
)
def test_a_loop_is_compiled_anew_when_what_it_is_compiled_from_changes(
    made: Path, file: str, old: str, new: str, result: int | None
) -> None:
    assert load(8) == (52, 0)
    assert load(8) == (52, 1)
    path = made / f"{file}.py"
    path.write_text(path.read_text().replace(old, new))
    assert load(8) == ((52, 1) if result is None else (result, 0))
    assert load(8)[1] == 1


def test_a_loop_is_compiled_anew_when_the_fields_of_a_named_tuple_change(made: Path) -> None:
    def run_on_pair() -> tuple[int, int]:
        load(8)
        modules = [importlib.import_module(f"foretoken_made.{name}") for name in ("pairs", "pair")]
        result = modules[0].loop((modules[1].Pair(1, 2),))
        return result, sum(modules[0].loop._code.stats.cache_hits.values())

    assert run_on_pair() == (12, 0)
    assert run_on_pair() == (12, 1)
    path = made / "pair.py"
    path.write_text(path.read_text().replace("left", "above").replace("right", "left").replace("above", "right"))
    assert run_on_pair() == (21, 0)
    assert run_on_pair() == (21, 1)


@pytest.fixture
def quadruple(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Loop]]:
    """Imports the loop x -> 4 x + 1 of FILES anew, whose two linked loops another process compiles."""
    monkeypatch.setattr(compile, "_is_ours", lambda module: module.startswith("foretoken"))
    monkeypatch.setattr(compile, "LINKED", "foretoken_made.child")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(made.parent))
    monkeypatch.delenv(compile.AT_ONCE, raising=False)
    compile._other_process.cache_clear()

    def imported() -> Loop:
        sys.modules.pop("foretoken_made.quadruple", None)
        return importlib.import_module("foretoken_made.quadruple").quadruple

    yield imported
    if process := compile._other_process():
        process.wait()
    compile._other_process.cache_clear()
    compile._missing.clear()


def run_on_numbers(loop: Loop) -> list[int]:
    """The loop of FILES at 1, 2 and 3."""
    numbers = np.array([1, 2, 3])
    loop(numbers)
    return numbers.tolist()


def from_disk() -> list[int]:
    """Whether the code of the two linked loops of FILES came from disk: 1 or 0 for each."""
    return [made._made.cache_hits for made in compile._linked[-2:]]


def test_another_process_compiles_linked_loops(quadruple: Callable[[], Loop]) -> None:
    loop = quadruple()
    assert len(compile._missing) == 2
    process = compile._other_process()
    assert process is not None
    assert process.wait() == 0
    assert run_on_numbers(loop) == [5, 9, 13]
    assert from_disk() == [1, 1]
    assert not compile._missing
    assert run_on_numbers(quadruple()) == [5, 9, 13]
    assert compile._other_process() is process  # since all is on disk


@pytest.mark.parametrize(
    "broken", [(sys, "executable", "/no/such/program"), (compile, "LINKED", "foretoken_made.none")]
)
def test_linked_loops_are_compiled_where_no_other_process_does_it(
    quadruple: Callable[[], Loop], broken: tuple[object, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken)
    assert run_on_numbers(quadruple()) == [5, 9, 13]
    assert from_disk() == [0, 0]


def test_an_interrupt_while_linked_loops_are_awaited_leaves_them_for_the_next_call(
    quadruple: Callable[[], Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = quadruple()
    with monkeypatch.context() as patch:
        patch.setattr(compile.Linked, "find", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_on_numbers(loop)
    assert len(compile._missing) == 2
    assert run_on_numbers(loop) == [5, 9, 13]


def test_callers_of_a_linked_loop_that_changes_are_compiled_anew(made: Path, quadruple: Callable[[], Loop]) -> None:
    run_on_numbers(quadruple())
    path = made / "quadruple.py"
    path.write_text(path.read_text().replace("double(x, n, 1.5)", "double(x, n, 2.5)"))
    compile._content.cache_clear()
    assert run_on_numbers(quadruple()) == [6, 10, 14]


def test_a_loop_in_threads_is_kept_with_its_callers_alone() -> None:
    """Code that was compiled against one from disk crashes the process that loads it."""
    for loop in (product.panels_threads, layer.layers_threads):
        assert isinstance(loop._code._cache, NullCache)
    assert not isinstance(product.times._code._cache, NullCache)


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 0.5])
def test_a_file_that_is_cut_short_is_written_again(folder: Path, kind: str, left: float) -> None:
    run()
    (file,) = folder.rglob(f"*.{kind}")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(left * len(whole))])
    assert run() == 0
    assert run() == 1


def test_code_of_another_process_is_not_taken_for_ones_own(folder: Path) -> None:
    """Of two processes that compile for two types at the same time, the one's index and the other's code are left."""
    assert cached(njit(_twice))(4) == 8
    (index,) = folder.rglob("*.nbi")
    of_whole_numbers = index.read_bytes()
    index.unlink()
    assert cached(njit(_twice))(4.5) == 9
    index.write_bytes(of_whole_numbers)
    function = cached(njit(_twice))
    assert function(4) == 8
    assert not function.stats.cache_hits
    assert function.nopython_signatures[0].args == (typeof(4),)
    assert run() == 1


def test_a_full_disk_gives_one_warning_and_leaves_no_index_of_old_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_save_data", full)
        with pytest.warns(CompiledCodeWarning, match=r"\(No space left on device\).*NUMBA_CACHE_DIR") as warned:
            assert run() == run() == 0
    assert len(warned) == 1
    assert not [*folder.rglob("*.nb?")]
    run()
    assert run() == 1


def test_without_any_folder_loops_run_with_one_warning(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for locator in CompileResultCacheImpl._locator_classes:
        monkeypatch.setattr(locator, "from_function", lambda *_: None)
    with pytest.warns(CompiledCodeWarning, match="no folder can be written") as warned:
        assert run() == run() == 0
    assert len(warned) == 1
