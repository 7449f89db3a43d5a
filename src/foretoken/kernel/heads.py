"""The compiled calls of EAGLE, EAGLE-3 and Gumiho heads: what stands before and after their layers, a chain drafted in
one call for one sequence, as models.kernel_chain does, and Gumiho's MLPs."""

# pyright: reportCallIssue=false

from typing import NamedTuple

import numpy as np

from foretoken.kernel.compile import compiled
from foretoken.kernel.forward import forward, gate, norm, shift
from foretoken.kernel.fused import choose, embed
from foretoken.kernel.product import times


class Entry(NamedTuple):
    """What makes the first layer's input of a token's embedding and the state before it, both of width d.

    EAGLE, Gumiho: a linear layer from both, whose panels are at `address` in the form `form`, with its bias [d].
    EAGLE-3: norms [2, d] of the embedding and of the state; else there are none. normed_residual: the residual stream
    begins with the normed state.
    """

    address: int
    form: int
    bias: np.ndarray
    norms: np.ndarray
    eps: np.float32
    normed_residual: bool


class Exit(NamedTuple):
    """What makes scores of the states that the layers give.

    norm [d], of EAGLE-3, or of length 0; normed_output: the normed state is also what the next token takes. factor: of
    the states before an LM head, whose panels are at `address` in the form `form`, with its bias [v] or none.
    columns [v]: target ids of the head's own vocabulary, ascending, or none where it is the target's.
    """

    norm: np.ndarray
    eps: np.float32
    normed_output: bool
    factor: np.float32
    address: int
    form: int
    bias: np.ndarray
    columns: np.ndarray


def _enter(embedded, states, entry, x, threads):  # type: ignore[no-untyped-def]
    """x [n, d] becomes what enters the layers for tokens embedded as `embedded` [n, d] after `states` [n, d]. Returns
    what attention of the first layer reads: x itself, or [n, 2d]. entry: an Entry."""
    n, d = embedded.shape
    both = np.empty((n, 2 * d), np.float32)
    if len(entry.norms) > 0:
        own = np.empty((n, d), np.float32)
        norm(embedded, entry.norms[0], entry.eps, own)
        both[:, :d] = own
        norm(states, entry.norms[1], entry.eps, own)
        both[:, d:] = own
        x[:] = own if entry.normed_residual else states
        return both
    both[:, :d] = embedded
    both[:, d:] = states
    times(both, 2 * d, 2 * d, n, entry.address, entry.form, x, 0, d, d, threads)
    shift(x, 0, d, entry.bias)
    return x


enter = compiled(_enter, fuse=True)


def _leave(x, exit):  # type: ignore[no-untyped-def]
    """x [n, d], which the layers gave, becomes what the next tokens take. exit: an Exit."""
    if exit.normed_output:
        norm(x, exit.norm, exit.eps, x)


leave = compiled(_leave, fuse=True)


def _scores(states, exit, logits, threads):  # type: ignore[no-untyped-def]
    """logits [n, v] of the LM head on states [n, d] that `leave` gave. exit: an Exit."""
    (n, d), v = states.shape, logits.shape[1]
    x = states * exit.factor
    if len(exit.norm) > 0 and not exit.normed_output:
        norm(x, exit.norm, exit.eps, x)
    times(x, d, d, n, exit.address, exit.form, logits, 0, v, v, threads)
    shift(logits, 0, len(exit.bias), exit.bias)


scores = compiled(_scores, fuse=True)


def _parallel(both, mlps, out, threads):  # type: ignore[no-untyped-def]
    """out [n, j, d] = the states that MLP j makes of each of both [n, 2d], by the first MLPs.

    mlps: addresses, forms [mlps, blocks], and biases [mlps, blocks, 2d], each followed by ones.
    """
    addresses, forms, biases = mlps
    n, count, d = out.shape
    x, more = np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    y = np.zeros((n, 2 * d), np.float32)  # its right half stays 0: silu(left) is multiplied by 0 + 1
    for j in range(count):
        for block in range(addresses.shape[1]):
            w, form = addresses[j, block], forms[j, block]
            if block == 0:
                times(both, 2 * d, 2 * d, n, w, form, y, 0, 2 * d, d, threads)
                gate(y, d, biases[j, block], x)
            else:
                times(x, d, d, n, w, form, y, 0, 2 * d, d, threads)
                gate(y, d, biases[j, block], more)
                x += more
        out[:, j] = x


parallel = compiled(_parallel, fuse=True)


def _draft_head_chain(
    read, states, row, start, keys, values, masks, none, kinds, low, cos, sin, sizes, eps, head_eps, scale, weights,
    embedding, entry, exit, serial, mlps, u, factor, truncation, floor, threads, q, tokens, made
):  # type: ignore[no-untyped-def]  # fmt: skip
    """As `draft_chain`. states [len(read), d]: what the first forward takes beside its tokens; the next ones take the
    state made at the token before. Levels from `serial` on are those of `mlps`, on the states behind the first two.

    entry, exit: an Entry and an Exit. u [levels, 1], tokens [levels]; q [levels, target's vocabulary], zeros where the
    head has a vocabulary of its own; no rows with factor 0. made [nodes, d]: the states of the nodes that forwards
    were run on.
    """
    bare, norms, head_norms, addresses, forms, biases = weights
    d, levels, columns = embedding.shape[1], len(tokens), exit.columns
    own_q = q if len(columns) == 0 else np.empty((len(q), len(columns)), np.float32)
    width = own_q.shape[1]
    all_logits = np.empty((max(1, levels - serial), width), np.float32)  # one serial level, or all parallel ones
    logits = all_logits[:1]
    untempered = np.empty((1 if floor > 0 and factor == 0 else 0, width), np.float32)
    front = np.empty((1, 2 * d), np.float32)
    no_layers, nothing = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32)
    used, done, sure = start, 0, 1.0
    for level in range(levels):
        if level < serial:
            m = len(read)
            embedded, x = np.empty((m, d), np.float32), made[done : done + m]
            embed(embedding, read, embedded)
            fed = enter(embedded, states, entry, x, threads)
            positions = np.arange(used, used + m)
            used, done = used + m, done + m
            forward(
                x, fed, positions, row, positions.reshape(1, -1), keys, values, masks, kinds, used, low, cos, sin,
                sizes, eps, head_eps, scale, bare, norms, head_norms, addresses, forms, biases, no_layers, nothing,
                threads,
            )  # fmt: skip
            leave(x, exit)
            states = x[m - 1 :]
            if level < 2:
                front[0, level * d : (level + 1) * d] = states[0]
            scores(states, exit, logits, threads)
        elif level == serial:
            ahead = np.empty((1, levels - serial, d), np.float32)
            parallel(front, mlps, ahead, threads)
            scores(ahead[0], exit, all_logits, threads)
        else:
            logits = all_logits[level - serial : level - serial + 1]
        sure = choose(logits, factor, truncation, u[level, 0], level, sure, floor, untempered, own_q, tokens)
        if sure < 0:
            return 0
        if len(columns) > 0:
            tokens[level] = columns[tokens[level]]
            if factor > 0:
                for j in range(len(columns)):
                    q[level, columns[j]] = own_q[level, j]
        if sure < floor:
            return level + 1
        read, masks = tokens[level : level + 1], none
    return levels


draft_head_chain = compiled(_draft_head_chain, fuse=True)
