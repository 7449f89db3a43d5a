"""A decoder layer over panels, computed in six steps, each of which all threads share:

1. project: norm, then queries, keys and values;
2. cache: rotary embedding of keys; keys and values into their slots;
3. look: rotary embedding of queries, attention;
4. mix: the output matrix of attention, and the residual sum;
5. widen: norm, then gate and up, and act(gate) * up;
6. narrow: down, and the residual sum.

In models with norms before the residual sums too, as Gemma 3 has them, norm and sum are a step of their own, called
settle, after mix and again after narrow: such a norm needs whole rows, and in mix and narrow a thread makes only some
columns of each row.

In layers with experts, experts.py does steps 5 and 6.

After each step every thread waits for the others (together.py). In a step a thread takes some panels of a matrix, and
thereby some columns of the product, or it takes some heads. Steps 2 and 3 are separate because models have few key
heads: if threads shared out two or three key heads for attention, some would have more to do than others. What all
threads need, each makes for itself (`own`, `bits`), since a core reads faster what it wrote itself.

The arguments of all steps: `t` is the layer's record, a LAYER; `part` is the thread's number, of `parts` threads.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

import functools

import numpy as np
from numba import prange

from foretoken.kernel.addresses import arrays_of, call_at, floats, whole
from foretoken.kernel.attention import Attention, attend, store
from foretoken.kernel.compile import Linked, compiled, fused, linked
from foretoken.kernel.dots import quantise_rows
from foretoken.kernel.pointwise import add, increase, norm, norm_row, put, shift, turn
from foretoken.kernel.product import Product, panel_at, panels_in, panels_of, share
from foretoken.kernel.rounding import round_rows
from foretoken.kernel.simd import gate_row
from foretoken.kernel.sizes import COLUMNS, DOTTED, QUANTISED
from foretoken.kernel.together import ALONE, TOGETHER, meet, wait

PROJECT, CACHE, LOOK, MIX, SETTLE_MIXED, WIDEN, NARROW, SETTLE_NARROWED, STEPS = range(9)
# The matrices of a layer, in the order in which they are used; the router stands before GATE.
Q, K, V, OUT, GATE, UP, DOWN, ROUTER, MATRICES = range(9)

# The record of one layer of one forward, with arrays by their addresses. `layers_of` takes the address of such records,
# and so is compiled once, not again in each compiled call that runs layers. The records of all layers stand one behind
# the other. Arrays are float32 unless said otherwise. The whole numbers SIZES: m: nodes of all sequences. d: width of
# the states. batch: sequences. query_heads, key_heads: their numbers. dim: width of a head. width: channels of the MLP,
# or of one expert; wide: the same rounded up to whole vectors of 16. kind: layers of one kind have the same mask and
# angles. paired: whether keys and values are bfloat16. bare: whether the layer reads `fed` instead of the normed
# stream. normed_heads: whether queries and keys have norms. settled: whether norms stand before the residual sums.
# used: slots that are read. seen: columns of the mask, 0 or `used`. panels: panels of 64 slots in the cache.
# positions_known: rows of `cos` and `sin`. fed_width: numbers of a row of `fed`. room: numbers of `bits` for each
# thread. experts: their number, 0 in a layer without any. picks: how many of them each node has, 1 in such a layer.
# normed_shares: whether the shares of a node's experts are divided by their sum. taps: numbers of the convolution of a
# channel in a layer that has one instead of attention, 0 in others; such a layer's one query head and one key head have
# the width d. The FLOATS: eps, head_eps: what the norms of states, and those of heads, add to the mean square. scale:
# the factor of the queries. low: the finite number that stands for minus infinity in masks. linear, cubic: the MLP's
# activation, sizes.SILU or sizes.GELU. A model's records hold what its weights and its cache decide; a forward fills a
# copy with the rest: its sizes, the rooms that it makes, and the nodes.
SIZES = (
    "m", "d", "batch", "query_heads", "key_heads", "dim", "width", "wide", "kind", "paired", "bare", "normed_heads",
    "settled", "used", "seen", "panels", "positions_known", "fed_width", "room", "experts", "picks",
    "normed_shares", "taps",
)  # fmt: skip
FLOATS = ("eps", "head_eps", "scale", "low", "linear", "cubic")
ADDRESSES = (
    "x",  # the residual stream [m, d]
    "kept",  # where the layer's input is copied to [m, d], 0 where it is not copied
    "fed",  # what attention reads if the layer is bare [m, fed_width]
    "own",  # each thread's copy of the normed stream [parts, m, d]
    "bits",  # each thread's rows as `round_rows` or `quantise_rows` makes them [parts, room]
    "qkv",  # queries, keys and values [m, (query_heads + 2 key_heads) dim]
    "mixed",  # the output of attention, before the output matrix [m, query_heads dim]
    "back",  # what is added to the stream [m, d]
    "gated",  # gates, and beside them ups [m, 2 wide]
    "inner",  # act(gate) * up [m picks, wide]
    "routes",  # each thread's choice of experts [parts, experts + 2 m picks], see experts.py
    "mlp",  # machine code of experts.py, 0 in a layer without experts
    "mixer",  # machine code of convolution.py, 0 in a layer with attention
    "positions",  # of the nodes [m], int64
    "slots",  # of the nodes [batch, n], int64
    "cos", "sin",  # cosines and sines of every position [positions_known, dim]
    "norms",  # weights of the norms before attention and before the MLP [2, d]
    "norms_after",  # weights of the norms behind attention and behind the MLP [2, d], read if settled
    "head_norms",  # weights of the norms of queries and of keys [2, dim], read if normed_heads
    "weights",  # addresses of the matrices' panels, in a layer with experts those of the first one [MATRICES], int64
    "forms",  # the matrices' forms, see sizes.py [MATRICES], int64
    "to_qkv", "to_out", "to_gate", "to_down",  # biases [q | k | v], [d], [gate | up], [d]
    "filters",  # weights of the convolution, those of the nodes themselves last [taps, d]
    # The layer's part of the cache, in a forward from its first sequence on: see attention.py. A layer with a
    # convolution has no keys, and as values what convolution.py keeps.
    "keys", "values",
    "mask",  # what is added to the scores, 0 or `low` [batch, 1, n, seen], n = m / batch
)  # fmt: skip
LAYER = np.dtype([(name, np.int64) for name in SIZES + ADDRESSES] + [(name, np.float32) for name in FLOATS])
records_at = arrays_of(LAYER)
BYTES = LAYER.itemsize


@fused
def own_of(t, part):
    """Return thread `part`'s room for the normed stream [m, d], as a view; t: the layer's record."""
    return floats(t.own + 4 * part * t.m * t.d, (t.m, t.d))


@fused
def round_for(t, part, x, k, form):
    """Round or quantise rows into the thread's `bits`, if a matrix of this form takes them so.

    t, part: see the module.
    x: the rows, float32 [m or less, k or more]; their first k numbers are taken.
    k: inputs of the matrix.
    form: the form of the matrix; nothing is done for WHOLE and HALVED.
    """
    bits = t.bits + 4 * part * t.room
    if form == DOTTED:
        round_rows(x, k, floats(bits, (t.room,)))
    elif form >= QUANTISED:
        quantise_rows(x.ctypes.data, x.shape[1], len(x), k, bits)


@fused
def product_of(t, part, x, k, i, y, at, width):
    """Return the Product of the first k columns of x with one of the layer's matrices.

    t, part: see the module. The thread's `bits` hold what `round_for` made of x.
    x: float32 [m, k or more].
    k: inputs of the matrix.
    i: which matrix, Q .. DOWN.
    y: what the product is written to, in columns at .. at + width - 1, float32 [m, n].
    at, width: the first of these columns, and their number: the outputs of the matrix.
    """
    w, form = whole(t.weights, (MATRICES,))[i], whole(t.forms, (MATRICES,))[i]
    bits = t.bits + 4 * part * t.room
    return Product(x.ctypes.data, x.shape[1], bits, t.m, k, w, form, y.ctypes.data + 4 * at, y.shape[1], width)


@fused
def first_of(t, part, parts, i, k, width):
    """Return the address of the first panel that a thread uses of one of the layer's matrices.

    t, part, parts: see the module.
    i: which matrix, Q .. DOWN.
    k, width: its inputs and its outputs.
    """
    w, form = whole(t.weights, (MATRICES,))[i], whole(t.forms, (MATRICES,))[i]
    return panel_at(w, part * panels_in(width) // parts, k, form)


@fused
def project(t, part, parts):
    """Do step 1: fill `qkv` from the normed stream or, in a bare layer, from `fed`.

    A thread's panels may be of all three matrices. t, part, parts: see the module.
    """
    of_q, of_k, w, forms = t.query_heads * t.dim, t.key_heads * t.dim, whole(t.weights, (7,)), whole(t.forms, (7,))
    qkv, rows = floats(t.qkv, (t.m, of_q + 2 * of_k)), own_of(t, part)
    if t.bare:
        rows = floats(t.fed, (t.m, t.fed_width))
    else:
        norm(floats(t.x, (t.m, t.d)), floats(t.norms, (2, t.d))[0], t.eps, rows)
    k = rows.shape[1]
    round_for(t, part, rows, k, max(forms[Q], forms[K], forms[V]))
    first, last = share(part, parts, panels_in(of_q) + 2 * panels_in(of_k))
    at, before = 0, 0
    for i in range(Q, V + 1):
        out = of_q if i == Q else of_k
        end = before + panels_in(out)
        if first < end and before < last:
            after = panel_at(w[i + 1], 0, k, forms[i + 1])
            if last <= end:
                after = first_of(t, part, parts, OUT, of_q, t.d)
            start, stop = max(first, before) - before, min(last, end) - before
            panels_of(product_of(t, part, rows, k, i, qkv, at, out), start, stop, after)
        at, before = at + out, end


@fused
def ready(t, b, qkv, first, last):
    """Make some heads of one sequence ready for attention, in place: add the bias, norm, rotate by position.

    t: the layer's record.
    b: the sequence, by its place among those of the forward.
    qkv: the record's `qkv` as an array.
    first, last: heads first .. last - 1 are made ready, counted from the first query head on; key heads follow query
        heads.
    """
    n, dim = t.m // t.batch, t.dim
    rows, positions = qkv[b * n : (b + 1) * n], whole(t.positions, (t.m,))[b * n : (b + 1) * n]
    cos, sin = floats(t.cos, (t.positions_known, dim)), floats(t.sin, (t.positions_known, dim))
    bias, head_norms = floats(t.to_qkv, (qkv.shape[1],)), floats(t.head_norms, (2 * t.normed_heads, dim))
    shift(rows, first * dim, last * dim, bias)
    for i in range(first, last):
        at = i * dim
        if t.normed_heads:  # Qwen3: each head by itself
            for row in range(n):
                head = rows[row, at : at + dim]
                norm_row(head, head_norms[0 if i < t.query_heads else 1], t.head_eps, head)
        turn(rows, at, positions, cos, sin)


@fused
def attention_of(t):
    """Return the Attention of the layer with the record t."""
    rep, paired, per_word = t.query_heads // t.key_heads, t.paired > 0, 2 if t.paired else 1
    slots = whole(t.slots, (t.batch, t.m // t.batch))
    keys = floats(t.keys, (t.batch, t.key_heads, t.panels, t.dim // per_word, COLUMNS))
    values = floats(t.values, (t.batch, t.key_heads, t.panels * COLUMNS // per_word, t.dim))
    mask = floats(t.mask, (t.batch, 1, t.m // t.batch, t.seen))
    qkv = floats(t.qkv, (t.m, (t.query_heads + 2 * t.key_heads) * t.dim))
    positions = whole(t.positions, (t.m,))
    return Attention(qkv, keys, values, slots, positions, mask, t.used, rep, t.scale, t.low, paired)


@fused
def cache(t, part, parts):
    """Do step 2: write keys and values into their slots; a thread takes some of the key heads of all sequences.

    t, part, parts: see the module.
    """
    attention, n = attention_of(t), t.m // t.batch
    first, last = share(part, parts, t.batch * t.key_heads)
    bias = floats(t.to_qkv, ((t.query_heads + 2 * t.key_heads) * t.dim,))
    for job in range(first, last):
        b, key = job // t.key_heads, t.query_heads + job % t.key_heads
        ready(t, b, attention.qkv, key, key + 1)
        value = (key + t.key_heads) * t.dim
        shift(attention.qkv[b * n : (b + 1) * n], value, value + t.dim, bias)
        store(attention, b, job % t.key_heads)


# Linked by name, so that a third of this file's code is compiled by itself: as a part of `layers_of` it takes longer.
@linked("foretoken_look", 3)
def look(layer, part, parts):
    """Do step 3: fill `mixed` from `qkv` and the cache; a thread takes some of the query heads of all sequences.

    Those of a thread's heads that share a key head are computed together. All arguments are whole numbers.

    layer: address of the layer's record.
    part, parts: see the module.
    """
    t = records_at(layer, (1,))[0]
    attention, heads, mixed = attention_of(t), t.query_heads, floats(t.mixed, (t.m, t.query_heads * t.dim))
    at, last = share(part, parts, t.batch * heads)
    while at < last:
        b, first = at // heads, at % heads
        count = min(last - at, attention.rep - first % attention.rep)
        ready(t, b, attention.qkv, first, first + count)
        attend(attention, b, first, first + count, mixed)
        at += count


@fused
def mix(t, part, parts):
    """Do step 4: fill `back` with the product of `mixed` and the output matrix, and add it and its bias to the stream.

    In a settled layer the sum is left to `settle`. t, part, parts: see the module.
    """
    of_q, forms = t.query_heads * t.dim, whole(t.forms, (7,))
    mixed, back = floats(t.mixed, (t.m, of_q)), floats(t.back, (t.m, t.d))
    round_for(t, part, mixed, of_q, forms[OUT])
    first, last = share(part, parts, panels_in(t.d))
    after = first_of(t, part, parts, GATE, t.d, t.width)
    panels_of(product_of(t, part, mixed, of_q, OUT, back, 0, t.d), first, last, after)
    if not t.settled:
        add(floats(t.x, (t.m, t.d)), back, first * COLUMNS, min(last * COLUMNS, t.d), floats(t.to_out, (t.d,)))


@fused
def widen(t, part, parts):
    """Do step 5: fill `inner` from the normed stream; a thread takes the same columns of gate and up.

    t, part, parts: see the module.
    """
    own, gated, inner = own_of(t, part), floats(t.gated, (t.m, 2 * t.wide)), floats(t.inner, (t.m, t.wide))
    forms = whole(t.forms, (7,))
    norm(floats(t.x, (t.m, t.d)), floats(t.norms, (2, t.d))[1], t.eps, own)
    round_for(t, part, own, t.d, max(forms[GATE], forms[UP]))
    first, last = share(part, parts, panels_in(t.width))
    after = first_of(t, part, parts, UP, t.d, t.width)
    panels_of(product_of(t, part, own, t.d, GATE, gated, 0, t.width), first, last, after)
    after = first_of(t, part, parts, DOWN, t.width, t.d)
    panels_of(product_of(t, part, own, t.d, UP, gated, t.wide, t.width), first, last, after)
    bias, curve = floats(t.to_gate, (2, t.wide)), (t.linear, t.cubic)
    start, end = min(first * COLUMNS, t.wide), min(last * COLUMNS, t.wide)
    for i in range(t.m):
        row = gated[i].reshape(2, t.wide)[:, start:end]
        gate_row(row[0], row[1], bias[0, start:end], bias[1, start:end], curve, inner[i, start:end])


@fused
def narrow(t, part, parts):
    """Do step 6: fill `back` with the product of `inner` and the down matrix, and add it and its bias to the stream.

    In a settled layer the sum is left to `settle`. t, part, parts: see the module.
    """
    w, forms = whole(t.weights, (7,)), whole(t.forms, (7,))
    inner, back = floats(t.inner, (t.m, t.wide)), floats(t.back, (t.m, t.d))
    round_for(t, part, inner, t.width, forms[DOWN])
    first, last = share(part, parts, panels_in(t.d))
    # Next comes what this thread projects with in the next layer, which has the sizes of this one and stands behind it.
    behind = panel_at(w[DOWN], panels_in(t.d), t.width, forms[DOWN])
    count = panels_in(t.query_heads * t.dim) + 2 * panels_in(t.key_heads * t.dim)
    after = panel_at(behind, part * count // parts, t.d, forms[Q])
    panels_of(product_of(t, part, inner, t.width, DOWN, back, 0, t.d), first, last, after)
    if not t.settled:
        add(floats(t.x, (t.m, t.d)), back, first * COLUMNS, min(last * COLUMNS, t.d), floats(t.to_down, (t.d,)))


@fused
def settle(t, part, parts, which, bias):
    """Add the bias to `back`, norm it, and add it to the stream; a thread takes some of the nodes.

    t, part, parts: see the module.
    which: which norm of `norms_after`, 0 after attention, 1 after the MLP.
    bias: address of the bias, float32 [d].
    """
    first, last = share(part, parts, t.m)
    x, back = floats(t.x, (t.m, t.d))[first:last], floats(t.back, (t.m, t.d))[first:last]
    shift(back, 0, t.d, floats(bias, (t.d,)))
    norm(back, floats(t.norms_after, (2, t.d))[which], t.eps, back)
    increase(x, back)


@fused
def part_of(layer, step, part, parts):
    """Do thread `part`'s share of one step of a layer.

    layer: address of the layer's record.
    step: PROJECT .. SETTLE_NARROWED.
    part, parts: see the module.
    """
    t = records_at(layer, (1,))[0]
    if step == PROJECT:
        if part == 0 and t.kept != 0:  # nothing changes the layer's input before step 4
            put(floats(t.x, (t.m, t.d)), floats(t.kept, (t.m, t.d)), 0)
        project(t, part, parts)
    elif t.mixer != 0 and CACHE <= step <= LOOK:
        call_at(t.mixer, layer, step, part, parts)
    elif step == CACHE:
        cache(t, part, parts)
    elif step == LOOK:
        look(layer, part, parts)
    elif step == MIX:
        mix(t, part, parts)
    elif step == SETTLE_MIXED:
        settle(t, part, parts, 0, t.to_out)
    elif t.mlp != 0 and step <= NARROW:
        call_at(t.mlp, layer, step, part, parts)
    elif step == WIDEN:
        widen(t, part, parts)
    elif step == NARROW:
        narrow(t, part, parts)
    else:
        settle(t, part, parts, 1, t.to_down)


@functools.cache
def machine_code(name, loop):
    """Return a loop as machine code that `part_of` can jump to, a Linked; it is compiled where it is not on disk.

    name: a symbol that no other function has.
    loop: does a thread's share of a step of a layer; called with layer, step, part and parts as `part_of` is.
    """
    made = Linked(name, loop, 4, 0)
    if not made.load():
        made.compile()
    return made


# Linked by name, as tile.strip is: a forward is part of many compiled calls, and this would be compiled anew in each.
@linked("foretoken_layers", 6)
def layers_of(layers, count, gate, part, parts, work):
    """Do thread `part`'s share of all layers; all arguments are whole numbers.

    layers: address of the layers' records, each a LAYER.
    count: number of layers.
    gate: address of a gate, which all parts share; see together.py.
    part, parts: the thread's number, and the number of threads.
    work: multiplications of all parts, by which `meet` waits longer for late threads.
    """
    records, task, done = records_at(layers, (count,)), meet(gate, parts, work), 0
    for i in range(count * STEPS):
        layer, step, t = layers + i // STEPS * BYTES, i % STEPS, records[i // STEPS]
        if step in (SETTLE_MIXED, SETTLE_NARROWED) and not t.settled:
            continue
        if task == TOGETHER:
            part_of(layer, step, part, parts)
            done += 1
            wait(gate, parts, done)
        elif task == ALONE:
            for each in range(parts):
                part_of(layer, step, each, parts)


@functools.partial(compiled, fuse=True, parallel=True)
def layers_threads(layers, count, gate, parts, work):
    """Run all layers in `parts` threads; layers, count, gate, parts, work: as in `layers_of`."""
    for part in prange(parts):
        layers_of(layers, count, gate, part, parts, work)
