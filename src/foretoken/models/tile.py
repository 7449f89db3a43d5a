"""Machine code for few rows times a large matrix on a CPU, and the small loops around it.

A matrix [out, in] is kept as panels [out / 64, in, 64]: what one pass needs lies in one stretch of memory. A tile is R
rows times 16 U columns whose sums stay in vector registers while the panel streams by, so a weight is read once for up
to six rows. Several rows take a panel in chunks that the first cache holds for all of them, and the next chunk is
fetched while this one is used: else the processor waits for memory and computes in turn. Weights may be stored as the
upper half of their float32 (bfloat16): they are widened in a register, which halves the memory traffic and changes
nothing where the lower half is zero.

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
CHUNK = 192  # bytes of a column in a chunk, at most: 12 KiB for all columns of a panel, a third of the first cache
WORK = 400_000  # multiplications from which a second thread is worth its start
SUMS = {"reassoc", "contract", "nsz"}  # sums of squares and the like may be reordered; NaN and infinity stay exact


def machine_code(loop: Callable[..., Any], sums: bool = False, parallel: bool = False) -> Callable[..., Any]:
    """`loop` compiled on its first call and cached on disk. The tests' type checkers around it are taken off."""
    return njit(cache=True, nogil=True, parallel=parallel, fastmath=SUMS if sums else {"contract"})(unwrap(loop))


# Enough sums in flight to hide the latency of one, few enough to stay in 16 registers: (rows, units of 16 columns).
# Numbered from 1, so that the number of a tile one unit wide is its rows.
TILES = ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (1, 4), (2, 2))


@intrinsic
def tile(typing: Any, number: Any, halved: Any, fetch: Any, x: Any, x_at: Any, x_row: Any, x_step: Any, w: Any, w_row: Any, k: Any, y: Any, y_at: Any, y_row: Any, fresh: Any, ahead: Any, pace: Any) -> Any:  # fmt: skip  # noqa: E501
    """y[r, 16 units] = (0 if fresh else y) + sum over k of x[r, k] w[k, 16 units], for the rows and units of a TILE.

    w lies at an address, one k every w_row values. With `fetch`, what lies from `ahead` on is fetched into the cache
    meanwhile, `pace` bytes for every k.
    """
    index, flag = types.intp, types.boolean
    signature = types.void(
        index, flag, flag, x, index, index, index, index, index, index, y, index, index, flag, index, index
    )

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        number, halved, fetch, x, x_at, x_row, x_step, w, w_row, length, y, y_at, y_row, fresh, ahead, pace = args
        x_base = b.gep(context.make_array(s.args[3])(context, b, x).data, [x_at])
        y_base = b.gep(context.make_array(s.args[10])(context, b, y).data, [y_at])
        done, none = b.append_basic_block("done"), b.append_basic_block("none")
        size = x_at.type
        flags = b.add(b.shl(b.zext(halved, size), size(4)), b.shl(b.zext(fetch, size), size(5)))
        chosen = b.switch(b.add(number, flags), none)
        for i, (rows, units) in enumerate(TILES, start=1):
            for half in (False, True):
                for fetches in (False, True):
                    if (half or fetches) and rows * units < 3:
                        continue  # halved weights come in panels; few rows need no fetching
                    block = b.append_basic_block(f"tile_{rows}_{units}")
                    chosen.add_case(size(i + 16 * half + 32 * fetches), block)
                    b.position_at_end(block)
                    at = [b.gep(x_base, [b.mul(x_row, size(r))]) for r in range(rows)]
                    out = [[b.gep(y_base, [b.add(b.mul(y_row, size(r)), size(u * LANES))]) for u in range(units)]
                           for r in range(rows)]  # fmt: skip
                    _emit(b, half, fetches, at, x_step, w, w_row, length, out, fresh, ahead, pace)
                    b.branch(done)
        b.position_at_end(none)
        b.unreachable()
        b.position_at_end(done)
        return context.get_dummy_value()

    return signature, generate


