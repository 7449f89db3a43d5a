"""Loops over rows in CPU memory, compiled when first called and cached on disk."""

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Files whose loops, or constants, are compiled into the loops of other files.
CALLED = (
    "core/vectors.py", "core/softmax_loop.py", "core/truncated_loop.py", "core/draws_fast.py", "core/draw_loops.py",
    "models/panels.py",
    "models/tile.py", "models/row_loops.py", "models/product.py", "models/attention.py", "models/kernel_steps.py",
    "models/kernel.py", "models/kernel_chain.py", "core/budgeted.py", "trees/budget_fast.py",
    "verify/rejection_fast.py",
)  # fmt: skip


@functools.cache
def compiled(loop: Callable[..., Any], reorder_sums: bool = False) -> Callable[..., Any]:
    """`loop` as machine code. reorder_sums: float sums may be reordered, which lets them use vector registers."""
    from numba import njit  # here, not above: it takes half a second to import

    fastmath = {"reassoc", "nsz"} if reorder_sums else False
    # `unwrap` takes off the checkers that the tests put around every function: numba compiles the bare loop.
    # error_model: x / 0 is inf or nan, as in arrays; the check for it would keep loops with divisions out of vectors.
    return stamped(njit(cache=True, nogil=True, fastmath=fastmath, error_model="numpy")(inspect.unwrap(loop)))


def stamped(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled anew when a file of CALLED changed too: numba's cache looks at the function's own file only,
    and would go on with the old code of what it calls."""
    own = Path(inspect.getfile(inspect.unwrap(function)))
    function._cache._cache_file._source_stamp = _content(own), _content()  # pyright: ignore[reportFunctionMemberAccess]
    return function


@functools.cache
def _content(*files: Path) -> str:
    """A hash of these files, or of CALLED."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in files or [package / name for name in CALLED]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
