"""A model or draft head: its weights as the kernel reads them, and its forward as one compiled function."""

# pyright: reportCallIssue=false

from typing import NamedTuple

import numpy as np

from foretoken.kernel import layer as steps
from foretoken.kernel.addresses import alive, arrays_of, bits_of, floats
from foretoken.kernel.compile import fused
from foretoken.kernel.dots import unpack_row
from foretoken.kernel.pointwise import norm, shift
from foretoken.kernel.product import times
from foretoken.kernel.screen import screened
from foretoken.kernel.sizes import COLUMNS, HALVED, WHOLE
from foretoken.kernel.softmax import softmax
from foretoken.kernel.together import GATE

halves_at = arrays_of(np.uint16)
SPREAD = 1_600_000  # a layer with more multiplications than this is computed in several threads


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

    rows: the bytes of all rows, of one type so that loops are compiled once for all forms, uint8 [vocabulary, bytes per
        row].
    form: WHOLE where they are float32 numbers, HALVED where they are bfloat16 ones; else they are blocks of a GGUF file
        of this form, see quantised.py.
    width: the numbers of an embedding.
    factor: by which embeddings are multiplied.
    """

    rows: np.ndarray
    form: int
    width: int
    factor: np.float32


class Model(NamedTuple):
    """A language model or a draft head, with the cache of a batch.

    It has addresses of weights and cache: whoever holds it must hold the KernelSlots that made it.

    layers: records of the layers and of their part of the cache, see layer.py [L] LAYER.
    embedding, head: see their classes.
    entry: None in a language model, whose first layer reads the embedding itself.
    serial: number of levels of a drafted chain for which a forward of the layers makes states; later ones use the MLPs.
    mlps: None where there are none.
    """

    layers: np.ndarray
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
    """

    positions: np.ndarray
    slots: np.ndarray
    first: int
    used: int
    masks: tuple[np.ndarray, ...]


class Wanted(NamedTuple):
    """The states that a caller keeps, f of each node.

    layers: those layers whose input is wanted; L stands for what the LM head reads [f] int64.
    states: is filled [f, batch * n, d].
    """

    layers: np.ndarray
    states: np.ndarray


@fused
def forward(x, fed, nodes, layers, wanted, threads):
    """Run the states of some nodes through all layers, in place.

    x: the states of the nodes [batch * n, d].
    fed: what attention reads in a bare layer, x itself or an array of another width [batch * n, w].
    nodes: a Nodes.
    layers: a Model's.
    wanted: a Wanted, which is filled but for what the LM head reads.
    threads: the largest number of threads; None for one.
    """
    (m, d), table, parts = x.shape, layers.copy(), 1
    of_qkv, of_q, wide, widest, routes = 0, 0, 0, 0, 0
    for layer in range(len(table)):  # those with experts, with a convolution and with neither have other widths
        t = table[layer]
        of_q, of_qkv = max(of_q, t.query_heads * t.dim), max(of_qkv, (t.query_heads + 2 * t.key_heads) * t.dim)
        wide, widest = max(wide, t.wide), max(widest, t.picks * t.wide)
        routes = max(routes, t.experts + 2 * m * t.picks)
    of_layer = m * d * (of_qkv + of_q + 3 * widest)
    if threads is not None and of_layer > SPREAD:
        parts = threads
    room = m * (max(d, fed.shape[1], of_q, wide) + 2)
    own, bits = np.empty((parts, m, d), np.float32), np.empty((parts, room), np.float32)
    qkv, mixed = np.empty((m, of_qkv), np.float32), np.empty((m, of_q), np.float32)
    gated, inner = np.empty((m, 2 * wide), np.float32), np.empty((m, widest), np.float32)
    back, gate = np.empty((m, d), np.float32), np.empty(GATE, np.int64)
    chosen = np.empty((parts, routes), np.int64)
    gated[:], gate[:] = 0, 0  # `np.zeros` would be two more functions to compile
    for layer in range(len(table)):
        t = table[layer]
        t.m, t.d, t.batch, t.used = m, d, nodes.slots.shape[0], nodes.used
        t.fed_width, t.room = fed.shape[1], room
        t.x, t.fed, t.own, t.bits = x.ctypes.data, fed.ctypes.data, own.ctypes.data, bits.ctypes.data
        t.qkv, t.mixed, t.back = qkv.ctypes.data, mixed.ctypes.data, back.ctypes.data
        t.gated, t.inner, t.routes = gated.ctypes.data, inner.ctypes.data, chosen.ctypes.data
        t.positions, t.slots = nodes.positions.ctypes.data, nodes.slots.ctypes.data
        of_sequence = 4 * t.key_heads * t.panels * COLUMNS * t.dim // (2 if t.paired else 1)  # bytes of its values
        t.keys, t.values = t.keys + nodes.first * of_sequence, t.values + nodes.first * of_sequence
        mask = nodes.masks[t.kind if len(nodes.masks) > 1 else 0]
        t.seen, t.mask = mask.shape[3], mask.ctypes.data
        for i in range(len(wanted.layers)):
            if wanted.layers[i] == layer:
                t.kept = wanted.states[i].ctypes.data
    if parts == 1:
        steps.layers_of(table.ctypes.data, len(table), gate.ctypes.data, 0, 1, 0)
    if threads is not None and parts > 1:  # None first, so that numba leaves out what is for more threads
        steps.layers_threads(table.ctypes.data, len(table), gate.ctypes.data, parts, of_layer * len(table))
    alive((fed, own, bits, qkv, mixed, back, gated, inner, chosen, table, gate))


@fused
def embed(table, tokens, x):
    """Fill x with the embeddings of tokens.

    table: a Table.
    tokens: token ids [n] int64, each with a row in the table: this is not checked.
    x: float32 [n, width].
    """
    words, width, row_bytes = bits_of(x), x.shape[1], table.rows.shape[1]
    for i in range(len(tokens)):
        at = table.rows.ctypes.data + tokens[i] * row_bytes
        if table.form == WHOLE:
            numbers = floats(at, (width,))
            for j in range(width):
                x[i, j] = numbers[j]
        elif table.form == HALVED:
            halves = halves_at(at, (width,))
            for j in range(width):
                words[i, j] = np.uint32(halves[j]) << np.uint32(16)
        else:
            unpack_row(at, row_bytes, table.form, x[i].ctypes.data)
        for j in range(width):
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
    nodes: its Nodes.
    tokens: ids of the nodes' tokens [batch * n] int64.
    factor: 1 / temperature, or 0 for logits, in float32.
    wanted: a Wanted, which is filled.
    out: is filled [batch * n, v]; [0, v] where only keys and values are wanted.
    threads: the largest number of threads; None for one.

    Returns False where probabilities are wanted and a row of logits has NaN, +inf or nothing finite.
    """
    x = np.empty((len(tokens), model.embedding.width), np.float32)
    embed(model.embedding, tokens, x)
    forward(x, x, nodes, model.layers, wanted, threads)
    for i in range(len(wanted.layers)):
        if wanted.layers[i] == len(model.layers):
            norm(x, model.head.norm, model.head.eps, wanted.states[i])
    if len(out) > 0:
        scores(x, model.head, out, threads)
    return factor == 0 or softmax(out, factor, out)
