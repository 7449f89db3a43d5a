"""Attention of a few nodes over a slot cache, and how the cache stores keys and values.

keys [batch, heads, slots / 64, dim, 64], panels like those of a matrix, so that a product with a query runs along slots
and along memory; values [batch, heads, slots, dim]. Slots are a multiple of 64 and start as zeros.

Paired, for models that compute in bfloat16 and for quantised drafters: what is stored is rounded to bfloat16, and a
word of 32 bits holds two numbers, of dims k even and odd in keys [.., dim / 2, 64], of slots even and odd in values
[.., slots / 2, dim]. Queries and the softmax's weights are rounded too; scores, the softmax and all sums are float32.

A node of a tree sees its path, whose slots need not be neighbours: siblings stand between them. Its scores and values
are then gathered into the places that they would have had in plain decoding, where a token's slot is its position. So
every sum has the same terms in the same order, and a node's result is that of plain decoding bit for bit. The matrix
unit adds words in groups (matrix_unit.py), so what is gathered begins at a group's border, and zeros fill the last one.

The arguments of several functions: `attention` is an Attention; `b` is a sequence, by its place among those of the
forward; `seen` is a node's row of the mask, 0 for a slot that it sees [used]; `gap` is the slot of its first gap.
"""

# pyright: reportCallIssue=false

from typing import NamedTuple

import numpy as np

from foretoken.kernel.addresses import alive, bits_of
from foretoken.kernel.compile import fused
from foretoken.kernel.matrix_unit import GROUP
from foretoken.kernel.pointwise import put
from foretoken.kernel.processor import MATRIX
from foretoken.kernel.rounding import PER_WORD, ROUNDED, nearest, rounded
from foretoken.kernel.simd import exp_row
from foretoken.kernel.sizes import COLUMNS, LANES, WHOLE
from foretoken.kernel.tile import strip

QUERIES = 48  # largest number of queries whose scores are computed together


class Attention(NamedTuple):
    """What the attention of one layer reads and writes, for n nodes of each of `batch` sequences. Arrays are float32.

    qkv: queries, keys and values of the nodes [batch * n, (query_heads + 2 key_heads) dim]. The heads that a function
        reads are ready: bias, norm and rotary embedding are applied to them (layer.py).
    keys: the cache of these sequences [batch, key_heads, panels, dim or dim / 2, 64], see the module.
    values: likewise [batch, key_heads, slots or slots / 2, dim].
    slots: the slot of each node's key and value [batch, n] int64.
    positions: of the nodes [batch * n] int64.
    mask: what is added to the scores, 0 or `low` [batch, 1, n, used]; [batch, 1, n, 0] where every node sees all slots.
    used: number of slots that are read, for the longest sequence.
    rep: query heads per key head.
    scale: factor of the queries.
    low: the finite number that stands for minus infinity.
    paired: whether the cache is in bfloat16, two numbers to a word.
    """

    qkv: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    mask: np.ndarray
    used: int
    rep: int
    scale: np.float32
    low: np.float32
    paired: bool


