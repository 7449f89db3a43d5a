"""A chain of draft tokens in one compiled call: forward, softmax and draw, level after level."""

# pyright: reportCallIssue=false

from typing import NamedTuple

import numpy as np

from foretoken.kernel.compile import fused
from foretoken.kernel.draws import pick
from foretoken.kernel.heads import parallel, step
from foretoken.kernel.model import Nodes, embed, scores
from foretoken.kernel.sizes import ALL
from foretoken.kernel.softmax import softmax


class Text(NamedTuple):
    """What a chain follows, in one sequence.

    tokens: those that were not read yet [m].
    states: what a draft head takes beside them [m, d]; a language model takes none [0, d].
    row: the sequence, by its place in the batch.
    start: the slot of the first token, which is its position too.
    mask: what the tokens see of their slots and those before, 0 or `low` [1, 1, m, used]; no columns where all is seen.
    """

    tokens: np.ndarray
    states: np.ndarray
    row: int
    start: int
    mask: np.ndarray


class Drawing(NamedTuple):
    """How tokens are taken from logits.

    u: uniforms in [0, 1), one per level [levels, 1].
    factor: what logits are multiplied by, 1 / temperature; 0 takes the likeliest token.
    truncation: top_k, top_p and min_p, which keep all where they are 0, 1 and 0.
    floor: the chain ends behind a token down to which the product of probabilities is less.
    """

    u: np.ndarray
    factor: np.float32
    truncation: tuple[int, float, float]
    floor: float


class Drafted(NamedTuple):
    """What becomes of a chain.

    tokens: drawn, by level [levels].
    q: what they were drawn from [levels, v], zeros before where the head has a vocabulary of its own; no rows with
        factor 0.
    states: those made of the nodes that took a forward [nodes, d].
    """

    tokens: np.ndarray
    q: np.ndarray
    states: np.ndarray


@fused
def choose(logits, drawing, level, q):
    """Take the token of one level from logits [1, v].

    q: [1, v], becomes what the token is drawn from; with factor 0 softmax(logits), only if there is a floor.

    Returns the token, -1 where logits are not finite, and its probability, 1 where that is not known.
    """
    if drawing.factor > 0:
        if not softmax(logits, drawing.factor, drawing.truncation, q):
            return -1, 0.0
        token = pick(q[0], drawing.u[level, 0])
        return token, np.float64(q[0, token])
    token = np.argmax(logits)  # of NaN, if there is one
    if not np.isfinite(logits[0, token]):
        return -1, 0.0
    if drawing.floor > 0:
        softmax(logits, np.float32(1), ALL, q)
        return token, np.float64(q[0, token])
    return token, 1.0


@fused
def draft_chain(model, text, drawing, drafted, threads):
    """Draw a token after a text, the next after that, and so on: what is done level by level, bit for bit.

    A draft head takes the state made at a token to draft the next one. Levels from `model.serial` on are those of its
    MLPs, on the first two drafted tokens and the states that these were drawn from.

    model, text, drawing: Model, Text, Drawing. drafted: a Drafted, which is filled.
    threads: at most; None for one.

    Returns the number of levels done, 0 where logits are not finite.
    """
    head, levels = model.head, len(drafted.tokens)
    d, own = model.embedding.width, len(head.columns) > 0
    width = len(head.columns) if own else drafted.q.shape[1]
    all_logits = np.empty((max(1, levels - model.serial), width), np.float32)  # one serial level, or all parallel ones
    logits, q = all_logits[:1], np.empty((1, width), np.float32)
    tokens, states, mask = text.tokens, text.states, text.mask
    kinds = np.zeros(len(model.layers.weights), np.int64)
    used, done, sure = text.start, 0, 1.0
    for level in range(levels):
        if level < model.serial:
            m = len(tokens)
            embedded, x = np.empty((m, d), np.float32), drafted.states[done : done + m]
            embed(model.embedding, tokens, embedded)
            positions = np.arange(used, used + m)
            used, done = used + m, done + m
            nodes = Nodes(positions, positions.reshape(1, -1), text.row, used, (mask,), kinds)
            step(model, embedded, states, nodes, x, threads)
            states = x[m - 1 :]
            scores(states, head, logits, threads)
        elif level == model.serial:
            embedded, ahead = np.empty((2, d), np.float32), np.empty((1, levels - model.serial, d), np.float32)
            embed(model.embedding, drafted.tokens[:2], embedded)
            parallel(model, embedded, drafted.states[done - 2 : done], ahead, threads)
            scores(ahead[0], head, all_logits, threads)
        else:
            logits = all_logits[level - model.serial : level - model.serial + 1]
        if drawing.factor > 0 and not own:
            q = drafted.q[level : level + 1]
        token, share = choose(logits, drawing, level, q)
        if token < 0:
            return 0
        drafted.tokens[level] = head.columns[token] if own else token
        if own and drawing.factor > 0:
            for j in range(width):
                drafted.q[level, head.columns[j]] = q[0, j]
        sure *= share
        if sure < drawing.floor:
            return level + 1
        tokens, mask = drafted.tokens[level : level + 1], np.empty((1, 1, 1, 0), np.float32)
    return levels
