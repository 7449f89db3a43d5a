"""The forward of a Llama-like model as one compiled function over panels: no operator is dispatched in between."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.kernel import layer as steps
from foretoken.kernel.compile import compiled
from foretoken.kernel.layer import norm, shift
from foretoken.kernel.product import alive, times
from foretoken.kernel.simd import gate_row

SPREAD = 1_600_000  # multiplications of a layer from which its steps are spread over the threads


def _gate(y, width, bias, out):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up of y = gate | up, each with its bias; 16 divides width."""
    for i in range(y.shape[0]):
        gate_row(y, i * y.shape[1], bias, 0, width, width, out, i * width)


gate = compiled(_gate, fuse=True)


def _forward(
    x, fed, positions, first_row, slots, keys, values, masks, layer_mask, used, low, cos, sin, sizes, eps, head_eps,
    scale, bare, norms, head_norms, addresses, forms, biases, wanted, states, threads
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Run x [batch * n, d] through every layer, in place; keys and values of the nodes go to `slots` [batch, n].

    fed [batch * n, w]: what attention reads in a bare layer, x itself or an array of another width.
    positions [batch * n]; first_row: the first of `batch` neighbouring rows of keys and values.
    keys [layers, rows, key heads, panels, words, 64], values [layers, rows, key heads, words, dim]: see attention.py.
    masks: for every kind of layer [batch, 1, n, used] of 0 and low, no columns where all is seen; layer_mask [layers]:
    each layer's kind. used: slots that are read. cos, sin [slots, dim].
    sizes: query heads, key heads, dim, channels of the MLP, those in multiples of 16; paired: as attention.py stores
    keys and values. addresses, forms [layers, 7]: panels of q, k, v, out, gate, up, down. biases: q|k|v, out, gate|up,
    down [layers, ...]. norms [layers, 2, d]; head_norms [layers, 2, dim], or none. bare [layers]: attention reads
    `fed`, without a norm.
    wanted [f]: layers whose input becomes states[i] [f, batch * n, d].
    """
    m, d = x.shape
    query_heads, key_heads, dim, width, wide, paired = sizes
    heads, of_q, parts = query_heads + 2 * key_heads, query_heads * dim, 1
    if threads is not None and m * d * (heads * dim + of_q + 3 * width) > SPREAD:
        parts = threads
    room = m * (max(d, fed.shape[1], of_q, width) + 2)
    own, bits = np.empty((parts, m, d), np.float32), np.empty((parts, room), np.float32)
    qkv, mixed, back = np.empty((m, heads * dim), np.float32), np.empty((m, of_q), np.float32), np.empty_like(x)
    gated, inner = np.zeros((m, 2 * wide), np.float32), np.empty((m, wide), np.float32)
    numbers = np.array([eps, head_eps, scale, low], np.float32)
    t = np.zeros(steps.TABLE, np.int64)
    t[steps.M], t[steps.D], t[steps.BATCH], t[steps.USED] = m, d, slots.shape[0], used
    t[steps.QUERY_HEADS], t[steps.KEY_HEADS], t[steps.DIM] = query_heads, key_heads, dim
    t[steps.WIDTH], t[steps.WIDE], t[steps.PAIRED], t[steps.NORMED] = width, wide, paired, len(head_norms) > 0
    t[steps.PANELS], t[steps.ROOM], t[steps.ANGLES] = keys.shape[3], room, len(cos)
    t[steps.X], t[steps.OWN], t[steps.BITS] = x.ctypes.data, own.ctypes.data, bits.ctypes.data
    t[steps.FED], t[steps.FED_WIDTH] = fed.ctypes.data, fed.shape[1]
    t[steps.QKV], t[steps.MIXED], t[steps.BACK] = qkv.ctypes.data, mixed.ctypes.data, back.ctypes.data
    t[steps.GATED], t[steps.INNER], t[steps.NUMBERS] = gated.ctypes.data, inner.ctypes.data, numbers.ctypes.data
    t[steps.POSITIONS], t[steps.SLOTS] = positions.ctypes.data, slots.ctypes.data
    t[steps.COS], t[steps.SIN] = cos.ctypes.data, sin.ctypes.data
    for layer in range(addresses.shape[0]):
        for i in range(len(wanted)):
            if wanted[i] == layer:
                states[i] = x
        mask = masks[layer_mask[layer]]
        t[steps.BARE], t[steps.SEEN], t[steps.MASK] = bare[layer], mask.shape[3], mask.ctypes.data
        t[steps.NORMS], t[steps.WEIGHTS] = norms[layer].ctypes.data, addresses[layer].ctypes.data
        t[steps.FORMS] = forms[layer].ctypes.data
        if len(head_norms) > 0:
            t[steps.HEAD_NORMS] = head_norms[layer].ctypes.data
        t[steps.TO_QKV], t[steps.TO_OUT] = biases[0][layer].ctypes.data, biases[1][layer].ctypes.data
        t[steps.TO_GATE], t[steps.TO_DOWN] = biases[2][layer].ctypes.data, biases[3][layer].ctypes.data
        t[steps.KEYS], t[steps.VALUES] = keys[layer, first_row].ctypes.data, values[layer, first_row].ctypes.data
        if parts == 1:
            steps.part_of(t.ctypes.data, steps.READ, steps.STEPS, 0, 1)
        if threads is not None:  # by itself, so that numba leaves out what is for more threads where it is None
            for step in range(steps.STEPS if parts > 1 else 0):
                steps.every_part(t.ctypes.data, step, parts)
    alive((fed, own, bits, qkv, mixed, back, gated, inner, numbers, t))


forward = compiled(_forward, fuse=True)


def _head(x, weight, eps, w, form, bias, y, threads):  # type: ignore[no-untyped-def]
    """Logits y [m, vocabulary] from the states x [m, d] after the last layer, by the norm `weight` [d] and the panels
    at address w, with their bias [vocabulary] or none."""
    m, d = x.shape
    normed = np.empty_like(x)
    norm(x, weight, eps, normed)
    times(normed, d, d, m, w, form, y, 0, y.shape[1], y.shape[1], threads)
    shift(y, 0, len(bias), bias)


head = compiled(_head, fuse=True)
