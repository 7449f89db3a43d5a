"""Exact transport's groups of tokens: tokens that share one ratio p/q may be decided over as one."""

from collections.abc import Callable

import numpy as np

from foretoken.core.compiled import compiled

Groups = tuple[np.ndarray, np.ndarray, np.ndarray]
Grouping = Callable[[np.ndarray, np.ndarray, float], Groups]


def by_ratio(p: np.ndarray, q: np.ndarray, mean: float) -> Groups:
    """Every token with q > 0 is a group of its own: (group of each token or -1, p of the groups, q of the groups)."""
    ratio, tokens, size = np.empty(len(p)), np.empty(len(p), np.int64), np.empty(1, np.int64)
    compiled(ratio_loop)(p, q, ratio, tokens, size)
    order = tokens[: size[0]][np.argsort(ratio[: size[0]])]
    group, p_mass, q_mass = np.empty(len(p), np.int32), np.empty(len(order)), np.empty(len(order))
    compiled(mass_loop)(p, q, order, group, p_mass, q_mass)
    return group, p_mass, q_mass


def ratio_loop(p: np.ndarray, q: np.ndarray, ratio: np.ndarray, tokens: np.ndarray, size: np.ndarray) -> None:
    """-p/q, normalised, of the tokens with q > 0, and the tokens; size = [their number]."""
    p_total, q_total = 0.0, 0.0
    for x in range(p.shape[0]):
        p_total += np.float64(p[x])
        q_total += np.float64(q[x])
    j = 0
    for x in range(p.shape[0]):
        q_x = np.float64(q[x]) / q_total
        if q_x > 0:
            ratio[j] = -(np.float64(p[x]) / p_total) / q_x
            tokens[j] = x
            j += 1
    size[0] = j


def mass_loop(
    p: np.ndarray, q: np.ndarray, order: np.ndarray, group: np.ndarray, p_mass: np.ndarray, q_mass: np.ndarray
) -> None:
    """Every token of `order` is a group; group[x] = -1 where q is 0."""
    p_total, q_total = 0.0, 0.0
    for x in range(p.shape[0]):
        p_total += np.float64(p[x])
        q_total += np.float64(q[x])
        group[x] = -1
    for j in range(order.shape[0]):
        x = order[j]
        group[x] = j
        p_mass[j] = np.float64(p[x]) / p_total
        q_mass[j] = np.float64(q[x]) / q_total
