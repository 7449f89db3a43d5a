"""Compiled loops on disk are not used any longer than the code that is in them."""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest
from numba import config, njit, typeof
from numba.core.caching import CompileResultCacheImpl, IndexDataCacheFile, NullCache
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target

from foretoken.kernel import compile, layer, product
from foretoken.kernel.compile import CompiledCodeWarning, Linked, Loop, cached
from raising import raising

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
    "halves": """
from foretoken.kernel.addresses import whole
from foretoken.kernel.compile import linked
@linked("foretoken_made_double", 2, 1)
def double(x, n, more):
    numbers = whole(x, (n,))
    for i in range(n):
        numbers[i] = 2 * numbers[i] + int(more)
@linked("foretoken_made_quadruple", 2)
def twice(x, n):
    double(x, n, 0)
    double(x, n, 1.5)
""",
    "quadruple": """
from foretoken.kernel.addresses import alive
from foretoken.kernel.compile import compiled
from foretoken_made.halves import twice
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
    "threads": """
from functools import partial
from numba import prange
from foretoken.kernel.compile import compiled
@partial(compiled, parallel=True)
def in_threads(x):
    for i in prange(len(x)):
        x[i] *= 2
@compiled
def copied(x):
    in_threads(x)
@compiled
def outer(x):
    copied(x)
""",
    "run_threads": """
import numpy as np
from foretoken.kernel import compile
compile._is_ours = lambda module: module.startswith("foretoken_made")
from foretoken_made.threads import outer
numbers = np.array([1, 2, 3])
outer(numbers)
print(numbers, outer._code.stats.cache_hits.total())
""",
    "pair": "from typing import NamedTuple\nclass Pair(NamedTuple):\n    left: int\n    right: int\n",
    "pairs": """
from foretoken.kernel.compile import compiled
@compiled
def loop(pairs):
    return 10 * pairs[0].left + pairs[0].right
