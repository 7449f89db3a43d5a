"""The forward of a Llama-like model as one compiled function over panels: no operator is dispatched in between.

Reads and writes its own cache layout: keys [layers, batch, heads, slots / 64, dim, 64], panels like those of a matrix,
so that a product with a query runs along slots and along memory, and values [layers, batch, heads, slots, dim]. Slots
are a multiple of 64 and start as zeros.
"""

# pyright: reportCallIssue=false

import numpy as np
from numba import prange

from foretoken.core.vectors import LANES, exp_row
from foretoken.models.panels import WHOLE
from foretoken.models.product import PANEL, times
from foretoken.models.tile import gate_row, machine_code, strip

QUERIES = 48  # queries that share one block of scores
SPREAD = 4096  # nodes times slots from which the heads are spread over the threads


def _norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row."""
    m, d = x.shape
    for i in range(m):
        squares = np.float32(0.0)
        for j in range(d):
            squares += x[i, j] * x[i, j]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(d) + eps)
        for j in range(d):
            out[i, j] = x[i, j] * scale * weight[j]


def _head_norm(x, first, last, dim, weight, eps):  # type: ignore[no-untyped-def]
    """The same for each of the heads first..last-1 by itself, in place (Qwen3)."""
    for i in range(x.shape[0]):
        for h in range(first, last):
            at = h * dim
            squares = np.float32(0.0)
            for j in range(dim):
                squares += x[i, at + j] * x[i, at + j]
            scale = np.float32(1.0) / np.sqrt(squares / np.float32(dim) + eps)
            for j in range(dim):
                x[i, at + j] *= scale * weight[j]


def _turn(x, count, dim, positions, cos, sin):  # type: ignore[no-untyped-def]
    """Rotary embedding of the first `count` heads of each row, in place."""
    half = dim // 2
    for i in range(x.shape[0]):
        p = positions[i]
        for h in range(count):
            at = h * dim
            for j in range(half):
                a, b = x[i, at + j], x[i, at + half + j]
                x[i, at + j] = a * cos[p, j] - b * sin[p, j]
                x[i, at + half + j] = b * cos[p, half + j] + a * sin[p, half + j]


def _add(x, y, bias):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += y[i, j] + bias[j]


def _shift(x, bias):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        for j in range(bias.shape[0]):
            x[i, j] += bias[j]


def _gate(y, width, bias, out):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up of y = gate | up, each with its bias; 16 divides width."""
    for i in range(y.shape[0]):
        gate_row(y, i * y.shape[1], bias, 0, width, out, i * width)


norm = machine_code(_norm, sums=True)
head_norm = machine_code(_head_norm, sums=True)
turn = machine_code(_turn)
add = machine_code(_add)
shift = machine_code(_shift)
gate = machine_code(_gate)


