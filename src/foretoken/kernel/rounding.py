"""Rows rounded to bfloat16, as a product with a matrix in the form DOTTED takes them."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from foretoken.kernel.addresses import bits_of, written
from foretoken.kernel.compile import fused
from foretoken.kernel.processor import DOTS
from foretoken.kernel.simd import load
from foretoken.kernel.sizes import DOTTED, HALVED, LANES

# ROUNDED: the form of the product that takes what `rounded` makes. PER_WORD: the float32 numbers of a word of its rows.
# Where the processor lacks the instruction of DOTTED, rows are rounded, widened again and multiplied as with HALVED.
ROUNDED, PER_WORD = (DOTTED, 1) if DOTS else (HALVED, 2)


class BFloat(ir.Type):
    """The type of bfloat16 numbers, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


@written(None, None)
def round_row(b: Any, x: Any, out: Any) -> None:
    """Round the first n // 32 * 32 numbers of x to bfloat16.

    b: the builder of the LLVM instructions.
    x: float32 [n].
    out: float32 [n // 32 * 16 or more]. The 32 bits of each of its numbers become two bfloat16, that with the even
        index in the lower half.
    """
    many, pairs = ir.VectorType(ir.FloatType(), 2 * LANES), ir.VectorType(BFloat(), 2 * LANES)
    base, base_out = b.bitcast(x.data, many.as_pointer()), b.bitcast(out.data, pairs.as_pointer())
    length = b.extract_value(x.shape, 0)
    with cgutils.for_range(b, b.udiv(length, length.type(2 * LANES))) as loop:
        value = b.fptrunc(load(b, b.gep(base, [loop.index])), pairs)
        b.store(value, b.gep(base_out, [loop.index])).align = 4


@fused
def nearest(bits):
    """Return the bits of a float32 rounded to bfloat16, followed by 16 zeros: to even from half-way, a NaN to a NaN.

    bits: the bits of the float32, as a whole number.
    """
    value = np.int64(bits)
    if (value & 0x7FFFFFFF) > 0x7F800000:
        return (value | 0x400000) & 0xFFFF0000
    return (value + 0x7FFF + ((value >> 16) & 1)) & 0xFFFF0000


@fused
def round_rows(x, k, out):
    """Round the first k numbers of every row of x to bfloat16.

    x: float32 [m, k or more].
    k: the number of columns that are read.
    out: float32 [m * words * PER_WORD or more], which is filled row after row, words = (k + 1) // 2 to a row. With DOTS
        a word is one float32 whose bits are two bfloat16, even and odd; without, it is two float32 that are bfloat16
        values. A zero stands behind the last number of an odd k.
    """
    m, words = x.shape[0], (k + 1) // 2
    numbers, words_out = bits_of(x), bits_of(out)
    if DOTS:
        for i in range(m):
            round_row(x[i, :k], out[i * words : (i + 1) * words])
            for j in range(k // (2 * LANES) * 2 * LANES, k):
                value = nearest(numbers[i, j])
                if j % 2:
                    words_out[i * words + j // 2] |= np.uint32(value)
                else:
                    words_out[i * words + j // 2] = np.uint32(value >> 16)
    else:
        for i in range(m):
            row, into = numbers[i], words_out[2 * i * words : 2 * (i + 1) * words]
            into[2 * words - 1] = 0  # behind the last of an odd number
            for j in range(k):
                into[j] = nearest(row[j])


@fused
def rounded(x, k):
    """Return the first k numbers of every row of x [m, k or more] as `round_rows` makes them [m, words * PER_WORD]."""
    words = (k + 1) // 2 * PER_WORD
    out = np.empty(x.shape[0] * words, np.float32)
    round_rows(x, k, out)
    return out.reshape(x.shape[0], words)