""",
}


def _twice(x):
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


def imported_anew(name: str) -> ModuleType:
    """A module of FILES; it and those that it imports are read and run again."""
    compile._content.cache_clear()
    for known in [known for known in sys.modules if known.startswith("foretoken_made")]:
        del sys.modules[known]
    importlib.invalidate_caches()
    return importlib.import_module(f"foretoken_made.{name}")


def hits(loop: Loop) -> int:
    """How often the code of a loop came from disk."""
    return sum(loop._code.stats.cache_hits.values())


def load(x: int) -> tuple[int, int]:
    """The value of the loop of FILES at x, its modules imported anew, and how often its code came from disk."""
    loop = imported_anew("loop").loop
    return loop(x), hits(loop)


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


@pytest.mark.parametrize("file", ["compile", "copied", "addresses"])
def test_every_loop_is_compiled_anew_when_the_way_of_compiling_changes(
    monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def loop(x: int) -> int:
        return x

    before, content = compile._stamp(loop), compile._content
    monkeypatch.setattr(compile, "_content", lambda path: "" if path.stem == file else content(path))
    assert compile._stamp(loop) != before


def test_a_loop_is_compiled_anew_when_the_fields_of_a_named_tuple_change(made: Path) -> None:
    def run_on_pair() -> tuple[int, int]:
        load(8)
        modules = [importlib.import_module(f"foretoken_made.{name}") for name in ("pairs", "pair")]
        result = modules[0].loop((modules[1].Pair(1, 2),))
        return result, hits(modules[0].loop)

    assert run_on_pair() == (12, 0)
    assert run_on_pair() == (12, 1)
    path = made / "pair.py"
    path.write_text(path.read_text().replace("left", "above").replace("right", "left").replace("above", "right"))
    assert run_on_pair() == (21, 0)
    assert run_on_pair() == (21, 1)


@pytest.fixture
def quadruple(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Loop]]:
    """Imports the loop x -> 4 x + 1 of FILES anew, which calls one linked loop, and that another."""
    monkeypatch.setattr(compile, "_is_ours", lambda module: module.startswith("foretoken"))
    monkeypatch.setattr(compile, "LINKED", ("foretoken_made.child",))
    monkeypatch.setattr(compile, "_missing", {})
    monkeypatch.delenv(compile.AT_ONCE, raising=False)
    compile.compile_ahead.cache_clear()

    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(made.parent))
        yield lambda: imported_anew("quadruple").quadruple
    config.reload_config()  # numba would read the variables again in the middle of the next test
    compile.compile_ahead.cache_clear()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the linked loops that this process compiles."""
    names, usual = list[str](), CFunc._compile_uncached

    def compiled(self: CFunc) -> object:
        names.append(self._pyfunc.__name__)
        return usual(self)

    monkeypatch.setattr(CFunc, "_compile_uncached", compiled)
    return names


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has another process run other code instead of compiling."""
    started = list[subprocess.Popen[bytes]]()

    def runs(code: str) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        monkeypatch.setattr(subprocess, "Popen", Mock(return_value=started[-1]))

    yield runs
    for process in started:
        process.kill()
        process.wait()


def run_on_numbers(loop: Loop) -> list[int]:
    """The loop of FILES at 1, 2 and 3."""
    numbers = np.array([1, 2, 3])
    loop(numbers)
    return numbers.tolist()


def test_linked_loops_are_compiled_when_they_are_first_needed(quadruple: Callable[[], Loop], here: list[str]) -> None:
    loop = quadruple()
    assert not here
    assert len(compile._missing) == 2
    assert run_on_numbers(loop) == [5, 9, 13]
    assert sorted(here) == ["double", "twice"]
    assert not compile._missing
    here.clear()
    loop = quadruple()
    assert not compile._missing  # all is on disk
    assert run_on_numbers(loop) == [5, 9, 13]
    assert not here


def test_another_process_compiles_linked_loops(quadruple: Callable[[], Loop], here: list[str]) -> None:
    loop = quadruple()
    process = compile.compile_ahead()
    assert process is not None
    assert process.wait() == 0
    assert run_on_numbers(loop) == [5, 9, 13]
    assert not here


def test_loops_that_another_thread_imports_meanwhile_do_not_stop_the_search(
    quadruple: Callable[[], Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, usual = quadruple(), Linked.load

    def loaded(self: Linked) -> bool:
        compile._missing.setdefault("foretoken_made.later", self)
        return usual(self)

    monkeypatch.setattr(Linked, "load", loaded)
    assert run_on_numbers(loop) == [5, 9, 13]


@pytest.mark.parametrize(
    "broken",
    [(sys, "executable", "/no/such/program"), (sys, "executable", None), (Linked, "can_be_kept", lambda self: False)],
)
def test_no_other_process_is_started_where_none_can_help(
    quadruple: Callable[[], Loop], broken: tuple[object, str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken)
    loop = quadruple()
    assert compile.compile_ahead() is None
    assert run_on_numbers(loop) == [5, 9, 13]


def test_another_process_sees_no_other_files_than_this_one(
    quadruple: Callable[[], Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "numba.py").write_text("open('was_read', 'w').close()")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    quadruple()
    process = compile.compile_ahead()
    assert process is not None
    assert process.wait() == 0
    assert not (folder / "was_read").exists()


HANG = "import time; time.sleep(600)"


@pytest.mark.parametrize(("code", "longest"), [("raise SystemExit(1)", 600), (HANG, 0.2)])
def test_a_process_that_fails_or_hangs_is_not_awaited_for_ever(
    quadruple: Callable[[], Loop], here: list[str], another: Callable[[str], None], code: str, longest: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loop = quadruple()
    another(code)
    monkeypatch.setattr(compile, "LONGEST", longest)
    assert compile.compile_ahead() is not None
    assert run_on_numbers(loop) == [5, 9, 13]
    assert sorted(here) == ["double", "twice"]


def test_an_interrupt_while_linked_loops_are_awaited_leaves_them_for_the_next_call(
    quadruple: Callable[[], Loop], another: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = quadruple()
    another(HANG)
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", Mock(side_effect=KeyboardInterrupt))
        compile.compile_ahead()
        with pytest.raises(KeyboardInterrupt):
            run_on_numbers(loop)
    assert len(compile._missing) == 1  # of two, this process compiled one
    compile.compile_ahead.cache_clear()
    assert run_on_numbers(loop) == [5, 9, 13]


def test_a_linked_loop_that_changes_is_compiled_anew_and_so_are_its_callers(
    made: Path, quadruple: Callable[[], Loop], here: list[str]
) -> None:
    run_on_numbers(quadruple())
    run_on_numbers(loop := quadruple())
    assert hits(loop) == 1
    here.clear()
    path = made / "halves.py"
    path.write_text(path.read_text().replace("double(x, n, 1.5)", "double(x, n, 2.5)"))
    assert run_on_numbers(loop := quadruple()) == [6, 10, 14]
    assert hits(loop) == 0
    assert sorted(here) == ["double", "twice"]


def test_a_loop_that_loops_call_has_no_machine_code_of_its_own(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what Python calls has; the other is kept too, so that a new caller can be compiled with it."""
    engine = cpu_target.target_context.codegen()._engine
    add, compiled = engine.add_module, list[str]()
    monkeypatch.setattr(engine, "add_module", lambda module: [compiled.append(module.name), add(module)][1])
    assert load(8) == (52, 0)
    assert [name for name in ("_loop", "callee", "other") if any(name in module for module in compiled)] == ["_loop"]
    for path in made.parent.rglob("loop.*.nb?"):
        path.unlink()
    assert load(8) == (52, 0)
    assert importlib.import_module("foretoken_made.callee").callee._inner_code.stats.cache_hits.total() == 1


def test_a_loop_in_threads_is_kept_with_its_callers_alone() -> None:
    """Code that was compiled against one from disk crashes the process that loads it."""
    for loop in (product.panels_threads, layer.layers_threads):
        assert isinstance(loop._code._cache, NullCache)
    assert not isinstance(product.times._code._cache, NullCache)


def test_a_copied_loop_that_calls_one_in_threads_starts_them(made: Path) -> None:
    """In processes in which nothing else does: where its copy is compiled into a caller, and where that is on disk."""
    assert run_on_numbers(imported_anew("threads").outer) == [2, 4, 6]
    for path in made.parent.rglob("threads.outer-*.nb?"):
        path.unlink()
    places = {"PYTHONPATH": os.pathsep.join([str(made.parent), *sys.path]), "NUMBA_CACHE_DIR": str(made.parent)}
    command = [sys.executable, "-m", "foretoken_made.run_threads"]
    for known in 0, 1:
        environment = os.environ | places | {"NUMBA_NUM_THREADS": "2"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"[2 4 6] {known}\n")


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_file_that_is_cut_short_or_damaged_is_written_again(folder: Path, kind: str) -> None:
    run()
    (file,) = folder.rglob(f"*.{kind}")
    whole = file.read_bytes()
    places = [len(whole) * quarter // 4 for quarter in (1, 2, 3)]
    changed = [whole[:place] + bytes([255 - whole[place]]) + whole[place + 1 :] for place in places]
    for content in (b"", whole[: places[1]], *(changed if kind == "nbc" else [])):
        file.write_bytes(content)
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
    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_save_data", raising(OSError(28, "No space left on device")))
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
