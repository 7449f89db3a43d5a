"""Machine code for few rows times a large matrix on a CPU, and the small loops around it.

A matrix [out, in] is kept as panels [out / 64, in, 64]: what one pass needs lies in one stretch of memory. A tile is R
rows times 16 U columns whose sums stay in vector registers while the panel streams by, so a weight is read once for up
to six rows. Weights may be stored as the upper half of their float32 (bfloat16): they are widened in a register, which
halves the memory traffic and changes nothing where the lower half is zero.

Every sum runs over k in order, whatever the number of rows: a row's result does not depend on the rows beside it.
Imports numba, so it is itself imported where it is first needed.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from foretoken.core.vectors import LANES, exp, lanes_at, load

PANEL = 64  # columns of a panel
WORK = 400_000  # multiplications from which a second thread is worth its start
SUMS = {"reassoc", "contract", "nsz"}  # sums of squares and the like may be reordered; NaN and infinity stay exact


def machine_code(loop: Callable[..., Any], sums: bool = False, parallel: bool = False) -> Callable[..., Any]:
    """`loop` compiled on its first call and cached on disk. The tests' type checkers around it are taken off."""
    return njit(cache=True, nogil=True, parallel=parallel, fastmath=SUMS if sums else {"contract"})(unwrap(loop))


def _tile(rows: int, units: int, halved: bool) -> Callable[..., Any]:
    """y[r, 16 units] = sum over k of x[r, k] w[k, 16 units], for `rows` rows; w lies at an address, 64 a row."""

    def tile(typing: Any, x: Any, x_at: Any, x_row: Any, x_step: Any, w: Any, w_row: Any, k: Any, y: Any, y_at: Any, y_row: Any) -> Any:  # fmt: skip  # noqa: E501
        index = types.intp
        signature = types.void(x, index, index, index, index, index, index, y, index, index)

        def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
            x, x_at, x_row, x_step, w, w_row, length, y, y_at, y_row = args
            vector = ir.VectorType(ir.FloatType(), LANES)
            whole, half = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.IntType(16), LANES)
            size = x_at.type
            x_base = b.gep(context.make_array(s.args[0])(context, b, x).data, [x_at])
            y_base = b.gep(context.make_array(s.args[7])(context, b, y).data, [y_at])
            w_base = b.inttoptr(w, ir.IntType(16 if halved else 32).as_pointer())
            x_rows = [b.gep(x_base, [b.mul(x_row, size(r))]) for r in range(rows)]
            zero, undefined = ir.Constant(vector, [0.0] * LANES), ir.Constant(vector, ir.Undefined)
            sums = [[cgutils.alloca_once_value(b, zero) for _ in range(units)] for _ in range(rows)]
            with cgutils.for_range(b, length) as loop:
                weights = []
                line = b.gep(w_base, [b.mul(loop.index, w_row)])
                for u in range(units):
                    part = b.gep(line, [size(u * LANES)])
                    if halved:
                        bits = b.load(b.bitcast(part, half.as_pointer()))
                        bits.align = 2
                        bits = b.shl(b.zext(bits, whole), ir.Constant(whole, [16] * LANES))
                        weights.append(b.bitcast(bits, vector))
                    else:
                        value = b.load(b.bitcast(part, vector.as_pointer()))
                        value.align = 4
                        weights.append(value)
                step = b.mul(loop.index, x_step)
                for r in range(rows):
                    one = b.insert_element(undefined, b.load(b.gep(x_rows[r], [step])), ir.IntType(32)(0))
                    spread = b.shuffle_vector(one, undefined, ir.Constant(whole, [0] * LANES))
                    for u in range(units):
                        product = b.fmul(spread, weights[u], flags=("contract",))
                        b.store(b.fadd(b.load(sums[r][u]), product, flags=("contract",)), sums[r][u])
            for r in range(rows):
                out = b.gep(y_base, [b.mul(y_row, size(r))])
                for u in range(units):
                    place = b.bitcast(b.gep(out, [size(u * LANES)]), vector.as_pointer())
                    b.store(b.load(sums[r][u]), place).align = 4
            return context.get_dummy_value()

        return signature, generate

    return intrinsic(tile)


# Enough sums in flight to hide the latency of one, few enough to stay in 16 registers: (rows, units).
full1, full2, full3 = _tile(1, 4, False), _tile(2, 2, False), _tile(3, 2, False)
full4, full5, full6 = _tile(4, 1, False), _tile(5, 1, False), _tile(6, 1, False)
half1, half2, half3 = _tile(1, 4, True), _tile(2, 2, True), _tile(3, 2, True)
half4, half5, half6 = _tile(4, 1, True), _tile(5, 1, True), _tile(6, 1, True)
narrow1, narrow2, narrow3 = _tile(1, 1, False), _tile(2, 1, False), _tile(3, 1, False)


