"""The instructions of few rows times a strip of a matrix on a CPU.

A tile is R rows times 16 U columns whose sums stay in vector registers while the matrix streams by, so a weight is read
once for up to six rows. product.py takes a whole matrix in strips.

A word is a float32 weight (WHOLE), or two bfloat16 weights of one column, k even and odd. Those are widened in a
register (HALVED), which halves the memory traffic and changes nothing where the lower halves of the float32 weights are
zero. Or the rows too are rounded to bfloat16 (DOTTED), for models that compute in it: then one instruction adds both
products of a word to a float32 sum, where the processor has it.

Every sum runs over the words in order, whatever the number of rows: a row's result does not depend on those beside it.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from foretoken.kernel.compile import compiled, linked
from foretoken.kernel.simd import load
from foretoken.kernel.sizes import DOTTED, HALVED, LANES, WHOLE

_FEATURES = (
    cpu_target.target_context.codegen().magic_tuple()[2].split(",")
)  # what numba compiles for: its settings tell
DOTS = "+avx512bf16" in _FEATURES  # the instruction of DOTTED; elsewhere its rows are rounded and widened again
WIDE = "+avx512f" in _FEATURES  # 32 registers of 16 floats


# Enough sums in flight to hide the latency of one, few enough for the registers: the widest tile by rows, in units of
# 16 columns.
ROWS = 6
WIDEST = dict.fromkeys(range(1, ROWS + 1), 4) if WIDE else {1: 4, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}
TILES = [(rows, units) for units in (1, 2, 4) for rows in range(1, ROWS + 1) if units <= WIDEST[rows]]
NEAR, FAR = 1, 2  # the caches into which memory is fetched
CHUNK = 48  # words of a column in a chunk, at most: 12 KiB for all columns of a panel, a third of the first cache
FORMS = (WHOLE, HALVED, DOTTED) if DOTS else (WHOLE, HALVED)
ROUNDED, PER_WORD = (DOTTED, 1) if DOTS else (HALVED, 2)  # the product that takes what `rounded` makes; floats a word


@intrinsic
def tile(typing: Any, number: Any, form: Any, fetch: Any, x: Any, x_row: Any, w: Any, w_row: Any, words: Any, y: Any, y_row: Any, fresh: Any, ahead: Any, pace: Any) -> Any:  # fmt: skip  # noqa: E501
    """y[r, 16 units] = (0 if fresh else y) + sum over k of x[r, k] w[k, 16 units], for one of TILES: number = rows + 16
    units.

    x, w, y are addresses; w has one word of every column every w_row words. x: floats, two for each word if HALVED;
    bits of two bfloat16 if DOTTED. With `fetch`, what lies from `ahead` on is fetched meanwhile into the first cache
    (NEAR) or the second (FAR), `pace` bytes for every 16 words.
    """
    index, flag = types.intp, types.boolean
    signature = types.void(*[index] * 10, flag, index, index)

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        number, form, fetch, x, x_row, w, w_row, length, y, y_row, fresh, ahead, pace = args
        x_base, y_base = (b.inttoptr(at, ir.FloatType().as_pointer()) for at in (x, y))
        done, none = b.append_basic_block("done"), b.append_basic_block("none")
        size = x.type
        flags = b.add(b.shl(form, size(8)), b.shl(fetch, size(10)))
        chosen = b.switch(b.add(number, flags), none)
        for rows, units in TILES:
            for kind in FORMS:
                for fetches in (0, NEAR, FAR):
                    if not _used(rows, units, kind, fetches):
                        continue
                    block = b.append_basic_block(f"tile_{rows}_{units}")
                    chosen.add_case(size(rows + 16 * units + 256 * kind + 1024 * fetches), block)
                    b.position_at_end(block)
                    at = [b.gep(x_base, [b.mul(x_row, size(r))]) for r in range(rows)]
                    out = [[b.gep(y_base, [b.add(b.mul(y_row, size(r)), size(u * LANES))]) for u in range(units)]
                           for r in range(rows)]  # fmt: skip
                    _emit(b, kind, fetches, at, w, w_row, length, out, fresh, ahead, pace)
                    b.branch(done)
        b.position_at_end(none)
        b.unreachable()
        b.position_at_end(done)
        return context.get_dummy_value()

    return signature, generate


def _used(rows: int, units: int, form: int, fetch: int) -> bool:
    """Whether product.py and attention.py may ask for it."""
    if units < WIDEST[rows]:  # a head's dims, or the end of its slots; nothing is fetched behind them
        return not fetch and form in (WHOLE, ROUNDED)
    if form == WHOLE or not WIDE:
        return (rows > 1 and fetch == NEAR) or not fetch
    return rows > 2 or not fetch  # one and two rows wait for memory, and are no part of seven or more


def _emit(b: Any, form: int, fetches: int, x_rows: list[Any], w: Any, w_row: Any, length: Any, out: list[list[Any]], fresh: Any, ahead: Any, pace: Any) -> None:  # fmt: skip  # noqa: E501
    """The instructions of one tile."""
    vector, byte = ir.VectorType(ir.FloatType(), LANES), ir.IntType(8).as_pointer()
    whole = ir.VectorType(ir.IntType(32), LANES)
    size = length.type
    fetch = b.module.declare_intrinsic(
        "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, *[ir.IntType(32)] * 3])
    )
    zero, undefined = ir.Constant(vector, [0.0] * LANES), ir.Constant(vector, ir.Undefined)
    w_base = b.inttoptr(w, ir.IntType(32).as_pointer())
    places = [[b.bitcast(at, vector.as_pointer()) for at in of_row] for of_row in out]
    sums = []
    for of_row in places:
        sums.append([])
        for place in of_row:
            before = b.load(place)
            before.align = 4
            sums[-1].append(cgutils.alloca_once_value(b, b.select(fresh, zero, before)))

    def spread(at: Any, index: Any) -> Any:
        one = b.insert_element(undefined, b.load(b.gep(at, [index])), ir.IntType(32)(0))
        return b.shuffle_vector(one, undefined, ir.Constant(whole, [0] * LANES))

    def add(total: Any, x: Any, weight: Any) -> None:
        b.store(b.fadd(b.load(total), b.fmul(x, weight, flags=("contract",)), flags=("contract",)), total)

    with cgutils.for_range(b, length) as loop:
        if fetches:
            units = len(out[0])
            for u in range(units):
                passed = b.add(b.mul(loop.index, size(units)), size(u))
                at = b.inttoptr(b.add(ahead, b.mul(passed, pace)), byte)
                b.call(fetch, [at, *map(ir.IntType(32), (0, 3 if fetches == NEAR else 2, 1))])
        line = b.gep(w_base, [b.mul(loop.index, w_row)])
        words = []
        for u in range(len(out[0])):
            words.append(b.load(b.bitcast(b.gep(line, [size(u * LANES)]), whole.as_pointer())))
            words[-1].align = 4
        if form == WHOLE:
            parts = [[b.bitcast(word, vector) for word in words]]
        elif form == HALVED:
            upper = ir.Constant(whole, [0xFFFF0000] * LANES)
            parts = [
                [b.bitcast(b.shl(word, ir.Constant(whole, [16] * LANES)), vector) for word in words],
                [b.bitcast(b.and_(word, upper), vector) for word in words],
            ]
        else:
            parts = []
            pairs = ir.VectorType(_BFloat(), 2 * LANES)
            dot = b.module.declare_intrinsic(
                "llvm.x86.avx512bf16.dpbf16ps.512", (), ir.FunctionType(vector, [vector, pairs, pairs])
            )
            for at, of_row in zip(x_rows, sums, strict=True):
                x = b.bitcast(spread(at, loop.index), pairs)
                for word, total in zip(words, of_row, strict=True):
                    b.store(b.call(dot, [b.load(total), x, b.bitcast(word, pairs)]), total)
        for at, of_row in zip(x_rows, sums, strict=True):
            for i, weights in enumerate(parts):  # each sum in the order of k
                x = spread(at, b.add(b.mul(loop.index, size(len(parts))), size(i)))
                for weight, total in zip(weights, of_row, strict=True):
                    add(total, x, weight)
    for of_row, totals in zip(places, sums, strict=True):
        for place, total in zip(of_row, totals, strict=True):
            b.store(b.load(total), place).align = 4


class _BFloat(ir.Type):
    """llvmlite has no such type."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


