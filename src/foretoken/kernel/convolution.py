"""A layer with a gated short convolution, as LFM2 has them, in the places of steps 2 and 3 of layer.py.

The matrices of queries, keys and values make three numbers B, C and x of each channel instead. What the layer adds to
the stream is its output matrix times C conv(B x), where conv weighs the B x of a token and of those just before it.

As in attention, what later tokens need of one, its B x, stands in the token's slot. A node sees the slots of its path
alone, and these are in the order of the path. So the nodes before it are the next slots below its own that it sees, and
a tree takes one forward. The sum over them begins with the node itself, whatever else is in the forward.

This code is compiled for models with such layers alone: records have its address, and `layer.part_of` jumps there.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from functools import cache

from foretoken.kernel.addresses import floats, whole
from foretoken.kernel.compile import Linked, fused
from foretoken.kernel.layer import CACHE, records_at
from foretoken.kernel.product import panels_in, share
from foretoken.kernel.sizes import COLUMNS


@fused
def keep(t, b, start, end):
    """Do step 2 for the nodes of one sequence: write B x into their slots.

    t: the layer's record.
    b: the sequence, by its place among those of the forward.
    start, end: channels start .. end - 1 are written.
    """
    n, d = t.m // t.batch, t.d
    slots, made = whole(t.slots, (t.batch, n))[b], floats(t.qkv, (t.batch, n, 3 * d))[b]
    kept = floats(t.values, (t.batch, t.panels * COLUMNS, d))[b]
    for i in range(n):
        gate, x, place = made[i, start:end], made[i, 2 * d + start : 2 * d + end], kept[slots[i], start:end]
        for j in range(len(place)):
            place[j] = gate[j] * x[j]


@fused
def convolve(t, b, start, end):
    """Do step 3 for the nodes of one sequence: fill `mixed` with C conv(B x); t, b, start, end: as in `keep`."""
    n, d = t.m // t.batch, t.d
    slots, made = whole(t.slots, (t.batch, n))[b], floats(t.qkv, (t.batch, n, 3 * d))[b]
    kept = floats(t.values, (t.batch, t.panels * COLUMNS, d))[b]
    mask, filters = floats(t.mask, (t.batch, n, t.seen))[b], floats(t.filters, (t.taps, d))
    mixed = floats(t.mixed, (t.batch, n, d))[b]
    for i in range(n):
        out, gate = mixed[i, start:end], made[i, d + start : d + end]
        own, weights, slot = kept[slots[i], start:end], filters[t.taps - 1, start:end], min(slots[i], t.used)
        for j in range(len(out)):
            out[j] = weights[j] * own[j]
        for tap in range(t.taps - 2, -1, -1):
            slot -= 1
            while slot >= 0 and t.seen > 0 and mask[i, slot] != 0:
                slot -= 1
            if slot < 0:
                break
            before, weights = kept[slot, start:end], filters[tap, start:end]
            for j in range(len(out)):
                out[j] += weights[j] * before[j]
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


@cache
def machine_code() -> Linked:
    """Return `convolution` as machine code, which is compiled where it is not on disk."""
    made = Linked("foretoken_convolution", convolution, 4, 0)
    if not made.load():
        made.compile()
    return made
