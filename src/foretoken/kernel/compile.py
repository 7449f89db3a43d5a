"""Python loops over arrays as machine code: compiled by numba when they are first called, and kept on disk."""

import atexit
import functools
import hashlib
import importlib
import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np

from foretoken.kernel import copied
from foretoken.kernel.held import hold_interrupts

CONSTANTS = (bool, int, float, str, bytes, tuple)  # types of global variables whose values numba compiles in


class CompiledCodeWarning(UserWarning):
    """Compiled loops cannot be kept on disk, so that every run compiles them anew."""


class Loop:
    """A function that numba compiles when it is first called, from Python or from another compiled function.

    numba takes half a second to import, so it is imported then, and not where the function is defined.

    function: the Python function.
    fastmath: LLVM's flags of what may be done to float arithmetic.
    parallel: whether its `prange` loops run in threads.
    """

    def __init__(self, function: Callable[..., Any], fastmath: set[str], parallel: bool) -> None:
        functools.update_wrapper(self, function)
        self._fastmath, self._parallel = fastmath, parallel

    @functools.cached_property
    def _code(self) -> Any:
        """The loop as Python calls it."""
        return self._made(for_python=True)

    @functools.cached_property
    def _inner_code(self) -> Any:
        """The loop as compiled functions call it: without the code that reads Python's objects, which is long."""
        return self._made(for_python=False)

    def _made(self, for_python: bool) -> Any:
        import numba

        hold_interrupts()
        # `unwrap` takes off the checkers that the tests put around every function: numba compiles the bare loop.
        # error_model: x / 0 is inf or nan, as in arrays; the check for it would keep loops with divisions out of
        # vector registers.
        # A loop that runs in threads cannot be copied as others are: its threads' part is code of its own.
        alone = {} if for_python or self._parallel else {"pipeline_class": copied.compiler()}
        make = cast(Any, numba.njit)(
            nogil=True, fastmath=self._fastmath, parallel=self._parallel, error_model="numpy",
            no_cpython_wrapper=not for_python, no_cfunc_wrapper=True, **alone,
        )  # fmt: skip
        loop = make(inspect.unwrap(self))
        loop.get_call_template = functools.partial(_call_template, loop.get_call_template)
        # A loop that runs in threads is kept with what calls it alone: a caller that is compiled against one from disk
        # runs, but what is kept of that caller lacks the threads' part, and the next process that loads it crashes.
        return loop if self._parallel else cached(loop, for_python)

    @functools.cached_property
    def _reached(self) -> set[str]:
        """The full names of the functions that the loop calls, directly or through others, and its own."""
        parts: dict[str, str] = {}
        _collect(inspect.unwrap(self), parts)
        return set(parts)

    def __call__(self, *arguments: Any) -> Any:
        if _missing and (missing := self._reached & _missing.keys()):
            _find(self, missing, arguments)
        return self._code(*arguments)

    @property
    def _numba_type_(self) -> Any:
        """The type that numba gives this object in a function that it compiles."""
        return self._inner_code._numba_type_