@intrinsic
def round_row(typing: Any, x: Any, x_at: Any, out: Any, out_at: Any, count: Any) -> Any:
    """out: the bits of x[x_at : x_at + 32 count] as bfloat16, two a word."""
    index = types.intp

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        x, x_at, out, out_at, count = args
        x_base = b.gep(context.make_array(s.args[0])(context, b, x).data, [x_at])
        out_base = b.gep(context.make_array(s.args[2])(context, b, out).data, [out_at])
        many, size = ir.VectorType(ir.FloatType(), 2 * LANES), x_at.type
        pairs = ir.VectorType(_BFloat(), 2 * LANES)
        with cgutils.for_range(b, count) as loop:
            value = load(b, b.bitcast(b.gep(x_base, [b.mul(loop.index, size(2 * LANES))]), many.as_pointer()))
            place = b.bitcast(b.gep(out_base, [b.mul(loop.index, size(LANES))]), pairs.as_pointer())
            b.store(b.fptrunc(value, pairs), place).align = 4
        return context.get_dummy_value()

    return types.void(x, index, out, index, index), generate


def _nearest(bits):  # type: ignore[no-untyped-def]
    """The bits of a float32 rounded to bfloat16, to even from half-way; a NaN stays one."""
    value = np.int64(bits)
    if (value & 0x7FFFFFFF) > 0x7F800000:
        return (value | 0x400000) & 0xFFFF0000
    return (value + 0x7FFF + ((value >> 16) & 1)) & 0xFFFF0000


