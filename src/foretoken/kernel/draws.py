"""Draws of tokens from rows of probabilities, and the likeliest tokens of rows of scores."""

from functools import partial

import numpy as np

from foretoken.kernel.compile import compiled
from foretoken.kernel.sizes import NONE

BLOCK = 64  # weights whose sum is taken together


@partial(compiled, reorder_sums=True)
def total_of(row: np.ndarray) -> float:
    """Return the sum of the weights of a row [v], computed in vector registers.

    In a loop over a part of a longer row indices might count from the end, so that no vector registers would be used:
    hence this function of its own.
    """
    total = 0.0
    for x in range(row.shape[0]):
        total += np.float64(row[x])
    return total


@compiled
def pick(row: np.ndarray, u: float) -> int:
    """Return the token in whose share of a row u falls, as core/draws.py's inverse_cdf does up to rounding.

    Sums of blocks of weights run in vector registers; only the block that u falls in is read one by one.

    row: weights, which need not sum to 1 [v].
    u: uniform in [0, 1).
    """
    v = row.shape[0]
    sums = np.empty((v + BLOCK - 1) // BLOCK)
    total = 0.0
    for block in range(sums.shape[0]):
        sums[block] = total_of(row[block * BLOCK : (block + 1) * BLOCK])
        total += sums[block]
    threshold, running, first = u * total, 0.0, 0
    for block in range(sums.shape[0]):
        if running + sums[block] > threshold:
            break
        running += sums[block]
        first = (block + 1) * BLOCK
    for x in range(first, v):
        running += np.float64(row[x])
        if running > threshold:
            return x
    for x in range(v - 1, -1, -1):  # u total can round up to the total
        if row[x] > 0:
            return x
    return v - 1


@compiled
def draw_tokens(rows: np.ndarray, u: np.ndarray, replace: bool, draws: np.ndarray) -> None:
    """Draw k tokens by the weights of each row.

    rows: weights [m, v]; without replacement they become 0 where a token was drawn.
    u: uniforms in [0, 1) [m, k].
    replace: whether a row's draws are independent of each other; without replacement they are different tokens.
    draws: is filled with token ids [m, k], without replacement with NONE where nothing was left.
    """
    m, k = u.shape
    for i in range(m):
        for j in range(k):
            token = pick(rows[i], u[i, j])
            draws[i, j] = token
            if not replace:
                if rows[i, token] <= 0:
                    draws[i, j] = NONE
                rows[i, token] = 0


@compiled
def top_tokens(rows: np.ndarray, draws: np.ndarray) -> None:
    """Find the k tokens with the largest scores of each row, best first, of equal ones the first.

    Tokens with score -inf or NaN are left out.

    rows: scores [m, v].
    draws: is filled with token ids as far as there are tokens; all must be NONE before [m, k], k > 0.
    """
    m, k = draws.shape
    for i in range(m):
        row, best = rows[i], draws[i]
        found, least = 0, rows.dtype.type(-np.inf)
        for x in range(row.shape[0]):
            if row[x] > least:
                found = min(found + 1, k)
                j = found - 1
                while j > 0 and row[x] > row[best[j - 1]]:
                    best[j] = best[j - 1]
                    j -= 1
                best[j] = x
                if found == k:
                    least = row[best[k - 1]]


@compiled
def hub_tokens(rows: np.ndarray, u: np.ndarray, draws: np.ndarray) -> None:
    """Draw k tokens of each row by the hub law, as core/draws.py's hub_inverse_cdf does.

    rows: weights [m, v], which become 0 at the hubs.
    u: uniforms in [0, 1) [m, k].
    draws: is filled with token ids [m, k], with NONE where nothing was left.
    """
    m, k = u.shape
    for i in range(m):
        own = hub = NONE
        for j in range(k):
            if j > 0:
                hub = np.argmax(rows[i])
                draws[i, j] = hub if rows[i, hub] > 0 else NONE
                rows[i, hub] = 0
                if own != hub:
                    continue
            token = pick(rows[i], u[i, j])
            own = token if rows[i, token] > 0 else NONE
            draws[i, j] = own
