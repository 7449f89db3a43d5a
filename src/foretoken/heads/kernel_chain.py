"""Drafting a chain with an EAGLE head in one compiled call, for one sequence; as models.kernel_chain does."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.models.kernel import forward, shift
from foretoken.models.kernel_chain import choose
from foretoken.models.tile import machine_code, times


def _draft_eagle_chain(
    read, states, row, start, keys, values, masks, none, kinds, low, cos, sin, sizes, eps, head_eps, scale, weights,
    embedding, fc, last, u, factor, floor, threads, q, tokens, made
):  # type: ignore[no-untyped-def]  # fmt: skip
    """As `draft_chain`. states [len(read), d]: what the first forward takes beside its tokens; the next ones take the
    state made at the token before. made [len(read) + len(tokens) - 1, d]: the states of all nodes read.

    fc: address, halved, bias. last: address, halved and bias of the target's LM head, and what states are scaled by.
    """
    bare, norms, head_norms, addresses, halves, biases = weights
    fc_address, fc_halved, fc_bias = fc
    head_address, head_halved, head_bias, feature_scale = last
    d = embedding.shape[1]
    logits = np.empty((1, q.shape[1]), np.float32)
    untempered = np.empty((1 if floor > 0 and factor == 0 else 0, logits.shape[1]), np.float32)
    used, done, sure = start, 0, 1.0
    for level in range(len(tokens)):
        m = len(read)
        both = np.empty((m, 2 * d), np.float32)
        for i in range(m):
            both[i, :d] = embedding[read[i]]
            both[i, d:] = states[i]
        x = np.empty((m, d), np.float32)
        times(both, 2 * d, 2 * d, m, fc_address, fc_halved, x, 0, d, d, threads)
        shift(x, fc_bias)
        positions = np.arange(used, used + m)
        used += m
        forward(
            x, positions, row, positions.reshape(1, -1), keys, values, masks, kinds, used, low, cos, sin, sizes, eps,
            head_eps, scale, bare, norms, head_norms, addresses, halves, biases, threads,
        )  # fmt: skip
        made[done : done + m] = x
        done += m
        states = x[m - 1 :]
        times(states * feature_scale, d, d, 1, head_address, head_halved, logits, 0, logits.shape[1], logits.shape[1], threads)  # fmt: skip  # noqa: E501
        shift(logits, head_bias)
        token, probability = choose(logits, factor, u[level, 0], level, floor, untempered, q)
        if token < 0:
            return 0
        tokens[level] = token
        if floor > 0:
            sure *= probability
            if sure < floor:
                return level + 1
        read, masks = tokens[level : level + 1], none
    return len(tokens)


draft_eagle_chain = machine_code(_draft_eagle_chain)
