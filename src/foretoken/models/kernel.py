"""The forward of a Llama-like model as one compiled function over panels: no operator is dispatched in between."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.models.attention import SPREAD, attend_all, attend_threads, store
from foretoken.models.product import times
from foretoken.models.tile import gate_row, machine_code


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


def _forward(
    x, positions, first_row, slots, keys, values, masks, layer_mask, used, low, cos, sin, sizes, eps, head_eps, scale,
    bare, norms, head_norms, addresses, forms, biases, threads
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Run x [batch * n, d] through every layer, in place; keys and values of the nodes go to `slots` [batch, n].

    sizes: query heads, key heads, dim, channels of the MLP, those in multiples of 16; paired: as attention.py stores
    keys and values. addresses, forms [layers, 7]: panels of q, k, v, out, gate, up, down. biases: q|k|v, out, gate|up,
    down [layers, ...]. norms [layers, 2, d]; head_norms [layers, 2, dim], or none. bare [layers]: attention reads x
    without the first norm.
    """
    batch, n = slots.shape
    m, d = x.shape
    query_heads, key_heads, dim, width, wide, paired = sizes
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
        store(qkv, of_q, of_k, slots, dim, paired, of_keys, of_values)
        mask = masks[layer_mask[layer]]
        if threads is None:
            attend_all(
                qkv, batch, n, key_heads, rep, dim, scale, of_keys, of_values, paired, mask, slots, used, low, mixed
            )
        elif m * used > SPREAD:
            attend_threads(
                qkv, batch, n, key_heads, rep, dim, scale, of_keys, of_values, paired, mask, slots, used, low, mixed
            )
        else:
            attend_all(
                qkv, batch, n, key_heads, rep, dim, scale, of_keys, of_values, paired, mask, slots, used, low, mixed
            )
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
