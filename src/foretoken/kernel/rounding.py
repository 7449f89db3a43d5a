"""Rows rounded to bfloat16, as a product with a matrix in DOTTED form takes them."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from foretoken.kernel.compile import fused
from foretoken.kernel.processor import DOTS
from foretoken.kernel.simd import load
from foretoken.kernel.sizes import DOTTED, HALVED, LANES

# Without the instruction of DOTTED its rows are rounded and widened again.
ROUNDED, PER_WORD = (DOTTED, 1) if DOTS else (HALVED, 2)  # the product that takes what `rounded` makes; floats a word


class BFloat(ir.Type):
    """llvmlite has no such type."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


@intrinsic
def round_row(typing: Any, x: Any, out: Any) -> Any:
    """Round x [n] up to its last whole 32 numbers: out [n / 2] gets their bits as bfloat16, two to a word."""

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        row, row_out = (context.make_array(kind)(context, b, array) for kind, array in zip(s.args, args, strict=True))
        many, pairs = ir.VectorType(ir.FloatType(), 2 * LANES), ir.VectorType(BFloat(), 2 * LANES)
        base, base_out = b.bitcast(row.data, many.as_pointer()), b.bitcast(row_out.data, pairs.as_pointer())
        length = b.extract_value(row.shape, 0)
        with cgutils.for_range(b, b.udiv(length, length.type(2 * LANES))) as loop:
            value = b.fptrunc(load(b, b.gep(base, [loop.index])), pairs)
            b.store(value, b.gep(base_out, [loop.index])).align = 4
        return context.get_dummy_value()

    return types.void(x, out), generate


@fused
def nearest(bits):
    """The bits of a float32, given by its bits, rounded to bfloat16: to even from half-way; a NaN stays one."""
    value = np.int64(bits)
    if (value & 0x7FFFFFFF) > 0x7F800000:
        return (value | 0x400000) & 0xFFFF0000
    return (value + 0x7FFF + ((value >> 16) & 1)) & 0xFFFF0000


@fused
def round_rows(x, k, out):
    """Round the first k numbers of every row of x [m, k or more].

    out: [m * words * PER_WORD at least], in one axis, of words = (k + 1) / 2 to a row: a word is two bfloat16, even and
        odd, in the bits of one float32; or, without DOTS, two float32 that are bfloat16 values.
    """
    m, words = x.shape[0], (k + 1) // 2
    bits, words_out = x.view(np.uint32), out.view(np.uint32)
    if DOTS:
        for i in range(m):
            round_row(x[i, :k], out[i * words : (i + 1) * words])
            for j in range(k // (2 * LANES) * 2 * LANES, k):
                value = nearest(bits[i, j])
                if j % 2:
                    words_out[i * words + j // 2] |= np.uint32(value)
                else:
                    words_out[i * words + j // 2] = np.uint32(value >> 16)
    else:
        for i in range(m):
            row, into = bits[i], words_out[2 * i * words : 2 * (i + 1) * words]
            into[2 * words - 1] = 0  # behind the last of an odd number
            for j in range(k):
                into[j] = nearest(row[j])


@fused
def rounded(x, k):
    """What `round_rows` makes of the first k numbers of every row of x [m, k or more]: [m, words * PER_WORD]."""
    words = (k + 1) // 2 * PER_WORD
    out = np.empty(x.shape[0] * words, np.float32)
    round_rows(x, k, out)
    return out.reshape(x.shape[0], words)
