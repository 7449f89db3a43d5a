"""What EAGLE, EAGLE-3 and Gumiho heads compute before, after and beside their layers. Arrays are float32."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.kernel.compile import fused
from foretoken.kernel.model import Wanted, forward
from foretoken.kernel.pointwise import gate, increase, norm, put, shift
from foretoken.kernel.product import times


@fused
def enter(embedded, states, entry, x, threads):
    """Fill x with the first layer's input, and return what attention of the first layer reads: x itself, or [n, 2d].

    embedded: the embeddings of the tokens [n, d].
    states: those before the tokens [n, d]; a language model reads none.
    entry: an Entry; None in a language model.
    x: is filled [n, d].
    threads: the largest number of threads; None for one.
    """
    if entry is None:  # alone, so that numba leaves out what follows
        put(embedded, x, 0)
        return x
    n, d = embedded.shape
    both = np.empty((n, 2 * d), np.float32)
    if len(entry.norms) > 0:
        own = np.empty((n, d), np.float32)
        norm(embedded, entry.norms[0], entry.eps, own)
        put(own, both, 0)
        norm(states, entry.norms[1], entry.eps, own)
        put(own, both, d)
        put(own if entry.normed_residual else states, x, 0)
        return both
    put(embedded, both, 0)
    put(states, both, d)
    times(both, entry.address, entry.form, d, x, threads)
    shift(x, 0, d, entry.bias)
    return x


@fused
def step(model, embedded, states, nodes, x, threads):
    """Fill x with the states of nodes: logits are made of these, and a draft head reads them beside the next tokens.

    model, nodes: a Model and a Nodes.
    embedded, states, x, threads: as in `enter`.
    """
    fed = enter(embedded, states, model.entry, x, threads)
    nothing = Wanted(np.empty(0, np.int64), np.empty((0, 0, 0), np.float32))
    forward(x, fed, nodes, model.layers, nothing, threads)
    if model.head.normed_output:
        norm(x, model.head.norm, model.head.eps, x)


@fused
def parallel(mlps, model, embedded, states, out, threads):
    """Fill out with the states that Gumiho's MLPs make of the first two drafted tokens of n sequences.

    mlps: the model's Mlps; None in other models, for which nothing is done.
    model: a Model.
    threads: as in `enter`.
    embedded: the embeddings of both tokens, two neighbouring rows per sequence [2n, d].
    states: the states that these tokens were drawn from, in the same order [2n, d].
    out: is filled with the states of the first j MLPs [n, j, d].
    """
    if mlps is None:  # alone, so that numba leaves out what follows
        return
    n, count, d = out.shape
    joined = np.empty((2 * n, d), np.float32)
    enter(embedded, states, model.entry, joined, threads)
    both = joined.reshape(n, 2 * d)  # each token's side by side
    x, more = np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    y = np.zeros((n, 2 * d), np.float32)  # its right half stays 0: silu(left) is multiplied by 0 + 1
    for j in range(count):
        for block in range(mlps.addresses.shape[1]):
            times(both if block == 0 else x, mlps.addresses[j, block], mlps.forms[j, block], d, y, threads)
            gate(y, d, mlps.biases[j, block], x if block == 0 else more)
            if block > 0:
                increase(x, more)
        put(x, out[:, j], 0)
