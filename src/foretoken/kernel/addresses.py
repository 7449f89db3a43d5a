"""Arrays by their addresses: what is shared by compiled functions that know each other by name alone."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from foretoken.kernel.compile import fused


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer to anything."""
    return types.voidptr(types.intp), lambda context, b, s, args: b.inttoptr(args[0], ir.IntType(8).as_pointer())


@intrinsic
def alive(typing: Any, array: Any) -> Any:
    """A use of an array of which only the address was taken: until here numba does not free it."""
    return types.void(array), lambda context, b, s, args: context.get_dummy_value()


@fused
def floats(address, shape):
    """The float32 array of this shape at an address."""
    return carray(pointer(address), shape, np.float32)


@fused
def whole(address, shape):
    """The int64 array of this shape at an address."""
    return carray(pointer(address), shape, np.int64)


@fused
def octets(address, shape):
    """The uint8 array of this shape at an address."""
    return carray(pointer(address), shape, np.uint8)
