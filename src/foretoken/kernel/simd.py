"""Loops over 16 floats at a time that numba cannot make of a Python loop: exp, softmax, gates, rotary embedding.

A sum that runs in 16 lanes is another order than one that runs along the row, and far faster.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from foretoken.kernel.sizes import LANES

NEAR, FAR = 1, 2  # the first cache and the second
# Bytes by which what goes by once is fetched ahead into the second cache. 2 KiB ahead into the first cache was slower
# than nothing, and a panel of a large matrix ahead was slower than 4 or 8 KiB: the entries of 2026-11-25 on quantised
# weights and of 2026-11-26 on an Intel processor in docs/LOG.md.
AHEAD = 4096


def lanes_at(context: Any, b: Any, kind: Any, array: Any, at: Any) -> Any:
    """A pointer to 16 floats of an array of the type `kind`: element `at`, counted in one axis, and those after it."""
    vector = ir.VectorType(ir.FloatType(), LANES)
    return b.bitcast(b.gep(context.make_array(kind)(context, b, array).data, [at]), vector.as_pointer())


def load(b: Any, place: Any) -> Any:
    """The vector at a pointer that need not be aligned."""
    value = b.load(place)
    value.align = 4
    return value


def spread(b: Any, number: Any, lanes: int = LANES) -> Any:
    """A vector of so many times the same number."""
    empty = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = b.insert_element(empty, number, ir.IntType(32)(0))
    return b.shuffle_vector(first, empty, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def call(b: Any, name: str, out: Any, *values: Any, flags: Sequence[str] = ()) -> Any:
    """A call of one of LLVM's own functions, by its whole name; out: the type of what it returns."""
    kind = ir.FunctionType(out, [value.type for value in values])
    return b.call(b.module.declare_intrinsic(name, (), kind), values, fastmath=flags)


def one_of(b: Any, number: Any, cases: Mapping[int, Callable[[], None]]) -> None:
    """The code of many cases, of which the one with this number runs; there are no other numbers."""
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
    """Let memory at an address be fetched into a cache, NEAR or FAR, while the code goes on."""
    byte, whole = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole])
    # For reading, data, and LLVM's number of the cache: 3 for the first, 2 for the second.
    arguments = [b.inttoptr(at, byte), whole(0), whole(4 - cache), whole(1)]
    b.call(b.module.declare_intrinsic("llvm.prefetch", [byte], kind), arguments)


def exp(b: Any, x: Any) -> Any:
    """exp of 16 floats <= 88, 0 below -87, NaN of NaN, to two units in the last place.

    x = n log 2 + r with |r| <= log 2 / 2; a polynomial in r, and 2 ** n by its bits.
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
    """Put exp(factor (x - max x)) of 16 chunks numbers in their places.

    place, place_out: pointers to 16 of x, and of what is written, by the chunk. factor: 16 times the same, None for 1.

    Returns the sums of every sixteenth, a vector of the type `kind`; NaN where x has NaN, +inf or nothing finite.
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


@intrinsic
def softmax_row(typing: Any, x: Any, x_at: Any, scale: Any, out: Any, out_at: Any, chunks: Any) -> Any:
    """out[out_at + j] = softmax of scale x[x_at + j] for j < 16 chunks.

    x, out: float32 arrays whose elements are counted in one axis; out may be x.

    Returns the sum of exp(scale (x - max x)) in float64. It is NaN, and so is every entry, where x has NaN, +inf or
    nothing finite.
    """

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        size = args[1].type
        x, x_at, scale, out, out_at, chunks = args

        def place(index: Any) -> Any:
            return lanes_at(context, b, s.args[0], x, b.add(x_at, b.mul(index, size(LANES))))

        def place_out(index: Any) -> Any:
            return lanes_at(context, b, s.args[3], out, b.add(out_at, b.mul(index, size(LANES))))

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

    index = types.intp
    return types.float64(x, index, types.float32, out, index, index), generate


