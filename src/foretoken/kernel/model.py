"""A model or draft head: its weights as the kernel reads them, and its forward as one compiled function."""

# pyright: reportCallIssue=false

from typing import NamedTuple

import numpy as np

from foretoken.kernel import layer as steps
from foretoken.kernel.addresses import alive
from foretoken.kernel.compile import fused
from foretoken.kernel.dots import unpack_row
from foretoken.kernel.pointwise import norm, shift
from foretoken.kernel.product import times
from foretoken.kernel.screen import screened
from foretoken.kernel.sizes import ALL
from foretoken.kernel.softmax import softmax
from foretoken.kernel.together import GATE

SPREAD = 1_600_000  # multiplications of a layer from which its steps are spread over the threads


class Layers(NamedTuple):
    """The weights of all layers, L of them, with states of width d.

    query_heads, key_heads, dim: heads, and the width of one.
    width, wide: channels of the MLP, and the same in whole vectors of 16.
    paired: how keys and values are stored, see attention.py.
    eps, head_eps: of the norms of states and of heads.
    scale: factor of the queries.
    low: stands for minus infinity in masks.
    curve: of the MLP's activation, sizes.SILU or sizes.GELU.
    bare: layers whose attention reads another input than the states, without a norm [L].
    norms: before attention and before the MLP [L, 2, d].
    norms_after: of what attention and the MLP give, before it is added to the stream [L, 2, d], or none [L, 0, d].
    head_norms: of queries and of keys [L, 2, dim], or none [L, 0, dim].
    kinds: whose angles a layer turns by, a place in those of the Cache [L].
    weights, forms: of q, k, v, out, gate, up, down: the addresses of their panels and their forms [L, 7].
    to_qkv, to_out, to_gate, to_down: biases [L, q | k | v], [L, d], [L, gate | up, each `wide`], [L, d].
    """

    query_heads: int
    key_heads: int
    dim: int
    width: int
    wide: int
    paired: bool
    eps: np.float32
    head_eps: np.float32
    scale: np.float32
    low: np.float32
    curve: tuple[np.float32, np.float32]
    bare: np.ndarray
    norms: np.ndarray
    norms_after: np.ndarray
    head_norms: np.ndarray
    kinds: np.ndarray
    weights: np.ndarray
    forms: np.ndarray
    to_qkv: np.ndarray
    to_out: np.ndarray
    to_gate: np.ndarray
    to_down: np.ndarray


class Cache(NamedTuple):
    """Keys and values of all layers and sequences, and the angles of their positions.

    keys [L, batch, key_heads, panels, words, 64], values [L, batch, key_heads, words, dim]: see attention.py.
    cos, sin: of every position, by kind of layer [kinds, slots, dim].
    """

    keys: np.ndarray
    values: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class Entry(NamedTuple):
    """What makes the first layer's input of a token's embedding and, in a draft head, of the state before it.

    A language model has neither norms nor a linear layer: the embedding itself enters.
    EAGLE, Gumiho: a linear layer from both, whose panels are at `address` in the form `form`, with its bias [d].
    EAGLE-3: norms of the embedding and of the state [2, d]; else there are none [0, d].
    normed_residual: whether the residual stream begins with the normed state.
    """

    address: int
    form: int
    bias: np.ndarray
    norms: np.ndarray
    eps: np.float32
    normed_residual: bool


class Head(NamedTuple):
    """What makes logits of the states that the layers give.

    norm: before the LM head [d], or none [0].
    normed_output: whether the normed state is also what the next token takes, as in EAGLE-3.
    factor: of the states before the LM head.
    address, form: of the LM head's panels; address 0 where the kernel cannot compute them.
    screen: address of the same matrix in 4 bits, by which most logits are computed (screen.py); 0 where there is none.
    bias: of the LM head [v], or none [0].
    columns: target ids of the head's own vocabulary, ascending [v], or none [0] where it is the target's.
    """

    norm: np.ndarray
    eps: np.float32
    normed_output: bool
    factor: np.float32
    address: int
    form: int
    screen: int
    bias: np.ndarray
    columns: np.ndarray


