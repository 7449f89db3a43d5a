"""Loops over rows in CPU memory, compiled when first called and cached on disk."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.cache
def compiled(loop: Callable[..., Any], reorder_sums: bool = False) -> Callable[..., Any]:
    """`loop` as machine code. reorder_sums: float sums may be reordered, which lets them use vector registers."""
    from numba import njit  # here, not above: it takes half a second to import

    fastmath = {"reassoc", "nsz"} if reorder_sums else False
    # `unwrap` takes off the checkers that the tests put around every function: numba compiles the bare loop.
    # error_model: x / 0 is inf or nan, as in arrays; the check for it would keep loops with divisions out of vectors.
    return njit(cache=True, nogil=True, fastmath=fastmath, error_model="numpy")(inspect.unwrap(loop))
