"""Loops over rows in CPU memory, compiled when first called and cached on disk."""

import functools
import hashlib
import inspect
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# Files whose loops, or constants, are compiled into the loops of other files.
CALLED = (
    "core/vectors.py", "core/softmax_loop.py", "core/truncated_loop.py", "core/draws_fast.py", "core/draw_loops.py",
    "models/panels.py", "models/tile.py", "models/row_loops.py", "models/product.py", "models/attention.py",
    "models/kernel_steps.py", "models/kernel.py", "models/kernel_chain.py", "core/budgeted.py",
    "trees/budget_fast.py", "verify/rejection_fast.py",
)  # fmt: skip


class CompiledCodeWarning(UserWarning):
    """Compiled loops cannot be kept on disk, so that every run compiles them anew."""


@functools.cache
def compiled(loop: Callable[..., Any], reorder_sums: bool = False) -> Callable[..., Any]:
    """`loop` as machine code. reorder_sums: float sums may be reordered, which lets them use vector registers."""
    from numba import njit  # here, not above: it takes half a second to import

    fastmath = {"reassoc", "nsz"} if reorder_sums else False
    # `unwrap` takes off the checkers that the tests put around every function: numba compiles the bare loop.
    # error_model: x / 0 is inf or nan, as in arrays; the check for it would keep loops with divisions out of vectors.
    return cached(njit(nogil=True, fastmath=fastmath, error_model="numpy")(inspect.unwrap(loop)))


def cached(function: Any) -> Any:
    """`function`, which numba will compile, with its machine code kept on disk.

    It is compiled anew when a file of CALLED changed too: numba's cache looks at the function's own file only, and
    would go on with the old code of what it calls. The cache is a matter of speed only: where it cannot be read, its
    entry is removed and the function compiled; where it cannot be written, one warning tells.
    """
    source = inspect.unwrap(function)
    try:
        cache = _cache_class()(source)
    except RuntimeError as error:  # numba found no folder that can be written
        _warn(error)
        return function
    cache._cache_file._source_stamp = _content(Path(inspect.getfile(source))), _content()
    function._cache = cache
    return function


@functools.cache
def _cache_class() -> Any:
    """numba's cache of a function, which never stops a run."""
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                return super().load_overload(sig, target_context)
            except Exception:  # a file that is cut short fails in as many ways as there are places to cut it
                self._forget()
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)
            except Exception as error:
                self._forget()  # the index is written first, and what it tells of may be old code
                _warn(error)

        def _forget(self) -> None:
            with suppress(OSError):
                os.unlink(self._cache_file._index_path)

    return Cache


def _warn(error: Exception) -> None:
    """Once for all loops."""
    if not _told:
        _told.append(True)
        why = getattr(error, "strerror", None) or "no folder can be written"
        warnings.warn(
            f"Compiled loops cannot be kept on disk ({why}), so that every run compiles them anew: set NUMBA_CACHE_DIR "
            "to a folder with room.",
            CompiledCodeWarning,
            stacklevel=2,
        )


_told: list[bool] = []


@functools.cache
def _content(*files: Path) -> str:
    """A hash of these files, or of CALLED."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in files or [package / name for name in CALLED]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