@fused
def store(attention, b, group):
    """Write the keys and values of one sequence's nodes into their slots, for one key head.

    attention, b: see the module.
    group: the number of the key head.
    """
    qkv, keys, values, slots = attention.qkv, attention.keys, attention.values, attention.slots
    n, key_heads, dim = slots.shape[1], values.shape[1], values.shape[3]
    numbers, key_words, value_words = bits_of(qkv), bits_of(keys), bits_of(values)
    at = (attention.rep * key_heads + group) * dim
    there = at + key_heads * dim
    for i in range(n):
        row, slot = b * n + i, slots[b, i]
        panel, column = slot // COLUMNS, slot % COLUMNS
        if not attention.paired:
            for j in range(dim):
                keys[b, group, panel, j, column] = qkv[row, at + j]
                values[b, group, slot, j] = qkv[row, there + j]
            continue
        key, value = numbers[row, at : at + dim], numbers[row, there : there + dim]
        words = value_words[b, group, slot // 2]
        for j in range(dim // 2):
            even, odd = nearest(key[2 * j]), nearest(key[2 * j + 1])
            key_words[b, group, panel, j, column] = np.uint32(even >> 16 | odd)
        if slot % 2:
            for j in range(dim):
                words[j] = words[j] & np.uint32(0xFFFF) | np.uint32(nearest(value[j]))
        else:
            for j in range(dim):
                words[j] = np.uint32(nearest(value[j]) >> 16)  # 0 beside it: a NaN there would spoil sums with weight 0


@fused
def weigh(scores, rows, used, low, shares):
    """Turn the first `used` scores of each row into the weights of a softmax, up to a factor, in place.

    scores: float32 [rows or more, columns]; columns from `used` on become 0; 16 divides their number.
    rows: number of rows that are turned.
    used: number of scores of a row.
    low: the finite number that stands for minus infinity.
    shares: is filled with the factor by which each row's weights are to be multiplied, float32 [rows or more].
    """
    wide = scores.shape[1]
    for i in range(rows):
        for j in range(used, wide):
            scores[i, j] = low
        shares[i] = np.float32(1.0) / exp_row(scores[i])


@fused
def used_by(slots, b, used):
    """Return how many slots the nodes of one sequence read: those up to the last node, and at least 1.

    slots: the slot of each node [batch, n] int64.
    b: the sequence, by its row of `slots`.
    used: number of slots of the longest sequence. A node whose slot is `used` or larger is padding and does not count.
    """
    own = 1
    for i in range(slots.shape[1]):
        if own <= slots[b, i] < used:
            own = slots[b, i] + 1
    return own


@fused
def first_gap(attention, b, i):
    """Return the first slot that a node does not see although later ones of its path follow; `used` if there is none.

    A node without siblings before it or its ancestors stands in the slot of its own position. Every slot that it is
    further along is a gap, and the gaps are the last slots before it that it does not see.

    attention, b: see the module.
    i: the node, by its place among those of the sequence.
    """
    slot, gap = attention.slots[b, i], attention.used
    if slot >= attention.used or attention.mask.shape[3] == 0:  # padding; all is seen
        return gap
    gaps, seen = slot - attention.positions[b * attention.slots.shape[1] + i], attention.mask[b, 0, i]
    for j in range(slot, -1, -1):
        if gaps <= 0:
            break
        if seen[j] != 0:
            gap, gaps = j, gaps - 1
    return gap


@fused
def close_gaps(scores, first, last, seen, gap, low):
    """Move the scores of the slots that a node sees, from its first gap on, to that slot and those behind it, in place.

    scores: float32 [rows, used or more columns].
    first, last: rows first .. last - 1 are the node's, one per query head.
    seen, gap: see the module.
    low: what the places that become free are filled with.
    """
    to = gap
    for j in range(gap, len(seen)):
        if seen[j] == 0:
            for r in range(first, last):
                scores[r, to] = scores[r, j]
            to += 1
    for r in range(first, last):
        scores[r, to : len(seen)] = low


@fused
def gather(values, paired, seen, start, gap, path):
    """Copy the values that a node sees, from slot `start` on, into neighbouring places of `path`.

    Those of slots before the first gap are copied in any case.

    values: of one key head, as the cache has them, float32 [slots or slots / 2, dim].
    paired: whether a row holds the values of two slots in bfloat16.
    seen, gap: see the module.
    start: the first slot that is copied, at most `gap`; an even number if values are paired.
    path: is filled from row 0 on, float32 [words, dim], laid out as `values`.

    Returns the number of rows that were filled. If values are paired and an odd number was copied, half of the last row
    is zeros.
    """
    words, out, count = bits_of(values), bits_of(path), 0
    for j in range(start, len(seen)):
        if j >= gap and seen[j] != 0:
            continue
        if not paired:
            put(values[j : j + 1], path[count:], 0)
        else:
            shift, word = np.uint32(16 * (j % 2)), out[count // 2]
            for c in range(values.shape[1]):
                half = words[j // 2, c] >> shift & np.uint32(0xFFFF)
                word[c] = word[c] | half << np.uint32(16) if count % 2 else half
        count += 1
    return (count + 1) // 2 if paired else count


@fused
def sums(weights, weights_row, rows, values, words, form, results, dim, fresh):
    """Multiply softmax weights with the values of one key head: results = (0 if fresh else results) + weights values.

    weights: address of the first row of weights, in the form in which `tile` takes x.
    weights_row: float32 numbers from one row of weights to the next.
    rows: number of rows of weights.
    values: address of the values [words, dim].
    words: number of rows of the values.
    form: WHOLE, or ROUNDED where weights and values are bfloat16.
    results: address of the results, float32 [rows, dim].
    dim: width of a head.
    fresh: 1 or 0.
    """
    for at in range(0, dim, COLUMNS):
        columns = min(COLUMNS, dim - at)
        strip(
            columns, weights, weights_row, rows, values + 4 * at, dim, words, form, results + 4 * at, dim, fresh, 0
        )  # fmt: skip


@fused
def attend(attention, b, first_head, last_head, out):
    """Compute attention of one sequence's nodes with some query heads that share a key head.

    attention, b: see the module. The keys and values of all nodes are in their slots, and the queries of these heads
        are ready.
    first_head, last_head: query heads first_head .. last_head - 1.
    out: the columns of these heads are filled [batch * n, query_heads dim].
    """
    qkv, keys, values, mask = attention.qkv, attention.keys, attention.values, attention.mask
    n, dim, paired = attention.slots.shape[1], values.shape[3], attention.paired
    rep, group = last_head - first_head, first_head // attention.rep
    used = used_by(attention.slots, b, attention.used)
    unit = 2 * LANES if paired else LANES
    wide = (used + unit - 1) // unit * unit
    form, key_words, slot_words, per_word, per_slot, group_words = WHOLE, dim, used, 1, 1, 1
    if paired:
        form, key_words, slot_words, per_word, per_slot = ROUNDED, dim // 2, (used + 1) // 2, PER_WORD, 2
        group_words = GROUP if MATRIX else 1  # a sum is made of groups of words, the same for every path
    at_once = max(1, QUERIES // rep)
    scores = np.empty((at_once * rep, wide), np.float32)
    queries = np.empty((at_once * rep, dim), np.float32)
    flat = queries.reshape(-1)
    results, shares = np.empty((at_once * rep, dim), np.float32), np.empty(at_once * rep, np.float32)
    gaps = np.empty(at_once, np.int64)
    scores_at, results_at = scores.ctypes.data, results.ctypes.data
    key_at = keys[b, group].ctypes.data
    value_at = values[b, group].ctypes.data
    for first in range(0, n, at_once):
        count = min(at_once, n - first)
        rows = count * rep
        for i in range(count):
            asking = qkv[b * n + first + i, first_head * dim : last_head * dim]
            scaled = flat[i * rep * dim : (i + 1) * rep * dim]
            for j in range(rep * dim):
                scaled[j] = asking[j] * attention.scale
        asked = rounded(queries[:rows], dim) if paired else queries
        for at in range(0, wide, COLUMNS):
            columns = min(COLUMNS, wide - at)
            here = key_at + 4 * at * key_words
            after = here + 4 * COLUMNS * key_words if rows > 2 else 0  # for one or two rows it gained no time
            strip(
                columns, asked.ctypes.data, key_words * per_word, rows, here, COLUMNS, key_words, form,
                scores_at + 4 * at, wide, 1, after,
            )  # fmt: skip
        start = used  # none of these nodes has a gap before this slot
        if mask.shape[3] > 0:
            for i in range(count):
                seen = mask[b, 0, first + i, :used]
                for r in range(i * rep, (i + 1) * rep):
                    row = scores[r]
                    for j in range(used):
                        row[j] += seen[j]
                gaps[i] = min(used, first_gap(attention, b, first + i))
                close_gaps(scores, i * rep, (i + 1) * rep, seen, gaps[i], attention.low)
                start = min(start, gaps[i] - gaps[i] % (per_slot * group_words))
        weigh(scores, rows, used, attention.low, shares)
        weights = rounded(scores[:rows], wide) if paired else scores
        weights_row = wide // 2 * per_word if paired else wide
        words = start // per_slot if start < used else slot_words // group_words * group_words
        sums(weights.ctypes.data, weights_row, rows, value_at, words, form, results_at, dim, 1)
        left = slot_words - words
        if left > 0:
            path = np.empty(((left + group_words - 1) // group_words * group_words, dim), np.float32)
            weights_at = weights.ctypes.data + 4 * words * per_word
            if start < used:
                for i in range(count):
                    filled = gather(values[b, group], paired, mask[b, 0, first + i, :used], start, gaps[i], path)
                    more = (filled + group_words - 1) // group_words * group_words
                    path[filled:more] = 0
                    of_node, into = weights_at + 4 * i * rep * weights_row, results_at + 4 * i * rep * dim
                    sums(of_node, weights_row, rep, path.ctypes.data, more, form, into, dim, 0)
            else:  # the last group: slots behind `used` may still hold NaN, so zeros stand in for them
                put(values[b, group, words:slot_words], path, 0)
                path[left:] = 0
                sums(weights_at, weights_row, rows, path.ctypes.data, len(path), form, results_at, dim, 0)
            alive(path)
        for i in range(count):
            for r in range(rep):
                at = (first_head + r) * dim
                head, result, part = out[b * n + first + i, at : at + dim], results[i * rep + r], shares[i * rep + r]
                for j in range(dim):
                    head[j] = result[j] * part
        alive(asked)
        alive(weights)