def _weigh(scores, rows, used, low, shares):  # type: ignore[no-untyped-def]
    """Each row's first `used` scores, in place, become weights whose softmax is shares[i] times them; the columns up to
    the next multiple of 16 become 0."""
    wide = scores.shape[1]
    for i in range(rows):
        for j in range(used, wide):
            scores[i, j] = low
        shares[i] = np.float32(1.0) / exp_row(scores, i * wide, wide // LANES)


weigh = machine_code(_weigh)


def _attend(qkv, b, n, group, rep, dim, scale, keys, values, mask, slots, filled, low, out):  # type: ignore[no-untyped-def]
    """Attention of the n nodes of row b with key head `group`: out[:, query heads of the group].

    filled: slots of the longest row; this one's end behind its own last node, or behind padding that is masked.
    """
    used = 1
    for i in range(n):
        if used <= slots[b, i] < filled:
            used = slots[b, i] + 1
    wide = (used + LANES - 1) // LANES * LANES
    at_once = max(1, QUERIES // rep)
    scores = np.empty((at_once * rep, wide), np.float32)
    queries = np.empty((at_once * rep, dim), np.float32)
    results, shares = np.empty((at_once * rep, dim), np.float32), np.empty(at_once * rep, np.float32)
    queries_at, scores_at, results_at = queries.ctypes.data, scores.ctypes.data, results.ctypes.data
    key_at = keys[b, group].ctypes.data
    value_at = values[b, group].ctypes.data
    for first in range(0, n, at_once):
        count = min(at_once, n - first)
        rows = count * rep
        for i in range(count):
            for r in range(rep):
                for j in range(dim):
                    queries[i * rep + r, j] = qkv[b * n + first + i, (group * rep + r) * dim + j] * scale
        for at in range(0, wide, PANEL):
            columns = min(PANEL, wide - at)
            here = key_at + 4 * at * dim
            after = here + 4 * PANEL * dim if rows > 2 else 0  # one or two rows wait for memory anyway
            strip(columns, queries_at, dim, rows, here, PANEL, dim, WHOLE, scores_at + 4 * at, wide, 1, after)
        if mask.shape[3] > 0:
            for i in range(count):
                for r in range(rep):
                    for j in range(used):
                        scores[i * rep + r, j] += mask[b, 0, first + i, j]
        weigh(scores, rows, used, low, shares)
        for at in range(0, dim, PANEL):
            columns = min(PANEL, dim - at)
            here = value_at + 4 * at
            strip(columns, scores_at, wide, rows, here, dim, used, WHOLE, results_at + 4 * at, dim, 1, 0)
        for i in range(count):
            for r in range(rep):
                for j in range(dim):
                    out[b * n + first + i, (group * rep + r) * dim + j] = results[i * rep + r, j] * shares[i * rep + r]


attend = machine_code(_attend)


def _attend_threads(qkv, batch, n, key_heads, rep, dim, scale, keys, values, mask, slots, used, low, out):  # type: ignore[no-untyped-def]
    for job in prange(batch * key_heads):
        attend(qkv, job // key_heads, n, job % key_heads, rep, dim, scale, keys, values, mask, slots, used, low, out)


def _attend_all(qkv, batch, n, key_heads, rep, dim, scale, keys, values, mask, slots, used, low, out):  # type: ignore[no-untyped-def]
    for job in range(batch * key_heads):
        attend(qkv, job // key_heads, n, job % key_heads, rep, dim, scale, keys, values, mask, slots, used, low, out)


attend_threads = machine_code(_attend_threads, parallel=True)
attend_all = machine_code(_attend_all)


def _forward(
    x, positions, first_row, slots, keys, values, masks, layer_mask, used, low, cos, sin, sizes, eps, head_eps, scale,
    bare, norms, head_norms, addresses, forms, biases, threads
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Run x [batch * n, d] through every layer, in place; keys and values of the nodes go to `slots` [batch, n].

    sizes: query heads, key heads, dim, channels of the MLP, those in multiples of 16. addresses, forms [layers, 7]:
    panels of q, k, v, out, gate, up, down. biases: q|k|v, out, gate|up, down [layers, ...]. norms [layers, 2, d];
    head_norms [layers, 2, dim], or none. bare [layers]: attention reads x without the first norm.
    """
    batch, n = slots.shape
    m, d = x.shape
    query_heads, key_heads, dim, width, wide = sizes
    rep, heads, of_q, of_k = query_heads // key_heads, query_heads + 2 * key_heads, query_heads * dim, key_heads * dim
    y, back = np.empty((m, d), np.float32), np.empty((m, d), np.float32)
    qkv, mixed = np.empty((m, heads * dim), np.float32), np.empty((m, of_q), np.float32)
    gated, inner = np.zeros((m, 2 * wide), np.float32), np.empty((m, wide), np.float32)
    for layer in range(addresses.shape[0]):
        w, form = addresses[layer], forms[layer]
        if bare[layer]:
            y[:] = x
        else:
            norm(x, norms[layer, 0], eps, y)
        times(y, d, d, m, w[0], form[0], qkv, 0, heads * dim, of_q, threads)
        times(y, d, d, m, w[1], form[1], qkv, of_q, heads * dim, of_k, threads)
        times(y, d, d, m, w[2], form[2], qkv, of_q + of_k, heads * dim, of_k, threads)
        shift(qkv, biases[0][layer])
        if head_norms.shape[0] > 0:
            head_norm(qkv, 0, query_heads, dim, head_norms[layer, 0], head_eps)
            head_norm(qkv, query_heads, query_heads + key_heads, dim, head_norms[layer, 1], head_eps)
        turn(qkv, query_heads + key_heads, dim, positions, cos, sin)
        of_keys, of_values = keys[layer, first_row:], values[layer, first_row:]
        for b in range(batch):
            for i in range(n):
                slot = slots[b, i]
                panel, column = slot // PANEL, slot % PANEL
                for h in range(key_heads):
                    at = of_q + h * dim
                    for j in range(dim):
                        of_keys[b, h, panel, j, column] = qkv[b * n + i, at + j]
                        of_values[b, h, slot, j] = qkv[b * n + i, at + of_k + j]
        mask = masks[layer_mask[layer]]
        if threads is None:
            attend_all(qkv, batch, n, key_heads, rep, dim, scale, of_keys, of_values, mask, slots, used, low, mixed)
        elif m * used > SPREAD:
            attend_threads(qkv, batch, n, key_heads, rep, dim, scale, of_keys, of_values, mask, slots, used, low, mixed)
        else:
            attend_all(qkv, batch, n, key_heads, rep, dim, scale, of_keys, of_values, mask, slots, used, low, mixed)
        times(mixed, of_q, of_q, m, w[3], form[3], back, 0, d, d, threads)
        add(x, back, biases[1][layer])
        norm(x, norms[layer, 1], eps, y)
        times(y, d, d, m, w[4], form[4], gated, 0, 2 * wide, width, threads)
        times(y, d, d, m, w[5], form[5], gated, wide, 2 * wide, width, threads)
        gate(gated, wide, biases[2][layer], inner)
        times(inner, wide, width, m, w[6], form[6], back, 0, d, d, threads)
        add(x, back, biases[3][layer])


forward = machine_code(_forward)


def _head(x, weight, eps, w, form, bias, y, threads):  # type: ignore[no-untyped-def]
    """Logits y [m, vocabulary] from the states after the last layer."""
    m, d = x.shape
    normed = np.empty_like(x)
    norm(x, weight, eps, normed)
    times(normed, d, d, m, w, form, y, 0, y.shape[1], y.shape[1], threads)
    shift(y, bias)


head = machine_code(_head)
