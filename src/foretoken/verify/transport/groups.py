"""Exact transport's groups of tokens: tokens that share one ratio p/q may be decided over as one."""

from collections.abc import Callable

import numpy as np

from foretoken.kernel.compile import compiled

UPPER, DIGIT = (1 << 32) - 1, 11  # a digit's bits; three digits hold the upper half of a number's bits

Groups = tuple[np.ndarray, np.ndarray, np.ndarray]
Grouping = Callable[[np.ndarray, np.ndarray, float], Groups]


def by_ratio(p: np.ndarray, q: np.ndarray, mean: float) -> Groups:
    """Every token with q > 0 is a group of its own: (group of each token or -1, p of the groups, q of the groups)."""
    ratio, tokens, size = np.empty(len(p)), np.empty(len(p), np.int64), np.empty(1, np.int64)
    compiled(ratio_loop)(p, q, ratio, tokens, size)
    rising = np.empty(size[0], np.int64)
    compiled(order_loop)(ratio[: size[0]], rising)
    order = tokens[rising]
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


def order_loop(ratio: np.ndarray, order: np.ndarray) -> None:
    """order [k] = the places of ratio [k], float64 numbers that are not above 0, from the least on; of equal ones the
    first place first.

    The upper half of a number's bits is sorted digit by digit, at a fifth of the time of comparing all numbers. Only
    places that share it are compared.
    """
    k = ratio.shape[0]
    bits = ratio.view(np.int64)
    keys, places = np.empty(k, np.int64), np.empty(k, np.int64)
    more_keys = np.empty(k, np.int64)
    for i in range(k):
        keys[i] = UPPER - ((bits[i] >> 31) & UPPER)  # more bits of a number below 0 make it smaller
        places[i] = i
    for shift in (0, DIGIT, 2 * DIGIT):
        starts = np.zeros((1 << DIGIT) + 1, np.int64)
        for i in range(k):
            starts[((keys[i] >> shift) & ((1 << DIGIT) - 1)) + 1] += 1
        for digit in range(1 << DIGIT):
            starts[digit + 1] += starts[digit]
        for i in range(k):
            digit = (keys[i] >> shift) & ((1 << DIGIT) - 1)
            at = starts[digit]
            starts[digit] += 1
            more_keys[at], order[at] = keys[i], places[i]
        keys[:], places[:] = more_keys, order
    first = 0
    for i in range(1, k + 1):
        if i < k and keys[i] == keys[first]:
            continue
        rising = True  # as where all are 0
        for j in range(first + 1, i):
            rising &= ratio[places[j - 1]] <= ratio[places[j]]
        if not rising:
            same = places[first:i]
            order[first:i] = same[np.argsort(ratio[same], kind="mergesort")]
        first = i


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