def _strip(x, x_at, x_row, x_step, rows, w, w_row, k, halved, y, y_at, y_row):  # type: ignore[no-untyped-def]
    """`rows` rows times one panel of 64 columns."""
    done, blocks = 0, (rows + 5) // 6
    for block in range(blocks):
        left = rows - done
        r = (left + blocks - block - 1) // (blocks - block)  # blocks of nearly equal height
        xs, ys = x_at + done * x_row, y_at + done * y_row
        width = 2 if halved else 4
        if r == 1:
            if halved:
                half1(x, xs, x_row, x_step, w, w_row, k, y, ys, y_row)
            else:
                full1(x, xs, x_row, x_step, w, w_row, k, y, ys, y_row)
        elif r <= 3:
            for part in range(2):
                at, to = w + 2 * part * LANES * width, ys + 2 * part * LANES
                if r == 2:
                    if halved:
                        half2(x, xs, x_row, x_step, at, w_row, k, y, to, y_row)
                    else:
                        full2(x, xs, x_row, x_step, at, w_row, k, y, to, y_row)
                elif halved:
                    half3(x, xs, x_row, x_step, at, w_row, k, y, to, y_row)
                else:
                    full3(x, xs, x_row, x_step, at, w_row, k, y, to, y_row)
        else:
            for part in range(4):
                at, to = w + part * LANES * width, ys + part * LANES
                if r == 4:
                    if halved:
                        half4(x, xs, x_row, x_step, at, w_row, k, y, to, y_row)
                    else:
                        full4(x, xs, x_row, x_step, at, w_row, k, y, to, y_row)
                elif r == 5:
                    if halved:
                        half5(x, xs, x_row, x_step, at, w_row, k, y, to, y_row)
                    else:
                        full5(x, xs, x_row, x_step, at, w_row, k, y, to, y_row)
                elif halved:
                    half6(x, xs, x_row, x_step, at, w_row, k, y, to, y_row)
                else:
                    full6(x, xs, x_row, x_step, at, w_row, k, y, to, y_row)
        done += r


strip = machine_code(_strip)


def _narrow_strip(x, x_at, x_row, x_step, rows, w, w_row, k, y, y_at, y_row):  # type: ignore[no-untyped-def]
    """`rows` rows times 16 columns of float32."""
    done, blocks = 0, (rows + 5) // 6
    for block in range(blocks):
        left = rows - done
        r = (left + blocks - block - 1) // (blocks - block)
        xs, ys = x_at + done * x_row, y_at + done * y_row
        if r == 1:
            narrow1(x, xs, x_row, x_step, w, w_row, k, y, ys, y_row)
        elif r == 2:
            narrow2(x, xs, x_row, x_step, w, w_row, k, y, ys, y_row)
        elif r == 3:
            narrow3(x, xs, x_row, x_step, w, w_row, k, y, ys, y_row)
        elif r == 4:
            full4(x, xs, x_row, x_step, w, w_row, k, y, ys, y_row)
        elif r == 5:
            full5(x, xs, x_row, x_step, w, w_row, k, y, ys, y_row)
        else:
            full6(x, xs, x_row, x_step, w, w_row, k, y, ys, y_row)
        done += r


narrow_strip = machine_code(_narrow_strip)


def _panel(panel, x, x_row, k, m, w, halved, y, y_at, y_row, width):  # type: ignore[no-untyped-def]
    at = w + panel * k * PANEL * (2 if halved else 4)
    left = width - panel * PANEL
    if left >= PANEL:
        strip(x, 0, x_row, 1, m, at, PANEL, k, halved, y, y_at + panel * PANEL, y_row)
        return
    part = np.empty(m * PANEL, np.float32)
    strip(x, 0, x_row, 1, m, at, PANEL, k, halved, part, 0, PANEL)
    flat = y.reshape(-1)
    for i in range(m):
        for j in range(left):
            flat[y_at + panel * PANEL + i * y_row + j] = part[i * PANEL + j]


panel_product = machine_code(_panel)


def _product(x, x_row, k, m, w, halved, y, y_at, y_row, width):  # type: ignore[no-untyped-def]
    """y[y_at + i y_row + j] for i < m, j < width: the rows x[i x_row : i x_row + k] times the panels at address w."""
    for panel in range((width + PANEL - 1) // PANEL):
        panel_product(panel, x, x_row, k, m, w, halved, y, y_at, y_row, width)


def _product_threads(x, x_row, k, m, w, halved, y, y_at, y_row, width):  # type: ignore[no-untyped-def]
    for panel in prange((width + PANEL - 1) // PANEL):
        panel_product(panel, x, x_row, k, m, w, halved, y, y_at, y_row, width)


product = machine_code(_product)
product_threads = machine_code(_product_threads, parallel=True)


def _times(x, x_row, k, m, w, halved, y, y_at, y_row, width, threads):  # type: ignore[no-untyped-def]
    """`product`, by all threads where that saves more than it costs to start them."""
    if threads and m * k * width > WORK:
        product_threads(x, x_row, k, m, w, halved, y, y_at, y_row, width)
    else:
        product(x, x_row, k, m, w, halved, y, y_at, y_row, width)


times = machine_code(_times)


@intrinsic
def gate_row(typing: Any, y: Any, y_at: Any, bias: Any, bias_at: Any, width: Any, out: Any, out_at: Any) -> Any:
    """out[j] = silu(a) b for j < width, a = y[j] + bias[j], b = y[width + j] + bias[width + j]; 16 divides width."""
    index = types.intp

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        y, y_at, bias, bias_at, width, out, out_at = args
        vector, size = ir.VectorType(ir.FloatType(), LANES), y_at.type
        one, most = ir.Constant(vector, [1.0] * LANES), ir.Constant(vector, [88.0] * LANES)
        with cgutils.for_range(b, b.sdiv(width, size(LANES))) as loop:
            j = b.mul(loop.index, size(LANES))

            def with_bias(at: Any) -> Any:
                value = load(b, lanes_at(context, b, s.args[0], y, b.add(y_at, at)))
                return b.fadd(value, load(b, lanes_at(context, b, s.args[2], bias, b.add(bias_at, at))))

            gate, up = with_bias(j), with_bias(b.add(j, width))
            away = b.fneg(gate)
            sigmoid = b.fdiv(one, b.fadd(one, exp(b, b.select(b.fcmp_ordered(">", away, most), most, away))))
            place = lanes_at(context, b, s.args[5], out, b.add(out_at, j))
            b.store(b.fmul(b.fmul(gate, sigmoid), up), place).align = 4
        return context.get_dummy_value()

    return types.void(y, index, bias, index, index, out, index), generate
