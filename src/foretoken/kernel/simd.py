"""Loops over 16 floats at a time that numba cannot make of a Python loop: exp, softmax, gates, rotary embedding.

A sum over 16 lanes adds in another order than a sum along the row, and is far faster. The functions that take `b` write
LLVM instructions: their other arguments, unless described otherwise, are LLVM values, and so is what they return.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from foretoken.kernel.addresses import written
from foretoken.kernel.sizes import LANES

NEAR, FAR = 1, 2  # the processor's first cache and its second
# Weights that are read once per forward are fetched into the second cache so many bytes before they are used. 2 KiB
# ahead into the first cache was slower than nothing, and a panel of a large matrix ahead was slower than 4 or 8 KiB:
# the entries of 2026-11-25 on quantised weights and of 2026-11-26 on an Intel processor in docs/LOG.md.
AHEAD = 4096


def lanes_of(b: Any, row: Any) -> tuple[Callable[[Any], Any], Any]:
    """Return a function from i to a pointer to floats 16 i .. 16 i + 15 of a row, and the number of such chunks.

    b: the builder of the LLVM instructions.
    row: the structure of a float32 array [n]; 16 divides n.
    """
    base = b.bitcast(row.data, ir.VectorType(ir.FloatType(), LANES).as_pointer())
    length = b.extract_value(row.shape, 0)
    return lambda i: b.gep(base, [i]), b.udiv(length, length.type(LANES))


def load(b: Any, place: Any) -> Any:
    """Return the vector of 32-bit numbers at a pointer, which need not be aligned to the vector's size.

    b: the builder of the LLVM instructions.
    place: the pointer, whose address 4 divides.
    """
    value = b.load(place)
    value.align = 4
    return value


def spread(b: Any, number: Any, lanes: int = LANES) -> Any:
    """Return a vector that holds the same number in every lane.

    b: the builder of the LLVM instructions.
    number: the number.
    lanes: how many lanes the vector has.
    """
    empty = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = b.insert_element(empty, number, ir.IntType(32)(0))
    return b.shuffle_vector(first, empty, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def call(b: Any, name: str, out: Any, *values: Any, flags: Sequence[str] = ()) -> Any:
    """Write a call of one of LLVM's own functions, and return its result.

    b: the builder of the LLVM instructions.
    name: the function's full name, such as llvm.vector.reduce.fmax.v16f32.
    out: LLVM's type of what the function returns.
    values: its arguments.
    flags: LLVM's flags of what may be done to the arithmetic, such as "reassoc".
    """
    kind = ir.FunctionType(out, [value.type for value in values])
    return b.call(b.module.declare_intrinsic(name, (), kind), values, fastmath=flags)


def one_of(b: Any, number: Any, cases: Mapping[int, Callable[[], None]]) -> None:
    """Write the code of several cases, of which the one with a given number runs.

    b: the builder of the LLVM instructions.
    number: a whole number that must be among the cases; else what the code does is undefined.
    cases: by number, a function that writes the code of the case.
    """
    done, none = b.append_basic_block("done"), b.append_basic_block("none")
    chosen = b.switch(number, none)
    for case, emit in cases.items():
        block = b.append_basic_block(f"case_{case}")
        chosen.add_case(number.type(case), block)
        b.position_at_end(block)
        emit()
        b.branch(done)
    b.position_at_end(none)
    b.unreachable()
    b.position_at_end(done)


def fetch(b: Any, at: Any, cache: int) -> None:
    """Write an instruction that fetches a cache line of memory while the code goes on.

    b: the builder of the LLVM instructions.
    at: an address in the line; one that does not exist does no harm.
    cache: NEAR, the first cache, or FAR, the second.
    """
    byte, whole = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole])
    # For reading, data, and LLVM's number of the cache: 3 for the first, 2 for the second.
    arguments = [b.inttoptr(at, byte), whole(0), whole(4 - cache), whole(1)]
    b.call(b.module.declare_intrinsic("llvm.prefetch", [byte], kind), arguments)


def exp(b: Any, x: Any) -> Any:
    """Return exp of 16 floats, to two units in the last place: 0 for a float below -87, NaN for a NaN.

    With x = n log 2 + r, |r| <= log 2 / 2, it is a polynomial in r times 2 ** n, which is made by its bits.

    b: the builder of the LLVM instructions.
    x: the vector of 16 floats, each at most 88.
    """
    vector, whole, fused = x.type, ir.VectorType(ir.IntType(32), LANES), ("contract",)

    def of(c: float) -> Any:
        return ir.Constant(vector, [float(np.float32(c))] * LANES)

    low = b.fcmp_ordered("<", x, of(-87.0))
    x = b.select(low, of(0.0), x)
    magic = of(12582912.0)  # adding 1.5 * 2 ** 23 leaves no room for a fraction
    n = b.fsub(b.fadd(b.fmul(x, of(1.4426950408889634)), magic), magic)
    r = b.fsub(x, b.fmul(n, of(0.693359375), flags=fused), flags=fused)
    r = b.fsub(r, b.fmul(n, of(-2.12194440e-4), flags=fused), flags=fused)
    y = of(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        y = b.fadd(b.fmul(y, r, flags=fused), of(c), flags=fused)
    y = b.fadd(b.fadd(b.fmul(b.fmul(y, r), r, flags=fused), r, flags=fused), of(1.0))
    bits = b.shl(b.add(b.fptosi(n, whole), ir.Constant(whole, [127] * LANES)), ir.Constant(whole, [23] * LANES))
    y = b.select(low, of(0.0), b.fmul(y, b.bitcast(bits, vector)))
    return b.select(b.fcmp_unordered("uno", x, x), x, y)  # a NaN has no bits to take 2 ** n from


def _exponentials(b: Any, chunks: Any, place: Any, place_out: Any, factor: Any, kind: Any) -> Any:
    """Write exp(factor (x - max x)) for every number of a row x of `chunks` vectors of 16.

    b: the builder of the LLVM instructions.
    chunks: the number of vectors.
    place, place_out: functions from i to a pointer to vector i of x, and of what is written.
    factor: a vector of 16 times the same number, None for 1.
    kind: LLVM's type of 16 sums, of float32 or float64 numbers.

    Returns a vector of this type: sum i is over numbers i, i + 16, ... One at least is NaN where x has NaN, +inf or
    nothing finite.
    """
    single = ir.FloatType()
    best = cgutils.alloca_once_value(b, load(b, place(chunks.type(0))))
    with cgutils.for_range(b, chunks) as loop:
        value, most = load(b, place(loop.index)), b.load(best)
        b.store(b.select(b.fcmp_ordered(">", value, most), value, most), best)
    most = spread(b, call(b, f"llvm.vector.reduce.fmax.v{LANES}f32", single, b.load(best)))
    total = cgutils.alloca_once_value(b, ir.Constant(kind, [0.0] * LANES))
    with cgutils.for_range(b, chunks) as loop:
        less = b.fsub(load(b, place(loop.index)), most)
        value = exp(b, less if factor is None else b.fmul(less, factor))
        b.store(b.fadd(b.load(total), value if kind.element == single else b.fpext(value, kind)), total)
        b.store(value, place_out(loop.index)).align = 4
    return b.load(total)


@written(None, types.float32, None, out=types.float64)
def softmax_row(b: Any, x: Any, scale: Any, out: Any) -> Any:
    """Fill out with the softmax of scale x, and return the sum of exp(scale (x - max x)) in float64.

    The sum is NaN, and so is every entry, where x has NaN, +inf or nothing finite.

    b: the builder of the LLVM instructions.
    x, out: float32 [n]; 16 divides n > 0. out may be x.
    scale: a float32 number.
    """
    (place, chunks), (place_out, _) = lanes_of(b, x), lanes_of(b, out)
    wide = ir.VectorType(ir.DoubleType(), LANES)  # a float32 sum of a large vocabulary would be off by 1e-5
    sums = _exponentials(b, chunks, place, place_out, spread(b, scale), wide)
    parts = [b.extract_element(sums, ir.IntType(32)(lane)) for lane in range(LANES)]
    while len(parts) > 1:
        parts = [b.fadd(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
    (summed,) = parts
    share = spread(b, b.fptrunc(b.fdiv(ir.Constant(ir.DoubleType(), 1.0), summed), ir.FloatType()))
    with cgutils.for_range(b, chunks) as loop:
        b.store(b.fmul(load(b, place_out(loop.index)), share), place_out(loop.index)).align = 4
    return summed


@written(None, out=types.float32)
def exp_row(b: Any, x: Any) -> Any:
    """Replace x by exp(x - max x), which is the softmax but for the division by the sum; return the sum in float32.

    The sum is NaN where x has NaN, +inf or nothing finite.

    b: the builder of the LLVM instructions.
    x: float32 [n]; 16 divides n > 0.
    """
    single = ir.FloatType()
    place, chunks = lanes_of(b, x)
    sums = _exponentials(b, chunks, place, place, None, ir.VectorType(single, LANES))
    return call(b, f"llvm.vector.reduce.fadd.v{LANES}f32", single, single(0.0), sums, flags=("reassoc",))


@written(None, None, None, None, types.UniTuple(types.float32, 2), None)
def gate_row(b: Any, gate: Any, up: Any, gate_bias: Any, up_bias: Any, curve: Any, out: Any) -> None:
    """Fill out with act(gate + gate_bias) (up + up_bias), where act(a) = a sigmoid(a (c + d a^2)).

    b: the builder of the LLVM instructions.
    gate, up, gate_bias, up_bias, out: float32 [n]; 16 divides n.
    curve: the pair (c, d), which is sizes.SILU or sizes.GELU, in float32.
    """
    rows = [lanes_of(b, row)[0] for row in (gate, up, gate_bias, up_bias)]
    place, chunks = lanes_of(b, out)
    vector = ir.VectorType(ir.FloatType(), LANES)
    one, most = ir.Constant(vector, [1.0] * LANES), ir.Constant(vector, [88.0] * LANES)
    linear, cubic = [spread(b, b.extract_value(curve, i)) for i in range(2)]
    with cgutils.for_range(b, chunks) as loop:
        gates, ups, gate_biases, up_biases = [load(b, row(loop.index)) for row in rows]
        gates, ups = b.fadd(gates, gate_biases), b.fadd(ups, up_biases)
        away = b.fneg(b.fmul(gates, b.fadd(linear, b.fmul(cubic, b.fmul(gates, gates)))))
        sigmoid = b.fdiv(one, b.fadd(one, exp(b, b.select(b.fcmp_ordered(">", away, most), most, away))))
        b.store(b.fmul(b.fmul(gates, sigmoid), ups), place(loop.index)).align = 4


@written(None, None, None)
def turn_row(b: Any, x: Any, cos: Any, sin: Any) -> None:
    """Apply the rotary embedding to one head of one node, in place.

    b: the builder of the LLVM instructions.
    x: the head's numbers, float32 [n]; 32 divides n.
    cos, sin: the cosines and sines of the node's position, float32 [n].
    """
    (place, chunks), (cosine, _), (sine, _) = (lanes_of(b, row) for row in (x, cos, sin))
    half, fused = b.udiv(chunks, chunks.type(2)), ("contract",)
    with cgutils.for_range(b, half) as loop:
        both = loop.index, b.add(half, loop.index)
        cosines, sines = [load(b, cosine(i)) for i in both], [load(b, sine(i)) for i in both]
        one, two = (load(b, place(i)) for i in both)
        turned = (
            b.fsub(b.fmul(one, cosines[0], flags=fused), b.fmul(two, sines[0], flags=fused), flags=fused),
            b.fadd(b.fmul(two, cosines[1], flags=fused), b.fmul(one, sines[1], flags=fused), flags=fused),
        )
        for value, i in zip(turned, both, strict=True):
            b.store(value, place(i)).align = 4
