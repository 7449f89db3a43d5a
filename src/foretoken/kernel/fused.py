"""One sequence in one compiled call: a chain drafted, forward, softmax and draw level after level; or a tree scored."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import pick
from foretoken.kernel.forward import forward, head
from foretoken.kernel.sizes import ALL
from foretoken.kernel.softmax import softmax


def _choose(logits, factor, truncation, u, level, sure, floor, untempered, q, tokens):  # type: ignore[no-untyped-def]
    """`sure` times the probability of the token chosen, tokens[level]; -1 where logits [1, v] are not finite.

    It is drawn by u from q[level], which becomes softmax(factor logits) over the tokens that are kept; with factor 0 it
    is the likeliest, of softmax(logits), which is only computed if there is a floor. truncation: top_k, top_p and
    min_p, which keep all where they are 0, 1 and 0. q [levels, v], tokens [levels].
    """
    if factor > 0:
        if not softmax(logits, factor, truncation, q[level : level + 1]):
            return -1.0
        tokens[level] = pick(q[level], u)
        return sure * q[level, tokens[level]]
    tokens[level] = np.argmax(logits)  # of NaN, if there is one
    if not np.isfinite(logits[0, tokens[level]]):
        return -1.0
    if floor > 0:
        softmax(logits, np.float32(1), ALL, untempered)
        return sure * untempered[0, tokens[level]]
    return sure


choose = compiled(_choose, fuse=True)


def _embed(table, tokens, x):  # type: ignore[no-untyped-def]
    """x [n, d] float32 becomes the rows `tokens` [n] of a table [vocabulary, d], in float32 or bfloat16's bits."""
    bits = x.view(np.uint32)
    for i in range(len(tokens)):
        if table.itemsize == 2:
            for j in range(x.shape[1]):
                bits[i, j] = np.uint32(table[tokens[i], j]) << np.uint32(16)
        else:
            x[i] = table[tokens[i]]


embed = compiled(_embed, fuse=True)


def _read(
    tokens, positions, start, row, keys, values, masks, kinds, low, cos, sin, sizes, eps, head_eps, scale, weights,
    embedding, threads
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The states [n, d] of `tokens` [n] after the last layer; they go to the slots from `start` on of batch row `row`.
    embedding [vocabulary, d], as `embed` takes it; the rest is as `forward` takes it."""
    bare, norms, head_norms, addresses, forms, biases = weights
    x = np.empty((len(tokens), embedding.shape[1]), np.float32)
    embed(embedding, tokens, x)
    end = start + len(tokens)
    slots = np.arange(start, end).reshape(1, -1)
    none, nothing = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32)
    forward(
        x, x, positions, row, slots, keys, values, masks, kinds, end, low, cos, sin, sizes, eps, head_eps, scale, bare,
        norms, head_norms, addresses, forms, biases, none, nothing, threads,
    )  # fmt: skip
    return x


read = compiled(_read, fuse=True)


def _draft_chain(
    pending, row, start, keys, values, masks, none, kinds, low, cos, sin, sizes, eps, head_eps, scale, weights,
    embedding, last, u, factor, truncation, floor, threads, q, tokens
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Draw tokens[l] from q[l] = softmax(factor logits) of the path so far, truncated as `choose` has it, with its
    uniform u[l]; the levels done.
    With factor 0 take the likeliest; q then has no rows. It ends where the product of q down to a token (of
    softmax(logits) with factor 0) is below `floor`, if there is one. 0 levels where logits are not finite.

    pending: the tokens before them, into the slots from `start` on of batch row `row`, which are their positions too.
    masks: of the first forward; none: of the others.
    weights: bare .. biases as `forward` takes them; last: final norm, address and form of the head, its bias.
    """
    norm, head_address, head_form, head_bias = last
    logits = np.empty((1, q.shape[1]), np.float32)
    untempered = np.empty((1 if floor > 0 and factor == 0 else 0, logits.shape[1]), np.float32)
    used, sure = start, 1.0
    for level in range(len(tokens)):
        positions = np.arange(used, used + len(pending))
        x = read(
            pending, positions, used, row, keys, values, masks, kinds, low, cos, sin, sizes, eps, head_eps, scale,
            weights, embedding, threads,
        )  # fmt: skip
        used += len(pending)
        head(x[len(x) - 1 :], norm, eps, head_address, head_form, head_bias, logits, threads)
        sure = choose(logits, factor, truncation, u[level, 0], level, sure, floor, untempered, q, tokens)
        if sure < 0:
            return 0
        if sure < floor:
            return level + 1
        pending, masks = tokens[level : level + 1], none
    return len(tokens)


draft_chain = compiled(_draft_chain, fuse=True)


def _score_tree(
    x, positions, row, start, keys, values, masks, kinds, low, cos, sin, sizes, eps, head_eps, scale, weights, last,
    factor, wanted, states, threads, out
):  # type: ignore[no-untyped-def]  # fmt: skip
    """out[i] [n, vocabulary] = softmax(factor logits) of node i, with factor 0 the logits; False where they are not
    finite, for which logits are not looked through. x [n, d]: the nodes' embeddings, which become their states after
    the last layer; their keys and values go to the slots from `start` on. masks: what they see of them and of those
    before. wanted, states: as `forward` takes them. The rest is as `_draft_chain` takes it."""
    norm, head_address, head_form, head_bias = last
    bare, norms, head_norms, addresses, forms, biases = weights
    end = start + len(x)
    slots = np.arange(start, end).reshape(1, -1)
    forward(
        x, x, positions, row, slots, keys, values, masks, kinds, end, low, cos, sin, sizes, eps, head_eps, scale, bare,
        norms, head_norms, addresses, forms, biases, wanted, states, threads,
    )  # fmt: skip
    head(x, norm, eps, head_address, head_form, head_bias, out, threads)
    return factor == 0 or softmax(out, factor, ALL, out)


score_tree = compiled(_score_tree, fuse=True)
