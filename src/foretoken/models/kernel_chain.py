"""Drafting a chain in one compiled call: forward, softmax and draw level after level, for one sequence."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.core.draws_fast import draw_loop
from foretoken.core.softmax_loop import softmax_loop
from foretoken.models.kernel import forward, head
from foretoken.models.tile import machine_code

softmax = machine_code(softmax_loop)
draw = machine_code(draw_loop)


def _draft_chain(
    token, row, slot, keys, values, none, kinds, low, cos, sin, sizes, eps, head_eps, scale, weights,
    embedding, last, u, factor, threads, q, tokens
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Draw tokens[l] from q[l] = softmax(factor logits) of the path so far, with its uniform u[l]; the levels done.

    token: the first one read, into `slot` of batch row `row`, which is its position too. none: no masks.
    weights: norms .. biases as `forward` takes them; last: final norm, address and halved of the head, its bias.
    Ends early where logits are not finite, or a draw met a token of no weight.
    """
    norms, head_norms, addresses, halves, biases = weights
    norm, head_address, head_halved, head_bias = last
    x = np.empty((1, embedding.shape[1]), np.float32)
    logits, draws = np.empty((1, q.shape[1]), np.float32), np.empty((1, 1), np.int64)
    slots, positions = np.empty((1, 1), np.int64), np.empty(1, np.int64)
    for level in range(len(tokens)):
        x[0] = embedding[token]
        slots[0, 0] = positions[0] = slot + level
        forward(
            x, positions, row, slots, keys, values, none, kinds, slot + level + 1, low, cos, sin, sizes, eps, head_eps,
            scale, norms, head_norms, addresses, halves, biases, threads,
        )  # fmt: skip
        head(x, norm, eps, head_address, head_halved, head_bias, logits, threads)
        if not softmax(logits, factor, q[level : level + 1]):
            return level
        draw(q[level : level + 1], u[level : level + 1], True, draws)
        token = draws[0, 0]
        if q[level, token] <= 0:
            return level
        tokens[level] = token
    return len(tokens)


draft_chain = machine_code(_draft_chain)
