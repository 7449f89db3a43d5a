"""The compiled loop of verify.block. Imports numba, so it is itself imported where it is first needed."""

import numpy as np

from foretoken.core.draw_loops import pick
from foretoken.verify.rejection_fast import TINY


def block_loop(p: np.ndarray, q: np.ndarray, drafts: np.ndarray, u: np.ndarray) -> tuple[int, int]:
    """(tau, token) of block.plain_decision."""
    length, v = q.shape
    w, keep = np.ones(length + 1), np.ones(length + 1)
    of_p, of_q = np.empty(length), np.empty(length)
    for i in range(length):
        a, b = 0.0, 0.0
        for x in range(v):
            a += np.float64(p[i, x])
            b += np.float64(q[i, x])
        of_p[i], of_q[i] = a, b
        ratio = (p[i, drafts[i]] / a) / (q[i, drafts[i]] / b)
        w[i + 1] = min(1.0, w[i] * ratio)
        if i > 0:
            scale, share, excess = w[i] / a, 1.0 / b, 0.0
            for x in range(v):
                excess += max(np.float64(p[i, x]) * scale - np.float64(q[i, x]) * share, 0.0)
            # p == q and w = 1: the next draft has weight 1 too, and is kept for certain.
            keep[i] = excess / (excess + 1 - w[i]) if excess + 1 - w[i] > TINY else 1.0
    keep[length] = w[length]
    # P(tau = i) = keep[i] prod_{j > i} (1 - keep[j]); from the last, since that is the likeliest.
    chances = np.empty(length + 1)
    left = 1.0
    for i in range(length, -1, -1):
        chances[i] = keep[i] * left
        left *= 1 - keep[i]
    tau = pick(chances, u[0])
    row = np.empty(v)
    total = 0.0
    if tau < length:
        scale, share = w[tau] / of_p[tau], 1.0 / of_q[tau]
        for x in range(v):
            row[x] = max(np.float64(p[tau, x]) * scale - np.float64(q[tau, x]) * share, 0.0)
            total += row[x]
    if total <= TINY:
        for x in range(v):
            row[x] = np.float64(p[tau, x])
    return tau, pick(row, u[1])
