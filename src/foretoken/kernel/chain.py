"""A chain of draft tokens in one compiled call: forward, softmax and draw, level after level.

A forward of a language model waits for memory, and further tokens in it cost little. So it also reads *guesses* of the
next draft tokens: what followed the same words earlier in the text. Where the token that is drawn was guessed, the next
level's logits are there already. A level's finite logits, and so its token, are the same with and without guesses, bit
for bit. A wrong guess leaves keys and values behind the slots that are read, until they are written anew.

Sources: Saxena 2023, Prompt Lookup Decoding (guesses from the text); Spector & Re 2023, Accelerating LLM Inference with
Staged Speculative Decoding, arXiv:2308.04623 (a drafter that is drafted for itself).
"""

# pyright: reportCallIssue=false

from typing import NamedTuple

import numpy as np

from foretoken.kernel.compile import fused
from foretoken.kernel.draws import pick
from foretoken.kernel.heads import parallel, step
from foretoken.kernel.model import Nodes, embed, scores
from foretoken.kernel.softmax import softmax

# Guesses of one forward, at most: one to begin with, twice as many after all were right, one again after a wrong one.
# By computation from the times of a forward, 3 and 5 are within 2% (the entry of 2026-11-26 on guesses in docs/LOG.md).
MOST = 4
COMPARED = 8  # tokens of a match: of matches as long as this the latest is taken; 4 and 16 are as good (same entry)


class Text(NamedTuple):
    """What a chain follows, in one sequence.

    past: the tokens in which the next ones are looked up, the newest last [t]. None where one token is drawn, and for
        a draft head, since it reads a token only with the state of the one before.
    tokens: those that were not read yet [m].
    states: what a draft head takes beside them [m, d]; a language model takes none [0, d].
    row: the sequence, by its place in the batch.
    start: the slot of the first token, which is its position too.
    """

    past: np.ndarray
    tokens: np.ndarray
    states: np.ndarray
    row: int
    start: int


class Drawing(NamedTuple):
    """How tokens are taken from logits.

    u: uniforms in [0, 1), one per level [levels, 1].
    likeliest: whether the likeliest tokens are taken, whatever u is.
    factor: what logits are multiplied by, 1 / temperature.
    truncation: top_k, top_p and min_p, which keep all where they are 0, 1 and 0.
    floors: the chain ends in front of a level to which the product of probabilities is less [levels]; empty where
        nobody asks for those of likeliest tokens.
    """

    u: np.ndarray
    likeliest: bool
    factor: np.float32
    truncation: tuple[int, float, float]
    floors: np.ndarray


class Drafted(NamedTuple):
    """What becomes of a chain.

    tokens: drawn, by level [levels].
    q: what they were drawn from [levels, v], zeros before where the head has a vocabulary of its own; no rows for
        likeliest tokens.
    sure: the product of probabilities down to each [levels].
    states: those made of the nodes that took a forward [nodes, d], and behind them what wrong guesses left.
    """

    tokens: np.ndarray
    q: np.ndarray
    sure: np.ndarray
    states: np.ndarray


@fused
def choose(logits, drawing, level, q):
    """Take the token of one level from logits [1, v].

    q: [1, v], becomes the probabilities; not of likeliest tokens where nobody asks for them.

    Returns the token, -1 where logits are not finite, and its probability, 1 where that is not known.
    """
    if not drawing.likeliest:
        if not softmax(logits, drawing.factor, drawing.truncation, q):
            return -1, 0.0
        token = pick(q[0], drawing.u[level, 0])
        return token, np.float64(q[0, token])
    token = np.argmax(logits)  # of NaN, if there is one
    if not np.isfinite(logits[0, token]):
        return -1, 0.0
    if len(drawing.floors) > 0:
        softmax(logits, drawing.factor, drawing.truncation, q)
        return token, np.float64(q[0, token])
    return token, 1.0


@fused
def look_up(text, end, guesses):
    """Fill guesses [n] with what followed the end of a text earlier.

    The text's first `end` tokens are known. Of the earlier places that are equal to their end in most tokens, COMPARED
    at most, the latest counts; what follows it may overlap the end, and then goes round.

    Returns whether there is a match.
    """
    longest, after = 0, 0
    for place in range(end - 2, -1, -1):
        if text[place] == text[end - 1]:
            same = 1
            while same < COMPARED and same <= place and text[place - same] == text[end - 1 - same]:
                same += 1
            if same > longest:
                longest, after = same, place + 1
            if same == COMPARED:
                break
    for i in range(len(guesses) if longest > 0 else 0):
        guesses[i] = text[after + i] if after + i < end else guesses[after + i - end]
    return longest > 0


