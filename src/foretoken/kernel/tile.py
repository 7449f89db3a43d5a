"""The instructions by which a CPU multiplies few rows with a strip of a matrix.

A strip is some columns of a panel. A tile is R rows times 16 U columns whose sums stay in vector registers while the
strip's weights are read from memory, so a weight is read once for up to six rows, or for ten with half as many columns.
product.py goes through a whole matrix.

A word is a float32 weight (WHOLE), or two bfloat16 weights of one column, k even and odd. The two are widened in a
register (HALVED): the weights take half the space, and nothing changes where the lower halves of the float32 weights
are zero. Or the rows too are rounded to bfloat16 (DOTTED), for models that compute in it: then one instruction adds
both products of a word to a float32 sum, where the processor has it, or the matrix unit adds those of 16 words
(matrix_unit.py).

Every sum runs over the words in order, or over groups of 16 in order, whatever the number of rows: a row's result does
not depend on those beside it.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from foretoken.kernel.addresses import written
from foretoken.kernel.compile import fused, linked
from foretoken.kernel.matrix_unit import GROUP, GROUPS_AHEAD, HIGH, matrix_tile
from foretoken.kernel.processor import DOTS, MATRIX, WIDE
from foretoken.kernel.rounding import ROUNDED, BFloat
from foretoken.kernel.simd import AHEAD, FAR, NEAR, call, load, one_of, spread
from foretoken.kernel.simd import fetch as fetch_line
from foretoken.kernel.sizes import DOTTED, HALVED, LANES, WHOLE

# WIDEST: the units of 16 columns of the widest tile, by its number of rows. It has enough sums to hide the time that an
# addition takes, and few enough for the registers. Up to TALL rows in one pass of half the width take less time than in
# two passes, 11 and 12 rows do not: the entry of 2026-11-25 on rows in docs/LOG.md.
ROWS, TALL = 6, 10
HALVED_ROWS = ROWS - 1  # while memory is fetched, six rows leave no register for the two halves of a word
WIDEST = dict.fromkeys(range(1, ROWS + 1), 4) if WIDE else {1: 4, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}
if WIDE:
    WIDEST |= dict.fromkeys(range(ROWS + 1, TALL + 1), 2)
TILES = [(rows, units) for units in (1, 2, 4) for rows in WIDEST if units <= WIDEST[rows]]
CHUNK = 48  # most words of a column in a chunk: 12 KiB for all columns of a panel, a third of the first cache
# The same for the matrix unit, which for each chunk reads the sums from memory: 256 KiB, in the second cache. For 64
# and 160 rows, 48 and 2,048 words took up to 1.3 and 1.6 times as long: the entry of 2026-11-27 on the matrix unit in
# docs/LOG.md.
LONG_CHUNK = 1024
FORMS = (WHOLE, HALVED, DOTTED) if DOTS else (WHOLE, HALVED)


@written(*[types.intp] * 10, types.boolean, types.intp, types.intp)
def tile(
    b: Any,
    number: Any,
    form: Any,
    fetch: Any,
    x: Any,
    x_row: Any,
    w: Any,
    w_row: Any,
    words: Any,
    y: Any,
    y_row: Any,
    fresh: Any,
    ahead: Any,
    pace: Any,
) -> None:
    """Compute one of TILES: y[r, c] = (0 if fresh else y[r, c]) + sum over k of x[r, k] w[k, c].

    It has `rows` rows and 16 `units` columns.

    b: the builder of the LLVM instructions.
    number: rows + 16 units.
    form: form of w: WHOLE, HALVED or DOTTED.
    fetch: where memory is fetched to meanwhile: 0 nowhere, NEAR the first cache, FAR the second.
    x: address of the first row. A row is float32 numbers, two to a word of w if w is HALVED; if it is DOTTED, a word of
        two bfloat16 stands in place of each float32 number.
    x_row: float32 numbers from one row of x to the next.
    w: address of the first word.
    w_row: words from one k, or pair of k, to the next.
    words: number of words in a column.
    y: address of the first sum, float32.
    y_row: float32 numbers from one row of y to the next.
    fresh: whether sums begin with 0.
    ahead: address of what is fetched.
    pace: bytes of it that are fetched for every 16 words of a line of w, which are those of one k or pair of k.
    """
    size, contract = x.type, ("contract",)
    vector, whole = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
    zero, half = ir.Constant(vector, [0.0] * LANES), ir.Constant(whole, [16] * LANES)
    upper = ir.Constant(whole, [0xFFFF0000] * LANES)
    pairs, dot = ir.VectorType(BFloat(), 2 * LANES), "llvm.x86.avx512bf16.dpbf16ps.512"
    x_base, y_base = (b.inttoptr(at, ir.FloatType().as_pointer()) for at in (x, y))
    w_base = b.inttoptr(w, ir.IntType(32).as_pointer())

    def emit(rows: int, units: int, kind: int, fetches: int) -> None:
        """Write the instructions of one tile."""
        at = [b.gep(x_base, [b.mul(x_row, size(r))]) for r in range(rows)]

        def place_of(row: int, unit: int) -> Any:
            return b.bitcast(b.gep(y_base, [b.add(b.mul(y_row, size(row)), size(unit * LANES))]), vector.as_pointer())

        def fresh_or_stored(place: Any) -> Any:
            return cgutils.alloca_once_value(b, b.select(fresh, zero, load(b, place)))

        def number_of(row: Any, index: Any) -> Any:
            return spread(b, b.load(b.gep(row, [index])))

        places = [[place_of(row, unit) for unit in range(units)] for row in range(rows)]
        sums = [[fresh_or_stored(place) for place in of_row] for of_row in places]
        with cgutils.for_range(b, words) as loop:
            for u in range(units if fetches else 0):
                passed = b.add(b.mul(loop.index, size(units)), size(u))
                fetch_line(b, b.add(ahead, b.mul(passed, pace)), fetches)
            line = b.gep(w_base, [b.mul(loop.index, w_row)])
            loaded = [load(b, b.bitcast(b.gep(line, [size(u * LANES)]), whole.as_pointer())) for u in range(units)]
            parts = [[b.bitcast(word, vector) for word in loaded]]
            if kind == HALVED:
                parts = [[b.bitcast(b.shl(word, half), vector) for word in loaded],
                         [b.bitcast(b.and_(word, upper), vector) for word in loaded]]  # fmt: skip
            for row, of_row in zip(at, sums, strict=True):
                if kind == DOTTED:
                    both = b.bitcast(number_of(row, loop.index), pairs)
                    for word, total in zip(loaded, of_row, strict=True):
                        b.store(call(b, dot, vector, b.load(total), both, b.bitcast(word, pairs)), total)
                    continue
                for i, weights in enumerate(parts):  # each sum in the order of k
                    one = number_of(row, b.add(b.mul(loop.index, size(len(parts))), size(i)))
                    for weight, total in zip(weights, of_row, strict=True):
                        b.store(b.fadd(b.load(total), b.fmul(one, weight, flags=contract), flags=contract), total)
        for of_row, totals in zip(places, sums, strict=True):
            for place, total in zip(of_row, totals, strict=True):
                b.store(b.load(total), place).align = 4

    cases = {
        rows + 16 * units + 256 * kind + 1024 * fetches: partial(emit, rows, units, kind, fetches)
        for rows, units in TILES
        for kind in FORMS
        for fetches in (0, NEAR, FAR)
        if _used(rows, units, kind, fetches)
    }
    one_of(b, b.add(number, b.add(b.shl(form, size(8)), b.shl(fetch, size(10)))), cases)


def _used(rows: int, units: int, form: int, fetch: int) -> bool:
    """Whether product.py and attention.py may ask for this tile: others are not compiled."""
    if rows > ROWS:
        return units == WIDEST[rows] and form == ROUNDED and fetch != NEAR
    if units < WIDEST[rows]:  # a head's dims, or the end of its slots; nothing is fetched behind them
        return not fetch and form in (WHOLE, ROUNDED)
    if not fetch:
        return True
    if form == HALVED and WIDE and rows > HALVED_ROWS:
        return False
    if fetch == NEAR:
        return rows > 2 or (rows == 2 and form != WHOLE and not WIDE)  # fewer rows do not go by in chunks
    return form == WHOLE or WIDE or rows == 1


@fused
def streaming(form):
    """Return how product.py goes through panels of one form, as three whole numbers.

    They are the largest number of rows that `strip` takes in one pass over a panel, or over each half of its columns;
    how many bytes ahead of itself it then fetches; and, for more rows, the largest number of words of a column in a
    chunk.

    form: WHOLE, HALVED or DOTTED.
    """
    if MATRIX and form == DOTTED:
        return 2 * HIGH, GROUPS_AHEAD, LONG_CHUNK
    if not WIDE:
        return 2 if form == WHOLE else 1, AHEAD, CHUNK
    return HALVED_ROWS if form == HALVED else ROWS, AHEAD, CHUNK


@fused
def _by_matrix_unit(columns, x, x_row, rows, w, w_row, groups, y, y_row, fresh, ahead):
    """Do what `strip` does, by the matrix unit.

    groups: number of groups of 16 words that are computed, from the first word on; the other arguments are those of
        `strip`.
    """
    blocks = (rows + 2 * HIGH - 1) // (2 * HIGH)
    for block in range(blocks):
        done = block * 2 * HIGH
        r, xs, ys, at = min(2 * HIGH, rows - done), x + 4 * done * x_row, y + 4 * done * y_row, 0
        while at < columns:
            left = (columns - at) // LANES
            units = 4 if left >= 4 and r <= HIGH else 2 if left >= 2 else 1
            # Of the memory ahead, each pass fetches its share.
            there = ahead + groups * GROUP * 4 * (block * columns + at) // blocks
            matrix_tile(
                units, ahead != 0, xs, x_row, r, w + at * 4, w_row, groups, ys + 4 * at, y_row, fresh > 0,
                there, 4 * LANES // blocks,
            )  # fmt: skip
            at += units * LANES


@linked("foretoken_strip", 12)
def strip(columns, x, x_row, rows, w, w_row, words, form, y, y_row, fresh, ahead):
    """Multiply rows with columns side by side, tile by tile: y = (0 if fresh else y) + x w.

    All arguments are whole numbers.

    columns: number of columns; 16 divides it.
    x, x_row, w, w_row, words, form, y, y_row: as in `tile`.
    rows: number of rows.
    fresh: 1 or 0.
    ahead: address of memory of the strip's size that is used soon and fetched meanwhile; 0: nothing is fetched.
    """
    if MATRIX and form == DOTTED and words >= GROUP:
        groups = words // GROUP
        _by_matrix_unit(columns, x, x_row, rows, w, w_row, groups, y, y_row, fresh, ahead)
        if words == groups * GROUP:
            return
        taken = groups * GROUP
        x, w, words, fresh, ahead = x + 4 * taken, w + 4 * taken * w_row, words - taken, 0, 0
    tall = WIDE and form == ROUNDED and ROWS < rows <= TALL and columns % (2 * LANES) == 0
    height = TALL if tall else HALVED_ROWS if ahead > 0 and WIDE and form == HALVED else ROWS
    done, blocks = 0, (rows + height - 1) // height
    # The second cache takes a whole panel, the first is nearer: which is short depends on the arithmetic of a chunk.
    far = rows == 1 or (WIDE and (blocks <= 2 or words > CHUNK))
    if form == WHOLE:
        far = rows <= 2 or words > CHUNK
    fetch = 0 if ahead == 0 else FAR if far else NEAR
    for block in range(blocks):
        r = (rows - done + blocks - block - 1) // (blocks - block)  # blocks of nearly equal height
        xs, ys, at = x + 4 * done * x_row, y + 4 * done * y_row, 0
        while at < columns:
            widest = 2 if r > ROWS else 4 if WIDE or r == 1 else 2 if r == 2 else 1
            units = widest
            while units > 1 and units * LANES > columns - at:
                units //= 2
            # Of the chunk that follows, each pass over this one fetches its share.
            part, here, pace = block * columns + at, w + at * 4, 4 * LANES // blocks
            there = ahead + words * 4 * part // blocks
            does = fetch if units == widest else 0
            number, into = r + 16 * units, ys + 4 * at
            tile(number, form, does, xs, x_row, here, w_row, words, into, y_row, fresh > 0, there, pace)
            at += units * LANES
        done += r
