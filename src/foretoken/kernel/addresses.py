"""Arrays by their addresses, for compiled functions that are called by name and so take whole numbers only.

`linked` of compile.py makes such functions. An address is the number of a byte in memory.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from foretoken.kernel.compile import fused


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """Return an address as a pointer to anything.

    typing: numba's typing context, unused.
    address: a whole number.
    """
    return types.voidptr(types.intp), lambda context, b, s, args: b.inttoptr(args[0], ir.IntType(8).as_pointer())


@intrinsic
def alive(typing: Any, array: Any) -> Any:
    """Keep an array, of which only the address was taken, in memory up to this call: numba frees it after its last use.

    typing: numba's typing context, unused.
    array: the array, or a tuple of arrays.
    """
    return types.void(array), lambda context, b, s, args: context.get_dummy_value()


@fused
def floats(address, shape):
    """Return the float32 array at an address, as a view; shape: a tuple of sizes."""
    return carray(pointer(address), shape, np.float32)


@fused
def whole(address, shape):
    """Return the int64 array at an address, as a view; shape: a tuple of sizes."""
    return carray(pointer(address), shape, np.int64)


@fused
def octets(address, shape):
    """Return the uint8 array at an address, as a view; shape: a tuple of sizes."""
    return carray(pointer(address), shape, np.uint8)