class Mlps(NamedTuple):
    """Gumiho's MLPs, none for all others, each of so many blocks: linear layers from 2d or d numbers to d.

    addresses, forms: of their panels [mlps, blocks].
    biases: each followed by ones [mlps, blocks, 2d].
    """

    addresses: np.ndarray
    forms: np.ndarray
    biases: np.ndarray


class Table(NamedTuple):
    """The embeddings of all tokens, of so many numbers each.

    rows: in float32, or the bits of bfloat16 in uint16 [vocabulary, width]; or blocks of a GGUF file in uint8
        [vocabulary, bytes of a row], in the form `form`.
    factor: what they are multiplied by.
    """

    rows: np.ndarray
    form: int
    width: int
    factor: np.float32


class Model(NamedTuple):
    """All of a language model or a draft head over the slots of a batch.

    serial: levels of a chain that take a forward each, before those of the MLPs.
    """

    layers: Layers
    cache: Cache
    embedding: Table
    entry: Entry
    head: Head
    serial: int
    mlps: Mlps


class Nodes(NamedTuple):
    """What one forward computes: n nodes of each of `batch` neighbouring sequences, one sequence after the other.

    positions: of each node [batch * n].
    slots: where its keys and values go [batch, n].
    first: the first of the sequences.
    used: slots that are read.
    masks: of every kind of layer, 0 or `low` [batch, 1, n, used]; no columns where all is seen.
    kinds: each layer's mask, by its place in `masks` [L].
    """

    positions: np.ndarray
    slots: np.ndarray
    first: int
    used: int
    masks: tuple[np.ndarray, ...]
    kinds: np.ndarray


class Wanted(NamedTuple):
    """The states that a caller keeps.

    layers: those whose input is wanted, L for what the LM head reads [f].
    states: is filled [f, batch * n, d].
    """

    layers: np.ndarray
    states: np.ndarray


@fused
def forward(x, fed, nodes, cache, layers, wanted, threads):
    """Run x through every layer, in place.

    x: the states of the nodes [batch * n, d].
    fed: what attention reads in a bare layer, x itself or an array of another width [batch * n, w].
    nodes, cache, layers, wanted: Nodes, Cache, Layers, Wanted; what the LM head reads is not filled in.
    threads: at most; None for one.
    """
    (m, d), k = x.shape, layers
    heads, of_q, parts = k.query_heads + 2 * k.key_heads, k.query_heads * k.dim, 1
    of_layer = m * d * (heads * k.dim + of_q + 3 * k.width)
    if threads is not None and of_layer > SPREAD:
        parts = threads
    room = m * (max(d, fed.shape[1], of_q, k.width) + 2)
    own, bits = np.empty((parts, m, d), np.float32), np.empty((parts, room), np.float32)
    qkv, mixed, back = np.empty((m, heads * k.dim), np.float32), np.empty((m, of_q), np.float32), np.empty_like(x)
    gated, inner = np.zeros((m, 2 * k.wide), np.float32), np.empty((m, k.wide), np.float32)
    table, gate = np.zeros(len(k.weights), steps.LAYER), np.zeros(GATE, np.int64)
    for layer in range(len(k.weights)):
        t = table[layer]
        t.m, t.d, t.batch, t.used = m, d, nodes.slots.shape[0], nodes.used
        t.query_heads, t.key_heads, t.dim, t.width, t.wide = k.query_heads, k.key_heads, k.dim, k.width, k.wide
        t.paired, t.normed_heads, t.fed_width, t.room = k.paired, k.head_norms.shape[1] > 0, fed.shape[1], room
        t.eps, t.head_eps, t.scale, t.low, (t.linear, t.cubic) = k.eps, k.head_eps, k.scale, k.low, k.curve
        t.panels, t.positions_known = cache.keys.shape[3], cache.cos.shape[1]
        t.x, t.fed, t.own, t.bits = x.ctypes.data, fed.ctypes.data, own.ctypes.data, bits.ctypes.data
        t.qkv, t.mixed, t.back = qkv.ctypes.data, mixed.ctypes.data, back.ctypes.data
        t.gated, t.inner = gated.ctypes.data, inner.ctypes.data
        t.positions, t.slots = nodes.positions.ctypes.data, nodes.slots.ctypes.data
        t.cos, t.sin = cache.cos[k.kinds[layer]].ctypes.data, cache.sin[k.kinds[layer]].ctypes.data
        for i in range(len(wanted.layers)):
            if wanted.layers[i] == layer:
                t.kept = wanted.states[i].ctypes.data
        mask = nodes.masks[nodes.kinds[layer]]
        t.bare, t.seen, t.mask = k.bare[layer], mask.shape[3], mask.ctypes.data
        t.weights, t.forms = k.weights[layer].ctypes.data, k.forms[layer].ctypes.data
        t.norms, t.settled = k.norms[layer].ctypes.data, k.norms_after.shape[1] > 0
        t.norms_after, t.head_norms = k.norms_after[layer].ctypes.data, k.head_norms[layer].ctypes.data
        t.to_qkv, t.to_out = k.to_qkv[layer].ctypes.data, k.to_out[layer].ctypes.data
        t.to_gate, t.to_down = k.to_gate[layer].ctypes.data, k.to_down[layer].ctypes.data
        t.keys = cache.keys[layer, nodes.first].ctypes.data
        t.values = cache.values[layer, nodes.first].ctypes.data
    if parts == 1:
        steps.layers_of(table.ctypes.data, len(table), gate.ctypes.data, 0, 1, 0)
    if threads is not None and parts > 1:  # None first, so that numba leaves out what is for more threads
        steps.layers_threads(table.ctypes.data, len(table), gate.ctypes.data, parts, of_layer * len(table))
    alive((fed, own, bits, qkv, mixed, back, gated, inner, table, gate))


