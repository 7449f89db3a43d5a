"""Functions for compiled loops that are written in LLVM's instructions, and by these arrays by their addresses.

Compiled functions that are called by name, which `linked` of compile.py makes, take whole numbers only: addresses, each
the number of a byte in memory. numba's own `carray` and `view` make arrays of them too, and take a twentieth of a
second to compile for every type and number of dimensions.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import functools
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numba.np.numpy_support import from_dtype


def written(*kinds: Any, out: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function, which writes LLVM's instructions, one that compiled loops call.

    It takes the builder of the instructions, and then what the loops give it: numbers as LLVM values, and arrays as
    structures of their data, shape and strides. It returns an LLVM value, or nothing.

    kinds: numba's types of what loops give; None for an array, whose type may be any.
    out: numba's type of what it returns.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        @functools.wraps(write)
        def typed(typing: Any, *given: Any) -> Any:
            def code(context: Any, b: Any, signature: Any, values: Any) -> Any:
                pairs = zip(signature.args, values, strict=True)
                made = write(b, *[make_array(k)(context, b, x) if isinstance(k, types.Array) else x for k, x in pairs])
                return context.get_dummy_value() if made is None else made

            return out(*[kind or array for kind, array in zip(kinds, given, strict=True)]), code

        # numba would take a function of *arguments to be called with one tuple.
        names = ["typing", *(f"given_{i}" for i in range(len(kinds)))]
        typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in names])
        return intrinsic(typed)

    return decorate


@intrinsic
def alive(typing: Any, array: Any) -> Any:
    """Keep an array, of which only the address was taken, in memory up to this call: numba frees it after its last use.

    typing: numba's typing context, unused.
    array: the array, or a tuple of arrays.
    """
    return types.void(array), lambda context, b, s, args: context.get_dummy_value()


@written(*[types.intp] * 5)
def call_at(b: Any, code: Any, *values: Any) -> None:
    """Call a linked loop (compile.py) by its address, and not by its name, so that it need not be there.

    b: the builder of the LLVM instructions.
    code: the address of its machine code.
    values: its four arguments, whole numbers.
    """
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    b.call(b.inttoptr(code, kind.as_pointer()), values)


def arrays_of(dtype: Any) -> Any:
    """Return a function for compiled loops: of an address and a tuple of sizes it makes the array there, as a view.

    dtype: numpy's type of the array.
    """
    element = from_dtype(np.dtype(dtype))
    itemsize = np.dtype(dtype).itemsize

    def array_at(typing: Any, address: Any, shape: Any) -> Any:
        shape = types.unliteral(shape)
        kind = types.Array(element, shape.count, "C")

        def code(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            array, sizes = make_array(kind)(context, b), cgutils.unpack_tuple(b, arguments[1])
            strides = [ir.IntType(64)(itemsize)]
            for size in reversed(sizes[1:]):
                strides.insert(0, b.mul(strides[0], size))
            data = b.inttoptr(arguments[0], array.data.type)
            populate_array(array, data, sizes, strides, itemsize, meminfo=None)
            return array._getvalue()

        return kind(types.intp, shape), code

    return intrinsic(array_at)


floats, whole, octets = arrays_of(np.float32), arrays_of(np.int64), arrays_of(np.uint8)


@intrinsic
def bits_of(typing: Any, array: Any) -> Any:
    """Return the bits of a float32 array, as a view of whole numbers, uint32 of the same shape.

    typing: numba's typing context, unused.
    array: of any shape and layout.
    """
    kind = array.copy(dtype=types.uint32)

    def code(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        given, made = make_array(array)(context, b, arguments[0]), make_array(kind)(context, b)
        for name in given._datamodel._fields:
            value = getattr(given, name)
            setattr(made, name, b.bitcast(value, made.data.type) if name == "data" else value)
        return impl_ret_borrowed(context, b, kind, made._getvalue())

    return kind(array), code
