"""Products of few rows with quantised weights in whole numbers, fast enough to wait only for memory.

A weight of 4 bits comes from memory eight times as fast as a float32 one, and float arithmetic cannot keep up. So rows
are quantised too: each block of 32 numbers of a row by itself, to whole numbers in -127 .. 127 times a float32 scale.
With the codes of a column's block of weights (quantised.py) they make one exact sum of 32 products, which is scaled and
added in float32:

    y[row, column] = sum over blocks, in order:  sum(x codes * w codes) * x scale * w scale  (+ minimum * x sum)

So a row's result does not depend on the rows beside it, nor on which instructions compute the exact sums.

**A line** is a block of a row in 64 bytes: 32 codes; the scale; scale * sum of codes; and whole multiples of sums of
codes, with which exact sums begin where the weights' codes have an offset. The lines of all rows for one block stand
side by side, as they are used: the codes of 4 inputs k of n columns fill a vector register, are unpacked once, and meet
all rows. The 16 registers of AVX2 take the codes of half a block for two registers of columns: each of a row's codes is
then read half as often as with a whole block of one register.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from foretoken.kernel.addresses import alive, floats, octets, written
from foretoken.kernel.compile import linked
from foretoken.kernel.processor import FEATURES
from foretoken.kernel.quantised import BY_FORM, KINDS, Kind, panel_bytes, read_row
from foretoken.kernel.simd import AHEAD, FAR, call, fetch, load, one_of, spread
from foretoken.kernel.sizes import COLUMNS, LANES, QUANTISED

LINE = 64  # bytes of a line
# Places in a line, of 4 bytes each, behind the codes: the scale; scale * sum of codes; -32 times the sum of the first
# 16 codes, and of the last 16; -8, -16 and -128 times the sum of all.
SCALE, SUM, FIRST, SECOND, BY_8, BY_16, BY_128 = range(8, 15)
AT_ONCE = 64  # most rows that are multiplied with a panel together: their sums and lines stay in the first cache
# Up to so many rows are multiplied with one strip at a time, since they wait for memory; more rows with two. With two,
# up to four rows took up to 10% longer, and more rows 6 to 28% less (the entry of 2026-11-26 on two strips in
# docs/LOG.md).
WAITING = 4

VNNI, VNNI_256, PAIRS, NEON, PLAIN = "vnni", "vnni256", "pairs", "neon", "plain"
INSTRUCTIONS = {  # ways to make exact sums: what the processor must have (processor.py), and columns per register
    VNNI: ("+avx512vnni", 16),
    VNNI_256: ("+avxvnni", 8),
    PAIRS: ("+avx2", 8),
    NEON: ("+dotprod", 4),
    PLAIN: ("", 4),
}
# Of PAIRS: products with codes of so many bits fill 16 bits once so many pairs are added, since 127 * 2 * 15 * 8,
# 127 * 2 * 31 * 4, .. are below 2 ** 15.
PAIRS_HELD = {4: 8, 5: 4, 6: 2, 8: 1}
BEST = next(name for name, (feature, _) in INSTRUCTIONS.items() if not feature or feature in FEATURES)
HALF = "+f16c" in FEATURES or "+dotprod" in FEATURES  # an instruction that widens float16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


class Dots:
    """The LLVM instructions of one way to make exact sums, for n columns at a time.

    Addresses are LLVM values, whole numbers of 64 bits.

    b: the builder of the LLVM instructions.
    name: the way, a name among INSTRUCTIONS.
    half: whether the processor has an instruction that widens float16 numbers.
    """

    def __init__(self, b: Any, name: str, half: bool) -> None:
        self.b, self.name, self.n, self.half = b, name, INSTRUCTIONS[name][1], half
        self.words, self.floats = ir.VectorType(I32, self.n), ir.VectorType(F32, self.n)
        self.octets, self.pairs = ir.VectorType(I8, 4 * self.n), ir.VectorType(I16, 2 * self.n)
        self.halves = cgutils.alloca_once(b, self.words, 2 * AT_ONCE) if name == PAIRS else None

    def all(self, value: int) -> Any:
        """Return a vector with the same whole number in every column; value: the number."""
        return ir.Constant(self.words, [value] * self.n)

    def load(self, at: Any, kind: Any, bytes: int) -> Any:
        """Return what is stored, in LLVM's type `kind`, at the address `at`, which the number `bytes` divides."""
        value = self.b.load(self.b.inttoptr(at, kind.as_pointer()))
        value.align = bytes
        return value

    def spread(self, at: Any, kind: Any) -> Any:
        """Return a vector with the 32 bits at the address `at`, of LLVM's type `kind`, in every column."""
        return spread(self.b, self.load(at, kind, 4), self.n)

    def plus(self, at: Any, bytes: int) -> Any:
        """Return the address that is `bytes` bytes behind the address `at`."""
        return self.b.add(at, I64(bytes)) if bytes else at

    def widened(self, at: Any) -> Any:
        """Return the n float16 numbers that begin at the address `at` as float32."""
        if self.half:
            return self.b.fpext(self.load(at, ir.VectorType(F16, self.n), 2), self.floats)
        b, word = self.b, self.b.zext(self.load(at, ir.VectorType(I16, self.n), 2), self.words)
        size = b.bitcast(b.shl(b.and_(word, self.all(0x7FFF)), self.all(13)), self.floats)
        size = b.fmul(size, ir.Constant(self.floats, [2.0**112] * self.n))  # the exponents' offsets differ by 112
        sign = b.shl(b.and_(word, self.all(0x8000)), self.all(16))
        return b.bitcast(b.or_(b.bitcast(size, self.words), sign), self.floats)

    def small(self, at: Any, signed: bool) -> Any:
        """Return the n bytes from the address `at` on as float32; signed: whether they have a sign."""
        value = self.load(at, ir.VectorType(I8, self.n), 1)
        return self.b.sitofp((self.b.sext if signed else self.b.zext)(value, self.words), self.floats)

    def codes(self, at: Any, bits: int, places: Sequence[int]) -> list[Any]:
        """Return codes of n columns: for each place g a vector of n words, each with the codes of k = 4 g .. 4 g + 3.

        at: the address of the first of these columns in the first vector of a strip (quantised.py).
        bits: bits of a code; with 8, codes get 128 added where the instruction needs them without a sign.
        places: the places g, among 0 .. 7.
        """
        b, codes = self.b, []
        for g in places:
            code = self.load(self.plus(at, 4 * LANES * (g if bits == 8 else g % 4)), self.words, 4)
            if bits == 8:
                offset = self.all(-0x7F7F7F80)  # 0x80 in every byte: adds 128 to a signed one
                codes.append(b.xor(code, offset) if self.name in (VNNI, VNNI_256) else code)
                continue
            code = b.and_(code if g < 4 else b.lshr(code, self.all(4)), self.all(0x0F0F0F0F))
            if bits > 4:
                per, mask = (8, 0x10101010) if bits == 5 else (4, 0x30303030)
                high = self.load(self.plus(at, 4 * LANES * (4 + g // per)), self.words, 4)
                shift = 4 - g % per * (bits - 4)
                high = b.shl(high, self.all(shift)) if shift > 0 else b.lshr(high, self.all(-shift)) if shift else high
                code = b.or_(code, b.and_(high, self.all(mask)))
            codes.append(code)
        return codes

    def pairs_sum(self, most: Any, codes: Sequence[Any], line: Any, bits: int) -> Any:
        """Return sums in 16 bits of pairs of products, for PAIRS: two for each column.

        most: what the sums begin with, None for 0.
        codes, line, bits: as in `sum`.
        """
        b = self.b
        for i, code in enumerate(codes):
            x = b.bitcast(self.spread(self.plus(line, 4 * i), I32), self.octets)
            code = b.bitcast(code, self.octets)
            if bits == 8:  # abs(code) is the same for all rows, so that LLVM computes it only once
                x = call(b, "llvm.x86.avx2.psign.b", self.octets, x, code)
                code = call(b, f"llvm.abs.v{4 * self.n}i8", self.octets, code, ir.IntType(1)(0))
            products = call(b, "llvm.x86.avx2.pmadd.ub.sw", self.pairs, code, x)
            most = products if most is None else b.add(most, products)
        return most

    def half_at(self, row: Any, beside: int) -> Any:
        """Return the pointer to what `half_sum` made for a row and register number `beside` of two, for PAIRS."""
        return self.b.gep(self.halves, [self.b.add(self.b.mul(row, I64(2)), I64(beside))])

    def half_sum(self, codes: Sequence[Any], line: Any, bits: int) -> Any:
        """Return what `sum` takes as `before` with the second half of a block's codes, for PAIRS: a vector of n words.

        codes: the first half of them, vectors from `codes`.
        line, bits: as in `sum`.
        """
        if PAIRS_HELD[bits] == 8:
            return self.b.bitcast(self.pairs_sum(None, codes, line, bits), self.words)
        return self.sum(self.all(0), codes, line, bits)

    def sum(self, total: Any, codes: Sequence[Any], line: Any, bits: int, before: Any = None) -> Any:
        """Return exact sums of products of some codes with those of one row, a vector of n whole numbers.

        total: what the sums begin with.
        codes: vectors from `codes`, of four inputs k each.
        line: the address of the row's first code.
        bits: bits of a code of the weights.
        before: what `half_sum` made of the first half of a block's codes, if `codes` are the second.
        """
        b = self.b
        if self.name == PAIRS:
            most, ones = None, ir.Constant(self.pairs, [1] * (2 * self.n))
            if before is not None and PAIRS_HELD[bits] == 8:
                most = b.bitcast(before, self.pairs)
            elif before is not None:
                total = b.add(total, before)
            for first in range(0, len(codes), PAIRS_HELD[bits]):
                held = codes[first : first + PAIRS_HELD[bits]]
                most = self.pairs_sum(most, held, self.plus(line, 4 * first), bits)
                total, most = b.add(total, call(b, "llvm.x86.avx2.pmadd.wd", self.words, most, ones)), None
            return total
        for i, code in enumerate(codes):
            x = self.spread(self.plus(line, 4 * i), I32)
            if self.name == PLAIN:
                for byte in range(4):
                    up, down = self.all(24 - 8 * byte), self.all(24)
                    total = b.add(total, b.mul(b.ashr(b.shl(code, up), down), b.ashr(b.shl(x, up), down)))
                continue
            name, kind = f"llvm.x86.avx512.vpdpbusd.{32 * self.n}", self.words
            if self.name == NEON:
                name, kind = "llvm.aarch64.neon.sdot.v4i32.v16i8", self.octets
            total = call(b, name, self.words, total, b.bitcast(code, kind), b.bitcast(x, kind))
        return total


def emit(
    dots: Dots, kind: Kind, strips: int, panel: Any, groups: Any, lines: Any, rows: Any, all_rows: Any, sums: Any
) -> None:
    """Write the instructions that add the product of some rows with one panel to sums.

    All arguments from `panel` on are LLVM values, whole numbers of 64 bits.

    dots: writes the instructions of exact sums.
    kind: the kind of the weights.
    strips: the strips of 16 columns that meet a row together, which is then read once for all of them: 1, or 2 whose
        codes fit registers.
    panel, groups: address of the panel, and its number of groups.
    lines: address of the first row's first line.
    rows: the number of rows to multiply.
    all_rows: the number of rows whose lines stand side by side per block, at least `rows`.
    sums: address of what is added to, float32 [rows, 64].
    """
    b, n, blocks = dots.b, dots.n, kind.weights // 32
    scales, strip_bytes = 2 * COLUMNS * (1 + kind.least), 4 * LANES * kind.bits
    subs_bytes = COLUMNS * kind.subs * (1 + kind.least)
    block_bytes = subs_bytes + COLUMNS // LANES * strip_bytes
    turns = COLUMNS // LANES // strips  # turns per block: a turn computes `strips` strips of one block
    parts, fused = max(kind.subs, 1), ("contract",)  # parts of a block with a factor of their own
    # A block's codes meet the rows at once, or half of those of 2 n columns: the entry of 2026-12-01 on products in
    # AVX2 in docs/LOG.md.
    pieces = 1 if dots.halves is None else 2
    halved = pieces > parts  # whether both halves have one factor: the sums of the first wait in memory for the second
    with cgutils.for_range(b, b.mul(groups, I64(blocks * turns)), intp=I64) as loop:
        number, turn = b.udiv(loop.index, I64(turns)), b.urem(loop.index, I64(turns))  # the block's number in the panel
        group, block = (b.lshr(number, I64(3)), b.and_(number, I64(7))) if blocks == 8 else (number, I64(0))
        base = b.add(panel, b.mul(group, I64(kind.group_bytes)))
        here = b.add(b.add(base, I64(scales)), b.mul(block, I64(block_bytes)))
        # A turn fetches its share of the panel as it lies in memory, with what stands between strips.
        share = kind.group_bytes // (blocks * turns)
        passed = b.add(panel, b.mul(loop.index, I64(share)))
        for i in range(0, share, 64):
            fetch(b, dots.plus(passed, AHEAD + i), FAR)
        line0 = b.add(lines, b.mul(b.mul(number, all_rows), I64(LINE)))

        def columns_of(index: int, first: int, words: range) -> tuple[list[Any], Any, list[Any], Any]:
            """Return what is needed of n columns from `first` on of strip `index` of a turn.

            That is the factors of their exact sums, one for all 32 weights or two for 16 each; the minimum, if the kind
            has one; the vectors of codes that meet these words of a line; and the address of their sums.
            """
            strip = b.add(b.mul(turn, I64(strips)), I64(index))
            column = b.add(b.mul(strip, I64(LANES)), I64(first))
            d = dots.widened(b.add(base, b.mul(column, I64(2))))
            least = dots.widened(b.add(base, b.add(b.mul(column, I64(2)), I64(2 * COLUMNS)))) if kind.least else None
            factors = [d]
            if kind.subs:
                places = [b.add(here, b.add(column, I64(COLUMNS * i))) for i in range(kind.subs + kind.least)]
                factors = [b.fmul(d, dots.small(place, kind.bits == 6)) for place in places[: kind.subs]]
                if kind.least:
                    least = b.fneg(b.fmul(least, dots.small(places[-1], False)))
            at = dots.plus(b.add(b.add(here, I64(subs_bytes)), b.mul(strip, I64(strip_bytes))), 4 * first)
            return factors, least, dots.codes(at, kind.bits, words), b.add(sums, b.mul(column, I64(4)))

        def exact_sum(codes: list[Any], part: int, line: Any, word: int, half: Any) -> Any:
            """Return the exact sum of the weights of one factor with a row, without the codes' offset.

            codes, part: their codes, and the number of the factor.
            line, word: address of the row's line, and the number of its word that meets the first codes.
            half: None, or a pointer to the sum of the weights before these.
            """
            offset = {8: BY_8, 16: BY_16, 32: FIRST + part}.get(kind.offset)
            if kind.bits == 8 and dots.name in (VNNI, VNNI_256):
                offset = BY_128
            start = dots.all(0) if offset is None else dots.spread(dots.plus(line, 4 * offset), I32)
            before = None if half is None else b.load(half)
            return dots.sum(start, codes, dots.plus(line, 4 * word), kind.bits, before)

        for first, piece in itertools.product(range(0, LANES, n * pieces), range(pieces)):
            words = range(8 // pieces * piece, 8 // pieces * (piece + 1))
            together = [columns_of(i, first + n * j, words) for i in range(strips) for j in range(pieces)]
            numbers = [piece] if pieces == parts else range(parts)  # of the factors that these codes have
            each = len(words) // len(numbers)
            with cgutils.for_range(b, rows, intp=I64) as row:
                line = b.add(line0, b.mul(row.index, I64(LINE)))
                halves = [dots.half_at(row.index, i) if halved else None for i in range(len(together))]
                if halved and piece == 0:
                    for half, (_, _, codes, _) in zip(halves, together, strict=True):
                        b.store(dots.half_sum(codes, line, kind.bits), half)
                    continue
                exact = [
                    [exact_sum(codes[each * i : each * (i + 1)], part, line, words[each * i], half)
                     for i, part in enumerate(numbers)]
                    for half, (_, _, codes, _) in zip(halves, together, strict=True)
                ]  # fmt: skip
                scale = dots.spread(dots.plus(line, 4 * SCALE), F32)
                both = dots.spread(dots.plus(line, 4 * SUM), F32) if kind.least else None
                totals = []  # stored once all are computed: after a store in between, LLVM would read the row anew
                for (factors, least, _, at), of_columns in zip(together, exact, strict=True):
                    place = b.inttoptr(b.add(at, b.mul(row.index, I64(4 * COLUMNS))), dots.floats.as_pointer())
                    total = load(b, place)
                    for part, whole in zip(numbers, of_columns, strict=True):
                        scaled = b.fmul(b.sitofp(whole, dots.floats), scale)
                        total = b.fadd(total, b.fmul(scaled, factors[part], flags=fused), flags=fused)
                    if kind.least:
                        total = b.fadd(total, b.fmul(both, least, flags=fused), flags=fused)
                    totals.append((total, place))
                for total, place in totals:
                    b.store(total, place).align = 4


@written(*[types.intp] * 7)
def times_panel(b: Any, form: Any, panel: Any, groups: Any, lines: Any, rows: Any, all_rows: Any, sums: Any) -> None:
    """Add the product of some rows with one panel to sums, as `emit` says.

    form: the number of the weights' kind.
    b, panel, groups, lines, rows, all_rows, sums: as in `emit`.
    """
    dots, others = Dots(b, BEST, HALF), (panel, groups, lines, rows, all_rows, sums)

    def code(kind: Kind) -> None:
        if dots.n < LANES:  # AVX-512 alone has registers for the codes of two strips
            emit(dots, kind, 1, *others)
            return
        with b.if_else(b.icmp_signed(">", rows, I64(WAITING))) as (many, few):
            with many:
                emit(dots, kind, 2, *others)
            with few:
                emit(dots, kind, 1, *others)

    one_of(b, form, {kind.form: partial(code, kind) for kind in KINDS.values()})


@written(types.intp, types.intp)
def write_line(b: Any, x: Any, line: Any) -> None:
    """Quantise 32 numbers of a row.

    b: the builder of the LLVM instructions.
    x: address of the numbers, float32.
    line: address of their line, which is written.
    """
    many, whole = ir.VectorType(F32, 32), ir.VectorType(I32, 32)
    numbers = load(b, b.inttoptr(x, many.as_pointer()))
    # Read as whole numbers, the bits of positive floats have the floats' order, and those of a NaN are the largest.
    sizes = b.and_(b.bitcast(numbers, whole), ir.Constant(whole, [0x7FFFFFFF] * 32))
    largest = b.bitcast(call(b, "llvm.vector.reduce.umax.v32i32", I32, sizes), F32)
    scale = b.fdiv(largest, ir.Constant(F32, 127.0))
    steps = b.fmul(numbers, spread(b, b.fdiv(ir.Constant(F32, 127.0), largest), 32))
    magic = ir.Constant(many, [12582912.0] * 32)  # adding 1.5 * 2 ** 23 rounds, and leaves the number in low bits
    codes = b.trunc(b.bitcast(b.fadd(steps, magic), whole), ir.VectorType(I8, 32))
    wide = b.sext(codes, whole)
    halves = [
        b.shuffle_vector(wide, wide, ir.Constant(ir.VectorType(I32, 16), list(range(at, at + 16)))) for at in (0, 16)
    ]
    first, second = (call(b, "llvm.vector.reduce.add.v16i32", I32, half) for half in halves)
    total = b.add(first, second)
    of_all = {place: b.mul(total, I32(factor)) for place, factor in ((BY_8, -8), (BY_16, -16), (BY_128, -128))}
    parts = {FIRST: b.mul(first, I32(-32)), SECOND: b.mul(second, I32(-32)), **of_all}
    for place, value in {0: codes, SCALE: scale, SUM: b.fmul(scale, b.sitofp(total, F32)), **parts}.items():
        b.store(value, b.inttoptr(b.add(line, I64(4 * place)), value.type.as_pointer())).align = 4


@linked("foretoken_lines", 5)
def quantise_rows(x, x_row, m, k, lines):
    """Quantise rows; all arguments are whole numbers.

    x: address of the first row, float32.
    x_row: float32 numbers from one row to the next.
    m, k: number of rows, and numbers of a row; 32 divides k.
    lines: address of the lines [k / 32, m], which are written.
    """
    for i in range(m):
        for block in range(k // 32):
            write_line(x + 4 * (i * x_row + 32 * block), lines + LINE * (block * m + i))


@linked("foretoken_dots", 10)
def quantised_panels(w, form, first, last, k, lines, m, y, y_row, width):
    """Compute some panels of the product of rows with a quantised matrix; all arguments are whole numbers.

    w, form: address of the matrix's panels, and the number of their kind.
    first, last: panels first .. last - 1.
    k: inputs of the matrix.
    lines: address of what `quantise_rows` made of the rows.
    m: number of rows.
    y: address of the first row of the product, float32, which is written.
    y_row: float32 numbers from one row of the product to the next.
    width: columns of the product.
    """
    groups = k // BY_FORM[form - QUANTISED].weights
    sums = np.empty((min(m, AT_ONCE), COLUMNS), np.float32)
    for start in range(0, m, AT_ONCE):
        rows = min(AT_ONCE, m - start)
        for panel in range(first, last):
            columns = min(COLUMNS, width - panel * COLUMNS)
            sums[:rows] = 0
            at = w + panel * panel_bytes(k, form)
            times_panel(form, at, groups, lines + start * LINE, rows, m, sums.ctypes.data)
            for i in range(rows):
                row = floats(y + 4 * ((start + i) * y_row + panel * COLUMNS), (columns,))
                for j in range(columns):
                    row[j] = sums[i, j]
    alive(sums)


@linked("foretoken_unpack", 4)
def unpack_row(raw, row_bytes, form, x):
    """Write the weights of one row that is stored as in a GGUF file; all arguments are whole numbers.

    raw, row_bytes: address of the row, and its bytes.
    form: the number of its kind.
    x: address of the weights, float32, which are written.
    """
    kind = BY_FORM[form - QUANTISED]
    read_row(octets(raw, (row_bytes,)), form, floats(x, (row_bytes // kind.block_bytes * kind.weights,)))