nearest = compiled(_nearest, fuse=True)


def _round_rows(x, x_row, k, m, out):  # type: ignore[no-untyped-def]
    """Rows of k floats as a DOTTED product takes them, [m, (k + 1) / 2 * PER_WORD] in one axis: two bfloat16 a float's
    bits, or without DOTS in floats."""
    words = (k + 1) // 2
    bits, words_out = x.view(np.uint32), out.view(np.uint32)
    if DOTS:
        many = k // (2 * LANES)
        for i in range(m):
            round_row(x, i * x_row, out, i * words, many)
            for j in range(many * 2 * LANES, k):
                value = nearest(bits[i * x_row + j])
                if j % 2:
                    words_out[i * words + j // 2] |= np.uint32(value)
                else:
                    words_out[i * words + j // 2] = np.uint32(value >> 16)
    else:
        for i in range(m):
            words_out[2 * (i + 1) * words - 1] = 0  # behind the last of an odd number
            for j in range(k):
                words_out[2 * i * words + j] = nearest(bits[i * x_row + j])


round_rows = compiled(_round_rows, fuse=True)


def _rounded(x, x_row, k, m):  # type: ignore[no-untyped-def]
    """What `round_rows` makes."""
    out = np.empty(m * ((k + 1) // 2) * PER_WORD, np.float32)
    round_rows(x, x_row, k, m, out)
    return out


rounded = compiled(_rounded, fuse=True)


def _strip(columns, x, x_row, rows, w, w_row, words, form, y, y_row, fresh, ahead):  # type: ignore[no-untyped-def]
    """`rows` rows times `columns` columns, a multiple of 16; see `tile`. ahead: what to fetch, 0: nothing."""
    height = 5 if ahead > 0 and WIDE and form == HALVED else ROWS  # six leave no register for the two halves of a word
    done, blocks = 0, (rows + height - 1) // height
    # The second cache takes a whole panel, the first is nearer: which is short depends on the arithmetic of a chunk.
    far = WIDE and form != WHOLE and (blocks <= 2 or words > CHUNK)
    fetch = 0 if ahead == 0 or rows == 1 else FAR if far else NEAR
    for block in range(blocks):
        r = (rows - done + blocks - block - 1) // (blocks - block)  # blocks of nearly equal height
        xs, ys, at = x + 4 * done * x_row, y + 4 * done * y_row, 0
        while at < columns:
            widest = 4 if WIDE or r == 1 else 2 if r == 2 else 1
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


strip = linked("foretoken_strip", _strip, 12)
