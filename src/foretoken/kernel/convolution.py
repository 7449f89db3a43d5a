"""A layer with a gated short convolution, as LFM2 has them, in the places of steps 2 and 3 of layer.py.

The matrices of queries, keys and values make three numbers B, C and x of each channel instead. What the layer adds to
the stream is its output matrix times C conv(B x), where conv weighs the B x of a token and of those just before it.

As in attention, what later tokens need of one, its B x, stands in the token's slot. A node sees the slots of its path
alone, and these are in the order of the path. So the nodes before it are the next slots below its own that it sees, and
a tree takes one forward. The sum over them begins with the node itself, whatever else is in the forward.

This code is compiled for models with such layers alone: records have its address, and `layer.part_of` jumps there.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import numpy as np

from foretoken.kernel.addresses import bits_of, floats, whole
from foretoken.kernel.compile import fused
from foretoken.kernel.layer import CACHE, records_at
from foretoken.kernel.pointwise import put
from foretoken.kernel.product import panels_in, share
from foretoken.kernel.rounding import nearest
from foretoken.kernel.sizes import COLUMNS


@fused
def kept_of(t, b):
    """Return what is kept of a sequence, as a view [slots, d or d / 2].

    Where the cache is in bfloat16, a word of 32 bits holds an even channel in the lower half, and the next one.

    t: the layer's record.
    b: the sequence, by its place among those of the forward.
    """
    return floats(t.values, (t.batch, t.panels * COLUMNS, t.d // (2 if t.paired else 1)))[b]


@fused
def keep(t, b, start, end):
    """Do step 2 for the nodes of one sequence: write B x into their slots.

    t, b: as in `kept_of`.
    start, end: channels start .. end - 1 are written.
    """
    n, d, kept = t.m // t.batch, t.d, kept_of(t, b)
    slots, made = whole(t.slots, (t.batch, n))[b], floats(t.qkv, (t.batch, n, 3 * d))[b]
    row = np.empty(end - start, np.float32)
    for i in range(n):
        gate, x = made[i, start:end], made[i, 2 * d + start : 2 * d + end]
        for j in range(len(row)):
            row[j] = gate[j] * x[j]
        if t.paired:
            bits, words = bits_of(row), bits_of(kept)[slots[i], start // 2 : end // 2]
            for j in range(len(words)):
                words[j] = np.uint32(nearest(bits[2 * j]) >> 16 | nearest(bits[2 * j + 1]))
        else:
            place = kept[slots[i], start:end]
            for j in range(len(row)):
                place[j] = row[j]


@fused
def convolve(t, b, start, end):
    """Do step 3 for the nodes of one sequence: fill `mixed` with C conv(B x); t, b, start, end: as in `keep`."""
    n, d, kept = t.m // t.batch, t.d, kept_of(t, b)
    slots, made = whole(t.slots, (t.batch, n))[b], floats(t.qkv, (t.batch, n, 3 * d))[b]
    mask, filters = floats(t.mask, (t.batch, n, t.seen))[b], floats(t.filters, (t.taps, d))
    mixed, row = floats(t.mixed, (t.batch, n, d))[b], np.empty(end - start, np.float32)
    for i in range(n):
        out, gate = mixed[i, start:end], made[i, d + start : d + end]
        for j in range(len(out)):
            out[j] = 0
        slot, below = slots[i], min(slots[i], t.used)
        for tap in range(t.taps - 1, -1, -1):
            if t.paired:
                bits, words = bits_of(row), bits_of(kept)[slot, start // 2 : end // 2]
                for j in range(len(words)):
                    bits[2 * j], bits[2 * j + 1] = words[j] << np.uint32(16), words[j] & np.uint32(0xFFFF0000)
            else:
                put(kept[slot : slot + 1, start:end], row.reshape(1, -1), 0)
            weights = filters[tap, start:end]
            for j in range(len(out)):
                out[j] += weights[j] * row[j]
            below -= 1
            while below >= 0 and t.seen > 0 and mask[i, below] != 0:
                below -= 1
            if below < 0:
                break
            slot = below
        for j in range(len(out)):
            out[j] *= gate[j]


def convolution(layer, step, part, parts):
    """Do thread `part`'s share of a step, which is some of the channels; all arguments are whole numbers.

    layer: address of the layer's record.
    step: CACHE or LOOK.
    part, parts: as in layer.py.
    """
    t = records_at(layer, (1,))[0]
    first, last = share(part, parts, panels_in(t.d))
    for b in range(t.batch):
        if step == CACHE:
            keep(t, b, first * COLUMNS, min(last * COLUMNS, t.d))
        else:
            convolve(t, b, first * COLUMNS, min(last * COLUMNS, t.d))
