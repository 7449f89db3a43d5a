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

SPREAD = 1_600_000  # a layer with more multiplications than this is computed in several threads


class Layers(NamedTuple):
    """The weights of all layers, L of them, with states of width d. Arrays are float32 unless said otherwise.

    query_heads, key_heads: their numbers in a layer.
    dim: the width of a head.
    width, wide: the channels of the MLP, and their number rounded up to whole vectors of 16.
    paired: whether the cache stores keys and values in bfloat16, see attention.py.
    eps, head_eps: what the norms of states, and those of heads, add to the mean square.
    scale: the factor of the queries.
    low: the finite number that stands for minus infinity in masks.
    curve: the MLP's activation, sizes.SILU or sizes.GELU.
    bare: whether a layer's attention reads another input than the normed states, without a norm [L] bool.
    norms: weights of the norms before attention and before the MLP [L, 2, d].
    norms_after: weights of the norms of what attention and the MLP give, before it is added to the stream [L, 2, d];
        [L, 0, d] where there are none.
    head_norms: weights of the norms of queries and of keys [L, 2, dim]; [L, 0, dim] where there are none.
    kinds: each layer's kind, which is its index in `cos` and `sin` of the Cache [L] int64.
    weights, forms: the addresses of the panels of q, k, v, out, gate, up, down, and their forms [L, 7] int64.
    to_qkv: biases of queries, keys and values [L, (query_heads + 2 key_heads) dim].
    to_out, to_down: biases of the output and of the down matrix [L, d].
    to_gate: biases of gate and of up, each filled up with zeros to `wide` [L, 2 wide].
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
    """Keys and values of all layers and sequences, and the angles of their positions; all float32.

    keys: [L, batch, key_heads, panels, dim or dim / 2, 64], see attention.py.
    values: [L, batch, key_heads, slots or slots / 2, dim], see attention.py.
    cos, sin: cosines and sines of every position, by kind of layer [kinds, positions, dim].
    """

    keys: np.ndarray
    values: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class Entry(NamedTuple):
    """What makes a draft head's first input of a token's embedding and of the state before the token.

    In EAGLE and Gumiho a linear layer maps both to d numbers. In EAGLE-3 attention reads both, normed, side by side.

    address, form: of the linear layer's panels; address 0 where there is none.
    bias: of the linear layer [d]; read only where there is one.
    norms: weights of the norms of the embedding and of the state [2, d]; [0, d] where there are none.
    eps: what these norms add to the mean square.
    normed_residual: whether the residual stream begins with the normed state, else with the state itself.
    """

    address: int
    form: int
    bias: np.ndarray
    norms: np.ndarray
    eps: np.float32
    normed_residual: bool


class Head(NamedTuple):
    """What makes logits of the states that the layers give, with v logits per state.

    norm: weight of the norm before the LM head [d]; [0] where there is none.
    eps: what this norm adds to the mean square.
    normed_output: whether the next token of a draft head takes the normed state, as in EAGLE-3, else the state itself.
    factor: by which states are multiplied before the norm.
    address, form: of the LM head's panels; address 0 where the kernel cannot compute the logits.
    screen: address of the same matrix in 4 bits, by which most logits are computed (screen.py); 0 where there is none.
    bias: of the LM head [v]; [0] where there is none.
    columns: the head's own vocabulary, as ids of the target, ascending [v] int64; [0] where it is the target's.
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
    """Gumiho's MLPs. A block of an MLP is a linear layer from 2d or d numbers to d.

    addresses, forms: of the blocks' panels [mlps, blocks] int64.
    biases: each block's bias, and behind it d ones [mlps, blocks, 2d].
    """

    addresses: np.ndarray
    forms: np.ndarray
    biases: np.ndarray


class Table(NamedTuple):
    """The embeddings of all tokens.

    rows: one of three: float32 [vocabulary, width], the bits of bfloat16 in uint16 [vocabulary, width], or blocks of a
        GGUF file in uint8 [vocabulary, bytes per row].
    form: the form of the blocks, see quantised.py; read only where rows are uint8.
    width: the numbers of an embedding.
    factor: by which embeddings are multiplied.
    """

    rows: np.ndarray
    form: int
    width: int
    factor: np.float32


class Model(NamedTuple):
    """A language model or a draft head, with the cache of a batch.

    layers, cache, embedding, head: see their classes.
    entry: None in a language model, whose first layer reads the embedding itself.
    serial: number of levels of a drafted chain for which a forward of the layers makes states; later ones use the MLPs.
    mlps: None where there are none.
    """

    layers: Layers
    cache: Cache
    embedding: Table
    entry: Entry | None
    head: Head
    serial: int
    mlps: Mlps | None


class Nodes(NamedTuple):
    """What one forward computes: n nodes of each of `batch` neighbouring sequences, one sequence after the other.

    positions: of each node [batch * n] int64.
    slots: the slot of each node's key and value [batch, n] int64.
    first: the first of the sequences, by its place in the cache.
    used: number of slots that are read, from slot 0 on. A node whose slot is `used` or larger is padding.
    masks: what is added to attention's scores, 0 or `low`, for each kind of layer [batch, 1, n, used], or once for all
        kinds; [batch, 1, n, 0] where every node sees all slots.
    kinds: each layer's mask, by its place in `masks` [L] int64.
    """

    positions: np.ndarray
    slots: np.ndarray
    first: int
    used: int
    masks: tuple[np.ndarray, ...]
    kinds: np.ndarray


class Wanted(NamedTuple):
    """The states that a caller keeps, f of each node.

    layers: those layers whose input is wanted; L stands for what the LM head reads [f] int64.
    states: is filled [f, batch * n, d].
    """

    layers: np.ndarray
    states: np.ndarray


@fused
def forward(x, fed, nodes, cache, layers, wanted, threads):
    """Run the states of some nodes through all layers, in place.

    x: the states of the nodes [batch * n, d].
    fed: what attention reads in a bare layer, x itself or an array of another width [batch * n, w].
    nodes, cache, layers: Nodes, Cache, Layers.
    wanted: a Wanted, which is filled but for what the LM head reads.
    threads: the largest number of threads; None for one.
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
    """Fill x with the embeddings of tokens.

    table: a Table.
    tokens: token ids [n] int64, each with a row in the table: this is not checked.
    x: float32 [n, width].
    """
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
    """Fill logits from states by the LM head.

    states: what the layers gave, or what `heads.step` made of it [n, d].
    head: a Head whose address is not 0.
    logits: is filled [n, v].
    threads: the largest number of threads; None for one.
    """
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
    """Fill out with the logits after each node, or with softmax(factor logits) if factor > 0.

    model: a Model that is a language model.
    tokens: ids of the nodes' tokens [batch * n] int64.
    nodes: Nodes.
    factor: 1 / temperature, or 0 for logits, in float32.
    wanted: a Wanted, which is filled.
    out: is filled [batch * n, v]; [0, v] where only keys and values are wanted.
    threads: the largest number of threads; None for one.

    Returns False where probabilities are wanted and a row of logits has NaN, +inf or nothing finite.
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
