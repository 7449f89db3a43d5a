"""Loops over a row 16 floats at a time around the products of a layer: gates, rotary embedding. Imports numba."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from foretoken.core.vectors import LANES, exp, lanes_at, load


@intrinsic
def gate_row(
    typing: Any, y: Any, y_at: Any, bias: Any, bias_at: Any, apart: Any, count: Any, out: Any, out_at: Any
) -> Any:
    """out[j] = silu(a) b for j < count, a = y[j] + bias[j], b = y[apart + j] + bias[apart + j]; 16 divides count."""
    index = types.intp

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        y, y_at, bias, bias_at, apart, count, out, out_at = args
        vector, size = ir.VectorType(ir.FloatType(), LANES), y_at.type
        one, most = ir.Constant(vector, [1.0] * LANES), ir.Constant(vector, [88.0] * LANES)
        with cgutils.for_range(b, b.sdiv(count, size(LANES))) as loop:
            j = b.mul(loop.index, size(LANES))

            def with_bias(at: Any) -> Any:
                value = load(b, lanes_at(context, b, s.args[0], y, b.add(y_at, at)))
                return b.fadd(value, load(b, lanes_at(context, b, s.args[2], bias, b.add(bias_at, at))))

            gate, up = with_bias(j), with_bias(b.add(j, apart))
            away = b.fneg(gate)
            sigmoid = b.fdiv(one, b.fadd(one, exp(b, b.select(b.fcmp_ordered(">", away, most), most, away))))
            place = lanes_at(context, b, s.args[6], out, b.add(out_at, j))
            b.store(b.fmul(b.fmul(gate, sigmoid), up), place).align = 4
        return context.get_dummy_value()

    return types.void(y, index, bias, index, index, index, out, index), generate


@intrinsic
def turn_row(typing: Any, x: Any, x_at: Any, cos: Any, sin: Any, angle_at: Any, half: Any) -> Any:
    """Rotary embedding of x[x_at : x_at + 2 half] in place, its cosines and sines from angle_at on; 16 divides half."""
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