def _call_template(of_types: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Have a loop compiled once for constants and variables; numba would compile it for each constant by itself.

    of_types: numba's method that has it compiled.
    arguments, named: the types that it is called with.
    """
    from numba.core.types import unliteral

    return of_types(tuple(map(unliteral, arguments)), {name: unliteral(kind) for name, kind in named.items()})


def compiled(loop: Callable[..., Any], fuse: bool = False, reorder_sums: bool = False, parallel: bool = False) -> Loop:
    """Return a loop as machine code, which is compiled when it is first called.

    loop: a function of numbers, arrays and tuples of them.
    fuse: whether a product and a sum may become one instruction, which rounds once.
    reorder_sums: whether float sums may be reordered, which lets them use vector registers.
    parallel: whether `prange` runs in threads.
    """
    fastmath = {"contract"} if fuse else set[str]()
    return Loop(loop, fastmath | {"reassoc", "nsz"} if reorder_sums else fastmath, parallel)


fused = functools.partial(compiled, fuse=True)


class Linked:
    """A loop that its callers are linked to by name: their machine code jumps to the address in `address`.

    A function that calls another one usually gets a compiled copy of it, which takes seconds where that one is large.

    kinds: numba's types of the loop's arguments.
    address: where the loop's machine code is in memory [1] int64. It is 0 at first, and machine code that jumps there
        ends the process: `Loop` sees to it that a loop's code is found before its callers run.
    """

    def __init__(self, name: str, loop: Callable[..., None], count: int, floats: int) -> None:
        """Look for no code yet; name, count, floats: as in `linked`."""
        from llvmlite import binding
        from numba import types
        from numba.core.ccallback import CFunc

        hold_interrupts()
        self.kinds = (types.intp,) * count + (types.float64,) * floats
        self.address = np.zeros(1, np.int64)
        options = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}
        self._made: Any = cached(CFunc(inspect.unwrap(loop), (self.kinds, types.void), {}, options))
        binding.add_symbol(name, self.address.ctypes.data)

    def load(self) -> bool:
        """Load the loop's machine code if it is on disk; return whether it was."""
        from numba.core.compiler_lock import global_compiler_lock

        made = self._made
        with global_compiler_lock:
            found = made._cache.load_overload(made._sig, made._targetdescr.target_context)
            if found is not None:
                self._library = found.library  # owns the code
                self.address[0] = found.library.get_pointer_to_function(found.fndesc.llvm_cfunc_wrapper_name)
        return found is not None

    def compile(self) -> None:
        """Compile the loop, and keep its machine code on disk."""
        self._made.compile()
        self.address[0] = self._made.address

    def can_be_kept(self) -> bool:
        """Whether there is a folder for the loop's machine code."""
        return isinstance(self._made._cache, _cache_class())


_linked: list[Linked] = []  # keeps their code in memory
_missing: dict[str, Linked] = {}  # those whose code has not been found yet, by the loop's full name
_finding = threading.Lock()
# Import all modules with linked loops, in the order in which a first start calls them.
LINKED = ("foretoken.kernel.packing", "foretoken.kernel.model", "foretoken.kernel.q4_k")
AT_ONCE = "FORETOKEN_COMPILE_AT_ONCE"  # in the environment: linked loops are compiled where they are defined
# What the other process runs, until its input ends, as it does when this process is killed. The garbage collector would
# take 4% of the time, and save 90 MB.
COMPILING = """import gc, os, sys, threading
gc.disable()
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
import {}
os._exit(0)"""
LONGEST = 180  # seconds for which another process is waited for; the slowest one so far took 40


def linked(name: str, count: int, floats: int = 0) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that lets the callers of a loop be linked to it by name, see `Linked`.

    name: a symbol that no other function has.
    count: number of the loop's arguments that are whole numbers, the first ones; it returns nothing.
    floats: number of its further arguments, in float64.
    """
    from llvmlite import ir

    from foretoken.kernel.addresses import written

    def link(loop: Callable[..., None]) -> Any:
        made = Linked(name, loop, count, floats)
        _linked.append(made)
        if not made.load():
            if AT_ONCE in os.environ:
                made.compile()
            else:
                _missing[_name(inspect.unwrap(loop))] = made

        def jump(b: Any, *values: Any) -> None:
            pointer = ir.FunctionType(ir.VoidType(), [value.type for value in values]).as_pointer()
            b.call(b.load(b.module.globals.get(name) or ir.GlobalVariable(b.module, pointer, name)), values)

        call = written(*made.kinds)(jump)
        call.__wrapped__ = loop  # for `_collect`
        return call

    return link


@functools.cache
def compile_ahead() -> subprocess.Popen[bytes] | None:
    """Have another process compile the linked loops that are not on disk, and return it; None where there is none.

    They take about as long as the loops that call them, which this process compiles meanwhile.
    """
    for module in LINKED:
        importlib.import_module(module)
    if not sys.executable or not any(made.can_be_kept() for made in _missing.values()):
        return None
    # -P: without it the current folder would come first on the path.
    command = [sys.executable, "-P", "-c", COMPILING.format(", ".join(LINKED))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path)), AT_ONCE: "1"}
    silent = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=silent, stderr=silent)
    except OSError:
        return None
    atexit.register(process.terminate)
    return process


def _find(loop: Loop, names: set[str], arguments: tuple[Any, ...]) -> None:
    """Find linked loops, while or after another process compiles them, or compile them where none does.

    loop: a loop that calls them, and is compiled meanwhile if need be.
    names: their full names.
    arguments: what `loop` is called with.
    """
    loop._code.compile(tuple([loop._code.typeof_pyval(value) for value in arguments]))
    process = compile_ahead() if compile_ahead.cache_info().currsize else None  # one that was started before
    with _finding:
        end = time.monotonic() + LONGEST
        while names & _missing.keys():
            for name, made in [*_missing.items()]:  # a copy: another thread may import loops meanwhile
                if made.load():
                    del _missing[name]
            every = [*_missing]
            called = [name for name in every if name in names]
            # Another process goes through all of them in order: it is at the first one that is not on disk.
            if called == every[:1] and process is not None and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            elif called:
                _missing[called[-1]].compile()
                del _missing[called[-1]]


def when_compiling(call: Callable[[], None]) -> None:
    """Have a function called whenever numba begins to compile a loop that is not on disk; call: the function."""
    from numba.core import event

    class Listener(event.Listener):
        def on_start(self, event: object) -> None:
            call()

        def on_end(self, event: object) -> None: ...

    event.register("numba:compile", Listener())


@functools.cache
def compilations() -> list[int]:
    """Return a list of one number, which counts the loops that are compiled and not loaded from disk.

    The list is always the same one. It counts from the first call of this function on.
    """
    count = [0]

    def one_more() -> None:
        count[0] += 1

    when_compiling(one_more)
    return count


def use_threads(threads: int) -> int | None:
    """Let compiled loops run in up to `threads` threads from now on.

    Returns their number, at most what numba can start; None for one thread, which is a type of its own for compiled
    loops, so that no code for more threads is compiled.
    """
    if threads == 1:
        return None
    from numba import config, set_num_threads

    threads = min(threads, config.NUMBA_NUM_THREADS)  # pyright: ignore[reportAttributeAccessIssue]
    set_num_threads(threads)
    return threads


def cached(function: Any, for_python: bool = True) -> Any:
    """Let numba keep the machine code of `function`, which it will compile, on disk; return the function.

    It is compiled anew when something that it is compiled from changes (`_stamp`): numba's own cache looks at the
    function's file only, and would go on with the old code of what it calls. The cache is a matter of speed only: where
    it cannot be read, its entry is removed and the function compiled; where it cannot be written, there is one warning.

    function: what numba will compile.
    for_python: whether its code can be called from Python, see `Loop`.
    """
    try:
        function._cache = _cache_class()(inspect.unwrap(function), for_python)
    except RuntimeError:  # numba found none
        _warn("no folder can be written")
    return function


@functools.cache
def _cache_class() -> Any:
    """Return a class like numba's cache of a function, but whose errors never stop a run."""
    from numba.core.caching import FunctionCache, IndexDataCacheFile

    class Files(IndexDataCacheFile):
        """Files that hold their stamp and key, since processes that compile at once may write code under one name.

        They also hold a hash of the code: damaged machine code would end the process.
        """

        def save(self, key: Any, data: Any) -> None:
            code = self._dump(data)
            super().save(key, (self._source_stamp, key, hashlib.sha256(code).digest(), code))

        def load(self, key: Any) -> Any:
            found = super().load(key)
            if found is None or found[:3] != (self._source_stamp, key, hashlib.sha256(found[3]).digest()):
                return None
            return pickle.loads(found[3])

    class Cache(FunctionCache):
        def __init__(self, function: FunctionType, for_python: bool) -> None:
            super().__init__(function)
            self._for_python = for_python
            if not for_python:
                self._impl = copied.on_disk()(function)
            self._cache_file = Files(self._cache_path, self._impl.filename_base, None)

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            # The stamp is taken here, and not where the function is defined, since what it calls may be defined later.
            self._cache_file._source_stamp = _stamp(self._py_func)
            try:
                return super().load_overload(sig, target_context)
            except Exception:  # a file that is cut short fails in as many ways as there are places to cut it
                self._forget()
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)
            except Exception as error:
                self._forget()  # the index is written first, and may stand for code of an older version
                _warn(getattr(error, "strerror", None) or type(error).__name__)

        def _index_key(self, sig: Any, codegen: Any) -> Any:
            from foretoken.kernel.processor import MATRIX  # not among the features: Linux may refuse it

            return (*super()._index_key(sig, codegen), _fields(getattr(sig, "args", sig)), MATRIX, self._for_python)

        def _forget(self) -> None:
            with suppress(OSError):
                os.unlink(self._cache_file._index_path)

    return Cache


