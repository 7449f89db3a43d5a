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
from foretoken.kernel.softmax import truncated_softmax

# The largest number of guesses of one forward. There is one at first, twice as many after all were right, and one again
# after one was wrong. By computation from the times of a forward, 3 and 5 are within 2% (the entry of 2026-11-26 on
# guesses in docs/LOG.md).
MOST = 4
COMPARED = 8  # tokens of a match that are compared at most; 4 and 16 are as good (same entry)


class Text(NamedTuple):
    """The text of one sequence, after which a chain is drawn.

    past: token ids in which guesses of the next ones are looked up, the newest last [t] int64. Empty if one token is
        drawn, and for a draft head, which can read a token only with the state of the token before it.
    tokens: ids that the model has not read yet, the last ones of the text [m] int64.
    states: for a draft head the states that it reads beside these tokens [m, d]; for a language model [0, d].
    row: the sequence, by its place in the cache.
    start: the slot of the first of the unread tokens, which is its position too.
    """

    past: np.ndarray
    tokens: np.ndarray
    states: np.ndarray
    row: int
    start: int


class Drawing(NamedTuple):
    """How tokens are drawn from logits.

    u: uniforms in [0, 1), one per level [levels, 1].
    likeliest: whether the likeliest tokens are taken, whatever u is.
    factor: what logits are multiplied by, 1 / temperature.
    truncation: top_k, top_p and min_p, which keep all tokens where they are 0, 1 and 0.
    floors: per level the least product of q over the tokens before it: the chain ends in front of the first level whose
        floor is not reached [levels]. Empty where there are none; then the q of likeliest tokens is not computed.
    """

    u: np.ndarray
    likeliest: bool
    factor: np.float32
    truncation: tuple[int, float, float]
    floors: np.ndarray


class Drafted(NamedTuple):
    """Arrays for the results of `draft_chain`.

    tokens: ids of the drawn tokens, by level [levels] int64.
    q: the distributions that they were drawn from [levels, v]; zeros before if a draft head has a vocabulary of its
        own; [0, v] if the likeliest tokens are taken.
    sure: per level the product of q from the first token to this one [levels] float64. For likeliest tokens without
        floors all are 1.
    states: is filled with the model's states of the nodes of all forwards, without those of wrong guesses. It has m +
        levels - 1 rows, m as in Text; rows that are not filled may hold anything [rows, d].
    """

    tokens: np.ndarray
    q: np.ndarray
    sure: np.ndarray
    states: np.ndarray


@fused
def choose(logits, drawing, level, q):
    """Draw the token of one level from logits.

    logits: [1, v].
    drawing: a Drawing.
    level: the number of the level, from 0 on.
    q: is filled with the probabilities [1, v], unless the likeliest token is taken and there are no floors.

    Returns the token's column and its probability, which is 1 where it is not computed; column -1 where logits are not
    finite.
    """
    if not drawing.likeliest:
        if not truncated_softmax(logits, drawing.factor, drawing.truncation, q):
            return -1, 0.0
        token = pick(q[0], drawing.u[level, 0])
        return token, np.float64(q[0, token])
    token = np.argmax(logits)  # of NaN, if there is one
    if not np.isfinite(logits[0, token]):
        return -1, 0.0
    if len(drawing.floors) > 0:
        truncated_softmax(logits, drawing.factor, drawing.truncation, q)
        return token, np.float64(q[0, token])
    return token, 1.0


@fused
def look_up(text, end, guesses):
    """Fill guesses with what followed an earlier occurrence of the end of a text.

    Of all earlier places, that with the longest match counts, of equal ones the latest; at most COMPARED tokens are
    compared. What follows it may reach the end of the text, and then goes on with the guesses themselves.

    text: token ids, of which the first `end` are known [end or more].
    end: number of known tokens.
    guesses: is filled [n].

    Returns whether there is a match; without one guesses stay as they are.
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
    """Return the mask of a chain of nodes, as models.growing_tree.causal_mask does without a window, for compiled code.

    start: number of slots before the chain, which all its nodes see.
    n: number of nodes.
    low: what is added to the score of a slot that a node does not see, instead of 0.

    Returns float32 [1, 1, n, start + n]; without columns for one node, which sees all slots.
    """
    mask = np.zeros((1, 1, n, start + n if n > 1 else 0), np.float32)
    for i in range(n - 1):
        mask[0, 0, i, start + i + 1 :] = low
    return mask


@fused
def draft_chain(model, text, drawing, drafted, threads):
    """Draw a chain of tokens after a text, bit for bit as forwards and draws level by level would.

    A draft head takes the state made at a token to draft the next one. Levels from `model.serial` on are those of its
    MLPs, which read the first two drafted tokens and the states that these were drawn from.

    model, text, drawing: a Model, a Text, a Drawing.
    drafted: a Drafted, which is filled.
    threads: the largest number of threads; None for one.

    Returns the number of levels done, 0 where the logits of some level are not finite, and the number of forwards.
    """
    head, levels, known = model.head, len(drafted.tokens), len(text.past)
    d, own = model.embedding.width, len(head.columns) > 0
    width = len(head.columns) if own else drafted.q.shape[1]
    most = min(MOST, levels - 1) if known > 0 else 0
    # The logits of one serial level and of the guesses behind it, or of all parallel levels.
    all_logits = np.empty((max(1 + most, levels - model.serial), width), np.float32)
    logits, q = all_logits[:1], np.empty((1, width), np.float32)
    unread, states, used = text.tokens, text.states, text.start
    past, guesses = np.empty(known + levels, np.int64), np.empty(MOST, np.int64)
    for i in range(known):
        past[i] = text.past[i]
    wanted = 1  # number of guesses that the next forward reads
    guessed, right = 0, 0  # guesses that the last forward read, and how many of them were right so far
    done, forwards, sure = 0, 0, 1.0
    for level in range(levels):
        if level >= model.serial:
            if level == model.serial:
                embedded, ahead = np.empty((2, d), np.float32), np.empty((1, levels - model.serial, d), np.float32)
                embed(model.embedding, drafted.tokens[:2], embedded)
                parallel(model.mlps, model, embedded, drafted.states[done - 2 : done], ahead, threads)
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
            for i in range(n):
                tokens[i] = unread[i] if i < m else guesses[i - m]
            embedded, x = np.empty((n, d), np.float32), drafted.states[done : done + n]
            embed(model.embedding, tokens, embedded)
            positions = np.arange(used, used + n)
            mask = causal(used, n, model.layers[0].low)
            nodes = Nodes(positions, positions.reshape(1, -1), text.row, used + n, (mask,))
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
