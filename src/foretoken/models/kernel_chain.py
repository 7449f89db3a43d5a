"""Drafting a chain in one compiled call: forward, softmax and draw level after level, for one sequence."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.core.draw_loops import pick
from foretoken.core.softmax_loop import softmax_loop
from foretoken.models.kernel import forward, head
from foretoken.models.tile import machine_code

softmax = machine_code(softmax_loop)


def _choose(logits, factor, u, level, sure, floor, untempered, q, tokens):  # type: ignore[no-untyped-def]
    """`sure` times the probability of the token chosen, tokens[level]; -1 where logits are not finite.

    It is drawn by u from q[level], which becomes softmax(factor logits); with factor 0 it is the likeliest, of
    softmax(logits), which is only computed if there is a floor.
    """
    if factor > 0:
        if not softmax(logits, factor, q[level : level + 1]):
            return -1.0
        tokens[level] = pick(q[level], u)
        return sure * q[level, tokens[level]]
    tokens[level] = np.argmax(logits)  # of NaN, if there is one
    if not np.isfinite(logits[0, tokens[level]]):
        return -1.0
    if floor > 0:
        softmax(logits, np.float32(1), untempered)
        return sure * untempered[0, tokens[level]]
    return sure


choose = machine_code(_choose)


def _draft_chain(
    read, row, start, keys, values, masks, none, kinds, low, cos, sin, sizes, eps, head_eps, scale, weights,
    embedding, last, u, factor, floor, threads, q, tokens
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Draw tokens[l] from q[l] = softmax(factor logits) of the path so far, with its uniform u[l]; the levels done.
    With factor 0 take the likeliest; q then has no rows. It ends where the product of q down to a token (of
    softmax(logits) with factor 0) is below `floor`, if there is one. 0 levels where logits are not finite.

    read: the tokens before them, into the slots from `start` on of batch row `row`, which are their positions too.
    masks: of the first forward; none: of the others.
    weights: bare .. biases as `forward` takes them; last: final norm, address and form of the head, its bias.
    """
    bare, norms, head_norms, addresses, forms, biases = weights
    norm, head_address, head_form, head_bias = last
    logits = np.empty((1, q.shape[1]), np.float32)
    untempered = np.empty((1 if floor > 0 and factor == 0 else 0, logits.shape[1]), np.float32)
    used, sure = start, 1.0
    for level in range(len(tokens)):
        x = np.empty((len(read), embedding.shape[1]), np.float32)
        positions = np.arange(used, used + len(read))
        for i in range(len(read)):
            x[i] = embedding[read[i]]
        used += len(read)
        forward(
            x, positions, row, positions.reshape(1, -1), keys, values, masks, kinds, used, low, cos, sin, sizes, eps,
            head_eps, scale, bare, norms, head_norms, addresses, forms, biases, threads,
        )  # fmt: skip
        head(x[len(x) - 1 :], norm, eps, head_address, head_form, head_bias, logits, threads)
        sure = choose(logits, factor, u[level, 0], level, sure, floor, untempered, q, tokens)
        if sure < 0:
            return 0
        if sure < floor:
            return level + 1
        read, masks = tokens[level : level + 1], none
    return len(tokens)


draft_chain = machine_code(_draft_chain)