def _fields(kinds: Iterable[Any]) -> tuple[Any, ...]:
    """Return the fields of all named tuples among some of numba's types.

    numba takes named tuples with other fields for the same type.

    kinds: the types; those inside them are looked at too.
    """
    return tuple((kind.__dict__.get("fields"), _fields(kind.types)) for kind in kinds if hasattr(kind, "types"))


@functools.cache
def _warn(why: str) -> None:
    """Warn that loops cannot be kept on disk, once per reason; why: the reason."""
    warnings.warn(
        f"Compiled loops cannot be kept on disk ({why}), so that every run compiles them anew: set NUMBA_CACHE_DIR to "
        "a folder with room.",
        CompiledCodeWarning,
        stacklevel=2,
    )


def _stamp(function: FunctionType) -> str:
    """Return a hash of all that `function` is compiled from.

    That is its file, the files of the functions of this package that it calls, directly or through others, the
    constants that any of them names, and the files that say how functions are compiled.
    """
    here = Path(__file__)
    parts = {name: _content(here.with_name(f"{name}.py")) for name in ("compile", "copied", "addresses")}
    _collect(function, parts)
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def _collect(function: FunctionType, parts: dict[str, str]) -> None:
    """Add to `parts`, by name, the hashes of files and the constants that `function` is compiled from."""
    name = _name(function)
    if name in parts:
        return
    parts[name] = _content(Path(inspect.getfile(function)))
    names, codes = set[str](), [function.__code__]
    for code in codes:  # the function's own, and, as the list grows, that of the functions defined within it
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {key: cell.cell_contents for key, cell in cells}
    values |= {key: function.__globals__[key] for key in names & function.__globals__.keys()}
    for key, value in [*values.items()]:
        if isinstance(value, ModuleType) and _is_ours(value.__name__):
            values |= {f"{key}.{inner}": vars(value)[inner] for inner in names & vars(value).keys()}
    for key, value in sorted(values.items()):  # so that of functions with one name the same one comes first always
        if isinstance(value, CONSTANTS):
            parts[f"{name} {key}"] = repr(value)
        elif callable(value):
            inner = inspect.unwrap(value)  # loops, and what numba makes of functions, wrap them
            if isinstance(inner, FunctionType) and _is_ours(inner.__module__):
                _collect(inner, parts)


def _name(function: FunctionType) -> str:
    """Return the full name of a function."""
    return f"{function.__module__}.{function.__qualname__}"


def _is_ours(module: str) -> bool:
    """Whether a module, given by its full name, is of this package."""
    return module.partition(".")[0] == __name__.partition(".")[0]


@functools.cache
def _content(file: Path) -> str:
    """Return a hash of the contents of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
