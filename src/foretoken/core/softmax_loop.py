"""The compiled loop of core.softmax. Imports numba, so it is itself imported where it is first needed."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.core.vectors import LANES, softmax_row


def softmax_loop(scores, scale, p):  # type: ignore[no-untyped-def]
    """p = softmax(scale scores), row by row; False where a row has NaN, +inf or nothing finite."""
    m, v = scores.shape
    chunks = (v + LANES - 1) // LANES
    padded = np.full(chunks * LANES if v % LANES else 0, -np.inf, np.float32)
    for i in range(m):
        if v % LANES:
            padded[:v] = scores[i]
            padded[v:] = -np.inf
            total = softmax_row(padded, 0, scale, padded, 0, chunks)
            p[i] = padded[:v]
        else:
            total = softmax_row(scores, i * v, scale, p, i * v, chunks)
        if not np.isfinite(total):
            return False
    return True
