"""Attention of a few nodes over a slot cache, and how the cache stores keys and values.

keys [batch, heads, slots / 64, dim, 64], panels like those of a matrix, so that a product with a query runs along slots
and along memory; values [batch, heads, slots, dim]. Slots are a multiple of 64 and start as zeros.

Paired, for models that compute in bfloat16: what is stored is rounded to it, and a word of 32 bits holds two numbers,
of dims k even and odd in keys [.., dim / 2, 64], of slots even and odd in values [.., slots / 2, dim]. Queries and the
softmax's weights are rounded too; scores, the softmax and all sums are float32.
"""

# pyright: reportCallIssue=false

from typing import NamedTuple

import numpy as np

from foretoken.kernel.addresses import alive
from foretoken.kernel.compile import fused
from foretoken.kernel.rounding import PER_WORD, ROUNDED, nearest, rounded
from foretoken.kernel.simd import exp_row
from foretoken.kernel.sizes import COLUMNS, LANES, WHOLE
from foretoken.kernel.tile import strip

QUERIES = 48  # queries that share one block of scores


class Attention(NamedTuple):
    """What the attention of one layer reads and writes, for n nodes of each of `batch` sequences.

    qkv: queries, keys and values of the nodes, ready to be used [batch * n, (query_heads + 2 key_heads) dim].
    keys: as above [batch, key_heads, panels, dim or dim / 2, 64].
    values: as above [batch, key_heads, slots or slots / 2, dim].
    slots: where each node's key and value go [batch, n].
    mask: what is added to the scores, 0 or `low` [batch, 1, n, used]; no columns where all is seen.
    used: slots of the longest sequence.
    rep: query heads of each key head.
    scale: factor of the queries.
    low: stands for minus infinity.
    paired: whether two numbers share a word.
    """

    qkv: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    slots: np.ndarray
    mask: np.ndarray
    used: int
    rep: int
    scale: np.float32
    low: np.float32
    paired: bool


@fused
def store(attention, b, group):
    """Write the nodes' keys and values of key head `group` of sequence b into their slots."""
    qkv, keys, values, slots = attention.qkv, attention.keys, attention.values, attention.slots
    n, key_heads, dim = slots.shape[1], values.shape[1], values.shape[3]
    bits, key_words, value_words = qkv.view(np.uint32), keys.view(np.uint32), values.view(np.uint32)
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
        key, value, words = bits[row, at : at + dim], bits[row, there : there + dim], value_words[b, group, slot // 2]
        for j in range(dim // 2):
            even, odd = nearest(key[2 * j]), nearest(key[2 * j + 1])
            key_words[b, group, panel, j, column] = np.uint32(even >> 16 | odd)
        if slot % 2:
            for j in range(dim):
                words[j] = words[j] & np.uint32(0xFFFF) | np.uint32(nearest(value[j]))
        else:
            for j in range(dim):
                words[j] = words[j] & np.uint32(0xFFFF0000) | np.uint32(nearest(value[j]) >> 16)


@fused
def weigh(scores, rows, used, low, shares):
    """Turn the first `used` scores of each row into the weights of a softmax, up to a factor.

    scores: [rows at least, columns], in place; columns from `used` on become 0; 16 divides their number.
    shares: what each row's weights are to be multiplied by [rows], is written.
    """
    wide = scores.shape[1]
    for i in range(rows):
        for j in range(used, wide):
            scores[i, j] = low
        shares[i] = np.float32(1.0) / exp_row(scores, i * wide, wide // LANES)


@fused
def used_by(slots, b, used):
    """The slots that the nodes of sequence b read: up to the last node; padding, at `used` or beyond, is masked."""
    own = 1
    for i in range(slots.shape[1]):
        if own <= slots[b, i] < used:
            own = slots[b, i] + 1
    return own


@fused
def attend(attention, b, group, out):
    """Attention of the nodes of sequence b with key head `group`.

    out: [batch * n, query_heads dim], whose columns of this group's query heads are written.
    """
    qkv, keys, values, mask = attention.qkv, attention.keys, attention.values, attention.mask
    n, dim, rep, paired = attention.slots.shape[1], values.shape[3], attention.rep, attention.paired
    used = used_by(attention.slots, b, attention.used)
    unit = 2 * LANES if paired else LANES
    wide = (used + unit - 1) // unit * unit
    form, key_words, slot_words, per_word = WHOLE, dim, used, 1
    if paired:
        form, key_words, slot_words, per_word = ROUNDED, dim // 2, (used + 1) // 2, PER_WORD
    at_once = max(1, QUERIES // rep)
    scores = np.empty((at_once * rep, wide), np.float32)
    queries = np.empty((at_once * rep, dim), np.float32)
    flat = queries.reshape(-1)
    results, shares = np.empty((at_once * rep, dim), np.float32), np.empty(at_once * rep, np.float32)
    scores_at, results_at = scores.ctypes.data, results.ctypes.data
    key_at = keys[b, group].ctypes.data
    value_at = values[b, group].ctypes.data
    for first in range(0, n, at_once):
        count = min(at_once, n - first)
        rows = count * rep
        for i in range(count):
            of_group = qkv[b * n + first + i, group * rep * dim : (group + 1) * rep * dim]
            scaled = flat[i * rep * dim : (i + 1) * rep * dim]
            for j in range(rep * dim):
                scaled[j] = of_group[j] * attention.scale
        asked = rounded(queries[:rows], dim) if paired else queries
        for at in range(0, wide, COLUMNS):
            columns = min(COLUMNS, wide - at)
            here = key_at + 4 * at * key_words
            after = here + 4 * COLUMNS * key_words if rows > 2 else 0  # one or two rows wait for memory anyway
            strip(
                columns, asked.ctypes.data, key_words * per_word, rows, here, COLUMNS, key_words, form,
                scores_at + 4 * at, wide, 1, after,
            )  # fmt: skip
        if mask.shape[3] > 0:
            for i in range(count):
                seen = mask[b, 0, first + i]
                for r in range(i * rep, (i + 1) * rep):
                    row = scores[r]
                    for j in range(used):
                        row[j] += seen[j]
        weigh(scores, rows, used, attention.low, shares)
        weights = rounded(scores[:rows], wide) if paired else scores
        weights_row = wide // 2 * per_word if paired else wide
        for at in range(0, dim, COLUMNS):
            columns = min(COLUMNS, dim - at)
            strip(
                columns, weights.ctypes.data, weights_row, rows, value_at + 4 * at, dim, slot_words, form,
                results_at + 4 * at, dim, 1, 0,
            )  # fmt: skip
        for i in range(count):
            for r in range(rep):
                at = (group * rep + r) * dim
                head, result, part = out[b * n + first + i, at : at + dim], results[i * rep + r], shares[i * rep + r]
                for j in range(dim):
                    head[j] = result[j] * part
        alive(asked)
        alive(weights)
