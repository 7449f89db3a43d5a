"""A decoder layer over panels in five steps, of which every thread does its part.

Loops run over slices of a row: numba does not know that a column's number is not negative, and would look at each.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, prange, types
from numba.extending import intrinsic

from foretoken.kernel.attention import attend, store
from foretoken.kernel.compile import compiled, linked
from foretoken.kernel.product import panel_at, panels_in, panels_of, share
from foretoken.kernel.simd import gate_row, turn_row
from foretoken.kernel.sizes import COLUMNS, DOTTED, LANES
from foretoken.kernel.tile import round_rows


def _norm_row(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    squares = np.float32(0.0)
    for j in range(len(x)):
        squares += x[j] * x[j]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(len(x)) + eps)
    for j in range(len(x)):
        out[j] = x[j] * scale * weight[j]


norm_row = compiled(_norm_row, fuse=True, reorder_sums=True)


def _norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """The same, row by row."""
    for i in range(x.shape[0]):
        norm_row(x[i], weight, eps, out[i])


norm = compiled(_norm, fuse=True)


def _shift(x, start, end, bias):  # type: ignore[no-untyped-def]
    """Add `bias` to columns start .. end - 1, each its own."""
    for i in range(x.shape[0]):
        row, more = x[i, start:end], bias[start:end]
        for j in range(len(row)):
            row[j] += more[j]


shift = compiled(_shift, fuse=True)


def _add(x, y, start, end, bias):  # type: ignore[no-untyped-def]
    """Columns start .. end - 1 of x become x + y + bias."""
    for i in range(x.shape[0]):
        row, other, more = x[i, start:end], y[i, start:end], bias[start:end]
        for j in range(len(row)):
            row[j] += other[j] + more[j]


add = compiled(_add, fuse=True)


def _turn(x, at, dim, positions, cos, sin):  # type: ignore[no-untyped-def]
    """Rotary embedding of the head from column `at` on, in place."""
    half = dim // 2
    for i in range(x.shape[0]):
        p = positions[i]
        if half % LANES == 0:
            turn_row(x, i * x.shape[1] + at, cos, sin, p * dim, half)
        else:
            head = x[i, at : at + dim]
            for j in range(half):
                a, b = head[j], head[half + j]
                head[j] = a * cos[p, j] - b * sin[p, j]
                head[half + j] = b * cos[p, half + j] + a * sin[p, half + j]


turn = compiled(_turn, fuse=True)


def _ready(qkv, group, rep, query_heads, key_heads, dim, bias, head_norms, eps, positions, cos, sin):  # type: ignore[no-untyped-def]
    """The heads of one group, in place: bias, norm, rotary embedding. qkv [n, queries | keys | values]."""
    own, key, value = group * rep * dim, (query_heads + group) * dim, (query_heads + key_heads + group) * dim
    shift(qkv, own, own + rep * dim, bias)
    shift(qkv, key, key + dim, bias)
    shift(qkv, value, value + dim, bias)
    for i in range(rep + 1):
        at = own + i * dim if i < rep else key
        if head_norms.shape[0] > 0:  # Qwen3: each head by itself
            for row in range(qkv.shape[0]):
                head = qkv[row, at : at + dim]
                norm_row(head, head_norms[0 if i < rep else 1], eps, head)
        turn(qkv, at, dim, positions, cos, sin)


ready = compiled(_ready, fuse=True)


READ, ATTEND, MIX, WIDEN, NARROW, STEPS = range(6)  # of a layer; after each, every thread waits for the others

# What a layer's table says: sizes, and addresses of arrays.
(
    M, D, BATCH, QUERY_HEADS, KEY_HEADS, DIM, WIDTH, WIDE, PAIRED, BARE, NORMED, USED, SEEN, PANELS, X, OWN, BITS,
    ROOM, QKV, MIXED, GATED, INNER, BACK, POSITIONS, SLOTS, ANGLES, COS, SIN, NUMBERS, NORMS, HEAD_NORMS, WEIGHTS,
    FORMS, TO_QKV, TO_OUT, TO_GATE, TO_DOWN, KEYS, VALUES, MASK, FED, FED_WIDTH, TABLE,
) = range(43)  # fmt: skip


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    return types.voidptr(types.intp), lambda context, b, s, args: b.inttoptr(args[0], ir.IntType(8).as_pointer())


def _floats(address, shape):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), shape, np.float32)


def _whole(address, shape):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), shape, np.int64)


floats = compiled(_floats, fuse=True)
whole = compiled(_whole, fuse=True)


def _part(table, first_step, last_step, part, parts):  # type: ignore[no-untyped-def]
    """What thread `part` of `parts` does in the steps first_step .. last_step - 1 of the layer of a table.

    It takes panels of a matrix, and with them columns of what comes out, or heads of attention. What all threads need,
    each makes for itself (own [m, d], bits), since a core gets at what it wrote faster than at what another one did.
    """
    t = whole(table, (TABLE,))
    m, d, batch, width, wide = t[M], t[D], t[BATCH], t[WIDTH], t[WIDE]
    query_heads, key_heads, dim = t[QUERY_HEADS], t[KEY_HEADS], t[DIM]
    rep, of_q, of_k = query_heads // key_heads, query_heads * dim, key_heads * dim
    x, own = floats(t[X], (m, d)), floats(t[OWN] + 4 * part * m * d, (m, d))
    bits = floats(t[BITS] + 4 * part * t[ROOM], (t[ROOM],))
    qkv, mixed, back = floats(t[QKV], (m, of_q + 2 * of_k)), floats(t[MIXED], (m, of_q)), floats(t[BACK], (m, d))
    gated, inner = floats(t[GATED], (m, 2 * wide)), floats(t[INNER], (m, wide))
    w, form, norms = whole(t[WEIGHTS], (7,)), whole(t[FORMS], (7,)), floats(t[NORMS], (2, d))
    numbers = floats(t[NUMBERS], (4,))
    eps, head_eps, scale, low = numbers[0], numbers[1], numbers[2], numbers[3]
    for step in range(first_step, last_step):
        if step == READ:
            k, rows, flat, row = d, own.reshape(-1), qkv.reshape(-1), qkv.shape[1]
            if t[BARE]:
                k = t[FED_WIDTH]
                rows = floats(t[FED], (m, k)).reshape(-1)
            else:
                norm(x, norms[0], eps, own)
            if form[0] == DOTTED or form[1] == DOTTED or form[2] == DOTTED:
                round_rows(rows, k, k, m, bits)
            count = panels_in(of_q) + 2 * panels_in(of_k)
            first, last = share(part, parts, count)
            at, before = 0, 0
            for i in range(3):
                out = of_q if i == 0 else of_k
                end = before + panels_in(out)
                if first < end and before < last:
                    after = panel_at(w[i + 1], 0, k, form[i + 1])
                    if last <= end:
                        after = panel_at(w[3], part * panels_in(d) // parts, of_q, form[3])
                    start, stop = max(first, before) - before, min(last, end) - before
                    panels_of(start, stop, rows, bits, k, k, m, w[i], form[i], flat, at, row, out, after)
                at, before = at + out, end
        elif step == ATTEND:
            first, last = share(part, parts, batch * key_heads)
            n, used, paired = m // batch, t[USED], t[PAIRED] > 0
            per_word, slots = 2 if paired else 1, whole(t[SLOTS], (batch, n))
            keys = floats(t[KEYS], (batch, key_heads, t[PANELS], dim // per_word, COLUMNS))
            values = floats(t[VALUES], (batch, key_heads, t[PANELS] * COLUMNS // per_word, dim))
            mask, positions = floats(t[MASK], (batch, 1, n, t[SEEN])), whole(t[POSITIONS], (m,))
            cos, sin = floats(t[COS], (t[ANGLES], dim)), floats(t[SIN], (t[ANGLES], dim))
            to_qkv, head_norms = floats(t[TO_QKV], (of_q + 2 * of_k,)), floats(t[HEAD_NORMS], (2 * t[NORMED], dim))
            for job in range(first, last):
                b, group = job // key_heads, job % key_heads
                ready(qkv[b * n : (b + 1) * n], group, rep, query_heads, key_heads, dim, to_qkv, head_norms, head_eps,
                      positions[b * n : (b + 1) * n], cos, sin)  # fmt: skip
                store(qkv, b, group, of_q, of_k, slots, dim, paired, keys, values)
                attend(qkv, job, n, key_heads, rep, dim, scale, keys, values, paired, mask, slots, used, low, mixed)
        elif step == WIDEN:
            norm(x, norms[1], eps, own)
            rows, flat = own.reshape(-1), gated.reshape(-1)
            if form[4] == DOTTED or form[5] == DOTTED:
                round_rows(rows, d, d, m, bits)
            first, last = share(part, parts, panels_in(width))
            after = panel_at(w[5], first, d, form[5])
            panels_of(first, last, rows, bits, d, d, m, w[4], form[4], flat, 0, 2 * wide, width, after)
            after = panel_at(w[6], part * panels_in(d) // parts, width, form[6])
            panels_of(first, last, rows, bits, d, d, m, w[5], form[5], flat, wide, 2 * wide, width, after)
            to_gate = floats(t[TO_GATE], (2 * wide,))
            start, end = min(first * COLUMNS, wide), min(last * COLUMNS, wide)
            for i in range(m):
                gate_row(gated, i * 2 * wide + start, to_gate, start, wide, end - start, inner, i * wide + start)
        else:
            i, k, source, bias = 3, of_q, mixed, floats(t[TO_OUT], (d,))
            if step == NARROW:
                i, k, source, bias = 6, width, inner, floats(t[TO_DOWN], (d,))
            rows, row = source.reshape(-1), source.shape[1]
            if form[i] == DOTTED:
                round_rows(rows, row, k, m, bits)
            first, last = share(part, parts, panels_in(d))
            if step == MIX:
                after = panel_at(w[4], part * panels_in(width) // parts, d, form[4])
            else:  # of the next layer, which has the sizes of this one and stands behind it
                behind, count = panel_at(w[6], panels_in(d), k, form[6]), panels_in(of_q) + 2 * panels_in(of_k)
                after = panel_at(behind, part * count // parts, d, form[0])
            panels_of(first, last, rows, bits, row, k, m, w[i], form[i], back.reshape(-1), 0, d, d, after)
            add(x, back, first * COLUMNS, min(last * COLUMNS, d), bias)


# By name, as tile.strip is: a forward is part of many compiled calls, and this would be compiled anew in each.
part_of = linked("foretoken_part", _part, 5)


def _every_part(table, step, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        part_of(table, step, step + 1, part, parts)


every_part = compiled(_every_part, fuse=True, parallel=True)