def _emit(b: Any, halved: bool, fetches: bool, x_rows: list[Any], x_step: Any, w: Any, w_row: Any, length: Any, out: list[list[Any]], fresh: Any, ahead: Any, pace: Any) -> None:  # fmt: skip  # noqa: E501
    """The instructions of one tile."""
    vector, byte = ir.VectorType(ir.FloatType(), LANES), ir.IntType(8).as_pointer()
    whole, half = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.IntType(16), LANES)
    size, width = length.type, 2 if halved else 4
    fetch = b.module.declare_intrinsic(
        "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, *[ir.IntType(32)] * 3])
    )
    zero, undefined = ir.Constant(vector, [0.0] * LANES), ir.Constant(vector, ir.Undefined)
    w_base = b.inttoptr(w, ir.IntType(8 * width).as_pointer())
    places = [[b.bitcast(at, vector.as_pointer()) for at in of_row] for of_row in out]
    sums = []
    for of_row in places:
        sums.append([])
        for place in of_row:
            before = b.load(place)
            before.align = 4
            sums[-1].append(cgutils.alloca_once_value(b, b.select(fresh, zero, before)))
    with cgutils.for_range(b, length) as loop:
        if fetches:
            at = b.add(ahead, b.mul(loop.index, pace))
            b.call(fetch, [b.inttoptr(at, byte), *map(ir.IntType(32), (0, 3, 1))])
        weights = []
        line = b.gep(w_base, [b.mul(loop.index, w_row)])
        for u in range(len(out[0])):
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
        for at, of_row in zip(x_rows, sums, strict=True):
            one = b.insert_element(undefined, b.load(b.gep(at, [step])), ir.IntType(32)(0))
            spread = b.shuffle_vector(one, undefined, ir.Constant(whole, [0] * LANES))
            for weight, total in zip(weights, of_row, strict=True):
                product = b.fmul(spread, weight, flags=("contract",))
                b.store(b.fadd(b.load(total), product, flags=("contract",)), total)
    for of_row, totals in zip(places, sums, strict=True):
        for place, total in zip(of_row, totals, strict=True):
            b.store(b.load(total), place).align = 4


def _strip(columns, x, x_at, x_row, x_step, rows, w, w_row, k, halved, y, y_at, y_row, fresh, ahead):  # type: ignore[no-untyped-def]
    """`rows` rows times `columns` columns, a multiple of 16; see `tile`. ahead: what to fetch, 0: nothing."""
    size, done, blocks = 2 if halved else 4, 0, (rows + 5) // 6
    fetch = ahead > 0
    for block in range(blocks):
        r = (rows - done + blocks - block - 1) // (blocks - block)  # blocks of nearly equal height
        xs, ys, at = x_at + done * x_row, y_at + done * y_row, 0
        while at < columns:
            number, width = r, LANES
            if r == 1 and columns - at >= 4 * LANES:
                number, width = 7, 4 * LANES
            elif r == 2 and columns - at >= 2 * LANES:
                number, width = 8, 2 * LANES
            # Of the chunk that follows, each pass over this one fetches its share.
            part, here, pace = block * columns + at, w + at * size, size * width // blocks
            there = ahead + k * size * part // blocks
            tile(number, halved, fetch, x, xs, x_row, x_step, here, w_row, k, y, ys + at, y_row, fresh, there, pace)
            at += width
        done += r


strip = machine_code(_strip)


def _panel(panel, x, x_row, k, m, w, halved, y, y_at, y_row, width):  # type: ignore[no-untyped-def]
    size = 2 if halved else 4
    at = w + panel * k * PANEL * size
    left = width - panel * PANEL
    out, out_at, out_row = y, y_at + panel * PANEL, y_row
    if left < PANEL:
        out, out_at, out_row = np.empty(m * PANEL, np.float32), 0, PANEL
    if m <= size // 2:  # memory is the bound, and the processor fetches ahead by itself
        strip(PANEL, x, 0, x_row, 1, m, at, PANEL, k, halved, out, out_at, out_row, True, 0)
    else:  # a chunk stays in the first cache for all rows while the next one is fetched
        pieces = (k * size + CHUNK - 1) // CHUNK
        chunk = (k + pieces - 1) // pieces
        for start in range(0, k, chunk):
            length = min(chunk, k - start)
            here = at + start * PANEL * size
            ahead = here + length * PANEL * size
            strip(PANEL, x, start, x_row, 1, m, here, PANEL, length, halved, out, out_at, out_row, start == 0, ahead)
    if left < PANEL:
        for i in range(m):
            for j in range(left):
                y[y_at + panel * PANEL + i * y_row + j] = out[i * PANEL + j]


panel_product = machine_code(_panel)


def _product(x, x_row, k, m, w, halved, y, y_at, y_row, width):  # type: ignore[no-untyped-def]
    """y[y_at + i y_row + j] for i < m, j < width: the rows x[i x_row : i x_row + k] times the panels at address w."""
    rows, flat = x.reshape(-1), y.reshape(-1)  # one type, so that what they call is compiled once
    for panel in range((width + PANEL - 1) // PANEL):
        panel_product(panel, rows, x_row, k, m, w, halved, flat, y_at, y_row, width)


def _product_threads(x, x_row, k, m, w, halved, y, y_at, y_row, width):  # type: ignore[no-untyped-def]
    rows, flat = x.reshape(-1), y.reshape(-1)
    for panel in prange((width + PANEL - 1) // PANEL):
        panel_product(panel, rows, x_row, k, m, w, halved, flat, y_at, y_row, width)


product = machine_code(_product)
product_threads = machine_code(_product_threads, parallel=True)


def _times(x, x_row, k, m, w, halved, y, y_at, y_row, width, threads):  # type: ignore[no-untyped-def]
    """`product`, by all threads where that saves more than it costs to start them. threads: None for one thread, which
    is a type of its own, so that nothing is compiled for more."""
    if threads is None:
        product(x, x_row, k, m, w, halved, y, y_at, y_row, width)
    elif m * k * width > WORK:
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