@fused
def causal(start, n, low):
    """The mask of a chain of n nodes behind `start` slots [1, 1, n, start + n]; no columns for one, which sees all.

    As models.growing_tree.causal_mask, for compiled code.
    """
    mask = np.zeros((1, 1, n, start + n if n > 1 else 0), np.float32)
    for i in range(n - 1):
        mask[0, 0, i, start + i + 1 :] = low
    return mask


@fused
def draft_chain(model, text, drawing, drafted, threads):
    """Draw a token after a text, the next after that, and so on: what is done level by level, bit for bit.

    A draft head takes the state made at a token to draft the next one. Levels from `model.serial` on are those of its
    MLPs, on the first two drafted tokens and the states that these were drawn from.

    model, text, drawing: Model, Text, Drawing. drafted: a Drafted, which is filled.
    threads: at most; None for one.

    Returns the number of levels done, 0 where logits are not finite, and the number of forwards.
    """
    head, levels, known = model.head, len(drafted.tokens), len(text.past)
    d, own = model.embedding.width, len(head.columns) > 0
    width = len(head.columns) if own else drafted.q.shape[1]
    most = min(MOST, levels - 1) if known > 0 else 0
    # The logits of one serial level and of the guesses behind it, or of all parallel levels.
    all_logits = np.empty((max(1 + most, levels - model.serial), width), np.float32)
    logits, q = all_logits[:1], np.empty((1, width), np.float32)
    unread, states, used = text.tokens, text.states, text.start
    kinds = np.zeros(len(model.layers.weights), np.int64)
    past, guesses = np.empty(known + levels, np.int64), np.empty(MOST, np.int64)
    past[:known] = text.past
    wanted = 1  # guesses of the next forward
    guessed, right = 0, 0  # those of the last one, and how many of them were right so far
    done, forwards, sure = 0, 0, 1.0
    for level in range(levels):
        if level >= model.serial:
            if level == model.serial:
                embedded, ahead = np.empty((2, d), np.float32), np.empty((1, levels - model.serial, d), np.float32)
                embed(model.embedding, drafted.tokens[:2], embedded)
                parallel(model, embedded, drafted.states[done - 2 : done], ahead, threads)
                scores(ahead[0], head, all_logits[: levels - level], threads)
            logits = all_logits[level - model.serial : level - model.serial + 1]
        elif level > 0 and right < guessed and drafted.tokens[level - 1] == guesses[right]:
            right, used, done = right + 1, used + 1, done + 1
            logits = all_logits[right : right + 1]
        else:
            if guessed > 0:
                wanted = min(2 * wanted, MOST) if right == guessed else 1
            m, count = len(unread), min(wanted, most, levels - level - 1)
            guessed = count if count > 0 and look_up(past, known + level, guesses[:count]) else 0
            n, right = m + guessed, 0
            tokens = np.empty(n, np.int64)
            tokens[:m], tokens[m:] = unread, guesses[:guessed]
            embedded, x = np.empty((n, d), np.float32), drafted.states[done : done + n]
            embed(model.embedding, tokens, embedded)
            positions = np.arange(used, used + n)
            mask = causal(used, n, model.layers.low)
            nodes = Nodes(positions, positions.reshape(1, -1), text.row, used + n, (mask,), kinds)
            step(model, embedded, states, nodes, x, threads)
            states = x[m - 1 :]
            scores(states, head, all_logits[: 1 + guessed], threads)
            used, done, forwards, logits = used + m, done + m, forwards + 1, all_logits[:1]
        if not drawing.likeliest and not own:
            q = drafted.q[level : level + 1]
        token, share = choose(logits, drawing, level, q)
        if token < 0:
            return 0, forwards
        drafted.tokens[level] = head.columns[token] if own else token
        past[known + level] = drafted.tokens[level]
        if own and not drawing.likeliest:
            for j in range(width):
                drafted.q[level, head.columns[j]] = q[0, j]
        sure *= share
        drafted.sure[level] = sure
        if level + 1 < len(drawing.floors) and sure < drawing.floors[level + 1]:
            return level + 1, forwards
        unread = drafted.tokens[level : level + 1]
    return levels, forwards
