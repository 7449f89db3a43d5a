"""Up to 32 rows times columns of a matrix in bfloat16 by the matrix unit of Intel's processors (AMX).

The unit has eight registers of 16 lines of 64 bytes. One instruction multiplies 16 words of up to 16 rows with 16 words
of 16 columns, a word being two bfloat16 numbers, k even and odd, and adds the products to 16 x 16 sums in float32:
1,024 products in the time in which a vector register makes 32. So up to 16 rows take hardly longer than one, since the
weights have to come from memory for one too. Rows and panels lie as tile.py has them in DOTTED form.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from foretoken.kernel.addresses import written
from foretoken.kernel.simd import NEAR, call, one_of
from foretoken.kernel.simd import fetch as fetch_line

GROUP = 16  # words of every row that one instruction takes; a sum adds groups in order
LINE = 64  # bytes of a line
# Weights that are read once are fetched so many bytes before they are used: the entry of 2026-11-27 on the matrix unit
# in docs/LOG.md.
GROUPS_AHEAD = 8192
HIGH = 16  # lines of a register, which are rows of x, words of w, or rows of y
# Blocks of 16 rows and units of 16 columns that are computed together, with four registers of sums at most.
SHAPES = ((1, 4), (1, 2), (1, 1), (2, 2), (2, 1))
INDEX, FLAG = types.intp, types.boolean
SUMS = 4  # the first registers hold sums; then come those of rows, then those of weights


@written(INDEX, FLAG, *[INDEX] * 8, FLAG, INDEX, INDEX)
def matrix_tile(
    b: Any,
    units: Any,
    fetch: Any,
    x: Any,
    x_row: Any,
    rows: Any,
    w: Any,
    w_row: Any,
    groups: Any,
    y: Any,
    y_row: Any,
    fresh: Any,
    ahead: Any,
    pace: Any,
) -> None:
    """Compute y[r, c] = (0 if fresh else y[r, c]) + sum over k of x[r, k] w[k, c], r < rows <= 32, c < 16 units.

    b: the builder of the LLVM instructions.
    units: 4, 2 or 1; at most 2 for more than 16 rows.
    fetch: whether memory is fetched into the first cache meanwhile.
    rows: number of rows, 1 to 32.
    groups: number of groups of 16 words in a column.
    x, x_row, w, w_row, y, y_row, fresh, ahead, pace: as in tile.py's `tile`, of weights that are DOTTED.
    """
    byte, size = ir.IntType(8), ir.IntType(64)
    pointer = byte.as_pointer()

    def unit(name: str, *values: Any) -> None:
        call(b, f"llvm.x86.{name}", ir.VoidType(), *values)

    def place(address: Any) -> Any:
        return b.inttoptr(address, pointer)

    x_line, w_line, y_line = (b.mul(row, size(4)) for row in (x_row, w_row, y_row))
    shapes = cgutils.alloca_once(b, ir.ArrayType(byte, LINE))
    blocks = b.select(b.icmp_signed(">", rows, size(HIGH)), size(2), size(1))

    def emit(high: int, wide: int, fetches: bool) -> None:
        """Write the code for `high` blocks of 16 rows and `wide` units of 16 columns."""
        sums = [(block, u, block * wide + u) for block in range(high) for u in range(wide)]
        x_at = [b.add(x, b.mul(x_line, size(HIGH * block))) for block in range(high)]
        y_at = [b.add(b.add(y, b.mul(y_line, size(HIGH * block))), size(LINE * u)) for block, u, _ in sums]
        lines = [byte(HIGH)] * 8
        last = b.trunc(b.sub(rows, size(HIGH * (high - 1))), byte)
        for block, _, register in (*sums, *[(block, 0, SUMS + block) for block in range(high)]):
            lines[register] = last if block == high - 1 else byte(HIGH)
        b.store(ir.Constant(ir.ArrayType(byte, LINE), [1] + [0] * (LINE - 1)), shapes)
        for register, value in enumerate(lines):
            b.store(byte(LINE), b.gep(shapes, [size(0), size(16 + 2 * register)]))
            b.store(value, b.gep(shapes, [size(0), size(48 + register)]))
        unit("ldtilecfg", b.bitcast(shapes, pointer))
        with b.if_else(fresh) as (first, later):
            with first:
                for _, _, register in sums:
                    unit("tilezero", byte(register))
            with later:
                for at, (_, _, register) in zip(y_at, sums, strict=True):
                    unit("tileloadd64", byte(register), place(at), y_line)
        with cgutils.for_range(b, groups) as loop:
            for block in range(high):
                at = b.add(x_at[block], b.mul(loop.index, size(LINE)))
                unit("tileloadd64", byte(SUMS + block), place(at), x_line)
            here = b.add(w, b.mul(b.mul(loop.index, size(GROUP)), w_line))
            for u in range(wide):
                for i in range(GROUP if fetches else 0):
                    passed = b.add(b.mul(loop.index, size(GROUP * wide)), size(u * GROUP + i))
                    fetch_line(b, b.add(ahead, b.mul(passed, pace)), NEAR)
                weights = SUMS + high + u % (SUMS - high)
                unit("tileloadd64", byte(weights), place(b.add(here, size(LINE * u))), w_line)
                for block in range(high):
                    unit("tdpbf16ps", byte(block * wide + u), byte(SUMS + block), byte(weights))
        for at, (_, _, register) in zip(y_at, sums, strict=True):
            unit("tilestored64", byte(register), place(at), y_line)

    number = b.or_(b.shl(b.or_(b.shl(blocks, size(3)), units), size(1)), b.zext(fetch, size))
    cases = {
        2 * (8 * high + wide) + fetches: partial(emit, high, wide, fetches)
        for high, wide in SHAPES
        for fetches in (False, True)
    }
    one_of(b, number, cases)
    unit("tilerelease")
