"""Drafting a chain with an EAGLE or Gumiho head in one compiled call, for one sequence, as models.kernel_chain does;
and Gumiho's MLPs."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.models.kernel import forward, gate, shift
from foretoken.models.kernel_chain import choose
from foretoken.models.product import times
from foretoken.models.tile import machine_code


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


parallel = machine_code(_parallel)


def _scores(states, last, logits, threads):  # type: ignore[no-untyped-def]
    """logits [n, v] of the target's LM head on states [n, d]. last: its address, form, bias, the states' factor."""
    address, form, bias, scale = last
    (n, d), v = states.shape, logits.shape[1]
    times(states * scale, d, d, n, address, form, logits, 0, v, v, threads)
    shift(logits, 0, len(bias), bias)


scores = machine_code(_scores)


def _draft_head_chain(
    read, states, row, start, keys, values, masks, none, kinds, low, cos, sin, sizes, eps, head_eps, scale, weights,
    embedding, fc, serial, mlps, last, u, factor, floor, threads, q, tokens, made
):  # type: ignore[no-untyped-def]  # fmt: skip
    """As `draft_chain`. states [len(read), d]: what the first forward takes beside its tokens; the next ones take the
    state made at the token before. Levels from `serial` on are those of `mlps`, on the states behind the first two.

    fc: address, form, bias. last: as `scores` takes it. made: the states of the nodes that forwards were run on.
    """
    bare, norms, head_norms, addresses, forms, biases = weights
    fc_address, fc_form, fc_bias = fc
    d, levels = embedding.shape[1], len(tokens)
    all_logits = np.empty((max(1, levels - serial), q.shape[1]), np.float32)  # one serial level, or all parallel ones
    logits = all_logits[:1]
    untempered = np.empty((1 if floor > 0 and factor == 0 else 0, q.shape[1]), np.float32)
    front = np.empty((1, 2 * d), np.float32)
    used, done, sure = start, 0, 1.0
    for level in range(levels):
        if level < serial:
            m = len(read)
            both, x = np.empty((m, 2 * d), np.float32), made[done : done + m]
            for i in range(m):
                both[i, :d] = embedding[read[i]]
                both[i, d:] = states[i]
            times(both, 2 * d, 2 * d, m, fc_address, fc_form, x, 0, d, d, threads)
            shift(x, 0, d, fc_bias)
            positions = np.arange(used, used + m)
            used, done = used + m, done + m
            forward(
                x, positions, row, positions.reshape(1, -1), keys, values, masks, kinds, used, low, cos, sin, sizes,
                eps, head_eps, scale, bare, norms, head_norms, addresses, forms, biases, threads,
            )  # fmt: skip
            states = x[m - 1 :]
            if level < 2:
                front[0, level * d : (level + 1) * d] = states[0]
            scores(states, last, logits, threads)
        elif level == serial:
            ahead = np.empty((1, levels - serial, d), np.float32)
            parallel(front, mlps, ahead, threads)
            scores(ahead[0], last, all_logits, threads)
        else:
            logits = all_logits[level - serial : level - serial + 1]
        sure = choose(logits, factor, u[level, 0], level, sure, floor, untempered, q, tokens)
        if sure < 0:
            return 0
        if sure < floor:
            return level + 1
        read, masks = tokens[level : level + 1], none
    return levels


draft_head_chain = machine_code(_draft_head_chain)