@fused
def embed(table, tokens, x):
    """x [n, width] float32 becomes the embeddings of the tokens [n], by a Table."""
    rows, bits = table.rows, x.view(np.uint32)
    for i in range(len(tokens)):
        if rows.itemsize == 1:
            unpack_row(rows.ctypes.data + tokens[i] * rows.shape[1], rows.shape[1], table.form, x[i].ctypes.data)
        elif rows.itemsize == 2:
            for j in range(x.shape[1]):
                bits[i, j] = np.uint32(rows[tokens[i], j]) << np.uint32(16)
        else:
            for j in range(x.shape[1]):
                x[i, j] = rows[tokens[i], j]
        for j in range(x.shape[1]):
            x[i, j] *= table.factor


@fused
def scores(states, head, logits, threads):
    """Fill logits [n, v] by a Head from the states [n, d] that the layers gave, or that `leave` made of them."""
    x = states * head.factor
    if len(head.norm) > 0 and not head.normed_output:
        norm(x, head.norm, head.eps, x)
    if head.screen != 0:
        screened(x, head, logits, threads)
    else:
        times(x, head.address, head.form, logits.shape[1], logits, threads)
    shift(logits, 0, len(head.bias), head.bias)


@fused
def score(model, tokens, nodes, factor, wanted, out, threads):
    """Fill out [batch * n, v] with the logits after each node, or with softmax(factor logits) if factor > 0.

    model: a Model that is a language model.
    tokens: of the nodes [batch * n].
    nodes, wanted: Nodes, Wanted.
    out: [0, v] where only keys and values are wanted.
    threads: at most; None for one.

    Returns False where probabilities are not finite; logits are not looked at.
    """
    x = np.empty((len(tokens), model.embedding.width), np.float32)
    embed(model.embedding, tokens, x)
    forward(x, x, nodes, model.cache, model.layers, wanted, threads)
    for i in range(len(wanted.layers)):
        if wanted.layers[i] == len(model.layers.weights):
            norm(x, model.head.norm, model.head.eps, wanted.states[i])
    if len(out) > 0:
        scores(x, model.head, out, threads)
    return factor == 0 or softmax(out, factor, ALL, out)
