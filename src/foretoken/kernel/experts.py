"""The MLP of a layer with experts, in the places of steps 5 and 6 of layer.py: each node has the matrices of a few.

The router gives every node a score for each expert, and the node's `picks` best experts compute it. The nodes of a
forward that have an expert in common are multiplied with its matrices together, so that these are read once. The
matrices of all experts stand one behind the other: gate and up of the first, gate and up of the second, and so on in
one stretch, and the down matrices in another.

A node's sum over its experts is in the order of their numbers. So it does not depend on the nodes beside it.

This code is compiled for models with experts alone: records have its address, and `layer.part_of` jumps there.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import numpy as np

from foretoken.kernel.addresses import alive, floats, whole
from foretoken.kernel.compile import fused
from foretoken.kernel.layer import DOWN, GATE, MATRICES, ROUTER, UP, WIDEN, own_of, product_of, records_at, round_for
from foretoken.kernel.pointwise import norm
from foretoken.kernel.product import Product, panel_at, panels_in, panels_of, share
from foretoken.kernel.simd import gate_row
from foretoken.kernel.sizes import COLUMNS
from foretoken.kernel.softmax import fill


@fused
def routes_of(t, part):
    """Return thread `part`'s room for what `route` finds, as views; t: the layer's record.

    Three arrays: where each expert's part of the others ends [experts] int64; nodes, in the order of their experts
    [m picks] int64; and the share of the expert in each of these nodes [m picks] float32.
    """
    pairs = t.m * t.picks
    at = t.routes + 8 * part * (t.experts + 2 * pairs)
    nodes = at + 8 * t.experts
    return whole(at, (t.experts,)), whole(nodes, (pairs,)), floats(nodes + 8 * pairs, (pairs,))


@fused
def route(t, part, rows):
    """Choose the experts of all nodes, and fill what `routes_of` returns.

    t, part: as in layer.py.
    rows: the normed stream [m, d].
    """
    ends, nodes, shares = routes_of(t, part)
    scores, p, taken = np.empty((t.m, t.experts), np.float32), np.empty(t.experts, np.float32), np.empty_like(ends)
    chosen, weights = np.empty((t.m, t.picks), np.int64), np.empty((t.m, t.picks), np.float32)
    router = product_of(t, part, rows, t.d, ROUTER, scores, 0, t.experts)
    last = panels_in(t.experts)
    panels_of(router, 0, last, panel_at(router.w, last, t.d, router.form))
    for e in range(t.experts):
        taken[e], ends[e] = -1, 0  # the last node that has the expert, and how many have it
    for i in range(t.m):
        fill(scores[i], np.float32(1), p)
        total = np.float32(0)
        for rank in range(t.picks):
            best = -1
            for e in range(t.experts):
                if taken[e] < i and (best < 0 or scores[i, e] > scores[i, best]):
                    best = e
            taken[best], ends[best] = i, ends[best] + 1
            chosen[i, rank], weights[i, rank] = best, p[best]
            total += p[best]
        for rank in range(t.picks if t.normed_shares else 0):
            weights[i, rank] /= total
    begin = 0
    for e in range(t.experts):
        count, ends[e] = ends[e], begin
        begin += count
    for i in range(t.m):
        for rank in range(t.picks):
            e = chosen[i, rank]
            nodes[ends[e]], shares[ends[e]] = i, weights[i, rank]
            ends[e] += 1
    alive((rows, scores))


@fused
def product_with(t, part, e, x, k, i, y, at, width):
    """Return the Product of the first k columns of x with a matrix of one expert.

    e: the number of the expert.
    t, part, x, k, i, y, at, width: as in `product_of`.
    """
    w, form = whole(t.weights, (MATRICES,))[i], whole(t.forms, (MATRICES,))[i]
    of_expert = panels_in(width) * (1 if i == DOWN else 2)  # gate and up stand side by side
    bits, own = t.bits + 4 * part * t.room, panel_at(w, e * of_expert, k, form)
    return Product(x.ctypes.data, x.shape[1], bits, len(x), k, own, form, y.ctypes.data + 4 * at, y.shape[1], width)


@fused
def widen(t, part, parts):
    """Do step 5: choose experts, and fill `inner` for each node and each of its experts, in the order of `routes_of`.

    A thread takes the same columns of gate and up of every expert. t, part, parts: as in layer.py.
    """
    own, forms, wide = own_of(t, part), whole(t.forms, (MATRICES,)), t.width  # whole panels
    norm(floats(t.x, (t.m, t.d)), floats(t.norms, (2, t.d))[1], t.eps, own)
    route(t, part, own)
    ends, nodes, _ = routes_of(t, part)
    picked, none, curve = np.empty((t.m, t.d), np.float32), floats(t.to_gate, (wide,)), (t.linear, t.cubic)
    first, last = share(part, parts, panels_in(wide))
    start, end, begin = first * COLUMNS, last * COLUMNS, 0
    for e in range(t.experts):
        count = ends[e] - begin
        if count > 0:
            for i in range(count):
                row, place = own[nodes[begin + i]], picked[i]
                for j in range(len(row)):
                    place[j] = row[j]
            rows = floats(picked.ctypes.data, (count, t.d))
            gated, inner = floats(t.gated, (count, 2 * wide)), floats(t.inner + 4 * begin * wide, (count, wide))
            round_for(t, part, rows, t.d, max(forms[GATE], forms[UP]))
            gates = product_with(t, part, e, rows, t.d, GATE, gated, 0, wide)
            ups = product_with(t, part, e, rows, t.d, UP, gated, wide, wide)
            panels_of(gates, first, last, panel_at(ups.w, first, t.d, ups.form))
            panels_of(ups, first, last, panel_at(ups.w, last, t.d, ups.form))
            for i in range(count):
                row = gated[i].reshape(2, wide)[:, start:end]
                gate_row(row[0], row[1], none[start:end], none[start:end], curve, inner[i, start:end])
            begin = ends[e]
    alive(picked)


@fused
def narrow(t, part, parts):
    """Do step 6: add to the stream the product of `inner` and each expert's down matrix, times the expert's share.

    t, part, parts: as in layer.py.
    """
    ends, nodes, shares = routes_of(t, part)
    x, back, forms = floats(t.x, (t.m, t.d)), floats(t.back, (t.m, t.d)), whole(t.forms, (MATRICES,))
    first, last = share(part, parts, panels_in(t.d))
    start, end, begin = first * COLUMNS, last * COLUMNS, 0
    for e in range(t.experts):
        count = ends[e] - begin
        if count > 0:
            rows = floats(t.inner + 4 * begin * t.width, (count, t.width))
            round_for(t, part, rows, t.width, forms[DOWN])
            product = product_with(t, part, e, rows, t.width, DOWN, back, 0, t.d)
            panels_of(product, first, last, panel_at(product.w, last, t.width, product.form))
            for i in range(count):
                row, more, weight = x[nodes[begin + i], start:end], back[i, start:end], shares[begin + i]
                for j in range(len(row)):
                    row[j] += weight * more[j]
            begin = ends[e]


def experts(layer, step, part, parts):
    """Do thread `part`'s share of a step in a layer with experts; all arguments are whole numbers.

    layer: address of the layer's record.
    step: WIDEN or NARROW.
    part, parts: as in layer.py.
    """
    t = records_at(layer, (1,))[0]
    if step == WIDEN:
        widen(t, part, parts)
    else:
        narrow(t, part, parts)