@intrinsic
def exp_row(typing: Any, x: Any, x_at: Any, chunks: Any) -> Any:
    """x[x_at + j] becomes exp(x - max x) for j < 16 chunks: a softmax, but for the division by their sum.

    x: float32 array whose elements are counted in one axis.

    Returns the sum in float32, NaN where x has NaN, +inf or nothing finite.
    """

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        single, size = ir.FloatType(), args[1].type
        x, x_at, chunks = args

        def place(index: Any) -> Any:
            return lanes_at(context, b, s.args[0], x, b.add(x_at, b.mul(index, size(LANES))))

        sums = _exponentials(b, chunks, place, place, None, ir.VectorType(single, LANES))
        return call(b, f"llvm.vector.reduce.fadd.v{LANES}f32", single, single(0.0), sums, flags=("reassoc",))

    return types.float32(x, types.intp, types.intp), generate


@intrinsic
def gate_row(
    typing: Any, y: Any, y_at: Any, bias: Any, bias_at: Any, apart: Any, count: Any, curve: Any, out: Any, out_at: Any
) -> Any:
    """out[out_at + j] = act(a) b for j < count: a = y[y_at + j] + bias[bias_at + j], and b the same `apart` later;
    act(a) = a sigmoid(a (c + d a^2)), by which sizes.SILU and sizes.GELU are c and d.

    y, bias, out: float32 arrays whose elements are counted in one axis.
    count: a multiple of 16.
    curve: c, d.
    """
    index, number = types.intp, types.float32

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        y, y_at, bias, bias_at, apart, count, curve, out, out_at = args
        vector, size = ir.VectorType(ir.FloatType(), LANES), y_at.type
        one, most = ir.Constant(vector, [1.0] * LANES), ir.Constant(vector, [88.0] * LANES)
        linear, cubic = [spread(b, b.extract_value(curve, i)) for i in range(2)]
        with cgutils.for_range(b, b.sdiv(count, size(LANES))) as loop:
            j = b.mul(loop.index, size(LANES))

            def with_bias(at: Any) -> Any:
                value = load(b, lanes_at(context, b, s.args[0], y, b.add(y_at, at)))
                return b.fadd(value, load(b, lanes_at(context, b, s.args[2], bias, b.add(bias_at, at))))

            gate, up = with_bias(j), with_bias(b.add(j, apart))
            away = b.fneg(b.fmul(gate, b.fadd(linear, b.fmul(cubic, b.fmul(gate, gate)))))
            sigmoid = b.fdiv(one, b.fadd(one, exp(b, b.select(b.fcmp_ordered(">", away, most), most, away))))
            place = lanes_at(context, b, s.args[7], out, b.add(out_at, j))
            b.store(b.fmul(b.fmul(gate, sigmoid), up), place).align = 4
        return context.get_dummy_value()

    return types.void(y, index, bias, index, index, index, types.UniTuple(number, 2), out, index), generate


@intrinsic
def turn_row(typing: Any, x: Any, x_at: Any, cos: Any, sin: Any, angle_at: Any, half: Any) -> Any:
    """Rotary embedding of x[x_at : x_at + 2 half], in place.

    x, cos, sin: float32 arrays whose elements are counted in one axis; cosines and sines stand from angle_at on.
    half: a multiple of 16.
    """
    index = types.intp

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        x, x_at, cos, sin, angle_at, half = args
        size, fused = x_at.type, ("contract",)
        with cgutils.for_range(b, b.sdiv(half, size(LANES))) as loop:
            j = b.mul(loop.index, size(LANES))
            places = [lanes_at(context, b, s.args[0], x, b.add(x_at, at)) for at in (j, b.add(half, j))]
            angles = [b.add(angle_at, at) for at in (j, b.add(half, j))]
            cosines = [load(b, lanes_at(context, b, s.args[2], cos, at)) for at in angles]
            sines = [load(b, lanes_at(context, b, s.args[3], sin, at)) for at in angles]
            one, two = (load(b, place) for place in places)
            turned = (
                b.fsub(b.fmul(one, cosines[0], flags=fused), b.fmul(two, sines[0], flags=fused), flags=fused),
                b.fadd(b.fmul(two, cosines[1], flags=fused), b.fmul(one, sines[1], flags=fused), flags=fused),
            )
            for value, place in zip(turned, places, strict=True):
                b.store(value, place).align = 4
        return context.get_dummy_value()

    return types.void(x, index, cos, sin, index, index), generate
