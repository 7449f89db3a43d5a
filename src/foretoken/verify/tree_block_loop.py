"""The compiled loops of verify.tree_block. Imports numba, so it is itself imported where it is first needed."""

import numpy as np

from foretoken.core.draw_loops import pick
from foretoken.verify.rejection_fast import TINY


def share_loop(p: np.ndarray, q: np.ndarray, token: int, weight: float) -> float:
    """tree_block_fast.fast_share."""
    of_p, of_q = 0.0, 0.0
    for x in range(p.shape[0]):
        of_p += np.float64(p[x])
        of_q += np.float64(q[x])
    return min(1.0, weight * (np.float64(p[token]) / of_p) / (np.float64(q[token]) / of_q))


def end_loop(p: np.ndarray, q: np.ndarray, weight: float, u: float) -> int:
    """tree_block_fast.fast_end; q is empty where there is none."""
    v = p.shape[0]
    of_p, of_q = 0.0, 0.0
    for x in range(v):
        of_p += np.float64(p[x])
    for x in range(q.shape[0]):
        of_q += np.float64(q[x])
    row = np.empty(v + 1)
    row[v] = 1 - weight
    total, scale = 1 - weight, weight / of_p
    if q.shape[0] == 0:
        for x in range(v):
            row[x] = np.float64(p[x]) * scale
        return pick(row, u)
    share = 1 / of_q
    for x in range(v):
        row[x] = max(np.float64(p[x]) * scale - np.float64(q[x]) * share, 0.0)
        total += row[x]
    if total <= TINY:  # the child took all; this is reached with probability 0 up to rounding
        for x in range(v):
            row[x] = np.float64(p[x])
    return pick(row, u)
