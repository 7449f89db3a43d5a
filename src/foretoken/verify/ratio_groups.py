"""Exact transport's groups of tokens: tokens of one ratio p/q, or nearly so, may be decided over as one.

by_ratio: tokens of ratio E[N] or more are one group, since ratios may be cut to E[N] (docs/theory.md, Theorem 7); every
other token is a group of its own, sorted by falling ratio in O(v log v).
by_near_ratio: at most GROUPS groups of tokens of nearly equal ratio, in O(v) and without a sort. The rule then accepts
less than the optimum by at most gap(law) (1 + TV(p, q)), with

    gap  =  width / 4,    1 / width = floor((GROUPS - 1) / phi(max(1, E[N])))

N is the number of draws. With r = p/q, the groups have equal width in phi(r) up to r = E[N]; all tokens from there on
are one group. phi(r) = r up to 1; from there on it grows by 1 in each octave, linearly within it:
phi(r) = e + r / 2^e where 2^e <= r < 2^(e+1).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import total_of

GROUPS = 1024
UPPER, DIGIT = (1 << 31) - 1, 11  # DIGIT: bits of a digit; three hold the upper half of a float64 without its sign


class Groups(NamedTuple):
    """Tokens in groups, which stand in the order of falling p/q."""

    group: np.ndarray  # the group of each token [v], int32; -1 where q is 0
    p: np.ndarray  # the p-mass of each group [groups], float64; all tokens of the vocabulary have mass 1
    q: np.ndarray  # the q-mass of each group [groups], float64


Grouping = Callable[[np.ndarray, np.ndarray, float], Groups]  # from p [v], q [v] and E[N], as `by_ratio`


def by_near_ratio(p: np.ndarray, q: np.ndarray, mean: float) -> Groups:
    """Put tokens of nearly equal ratio into one group, at most GROUPS in all; p, q, mean: as in `by_ratio`."""
    return in_groups(p, q, mean, per_unit(mean), GROUPS)


def per_unit(mean: float) -> int:
    """Return the number of groups in one unit of phi; mean: E[N], the mean number of draws.

    It is a whole number, so that no group reaches across a ratio of 1, 2, 4, .. The group of ratios above E[N] is not
    one of them.
    """
    half, octave = math.frexp(max(1.0, mean))
    return max(1, int((GROUPS - 1) / (octave - 1 + 2 * half)))


@compiled
def by_ratio(p: np.ndarray, q: np.ndarray, mean: float) -> Groups:
    """Make every token with q > 0 a group of its own, but for those of ratio `mean` or more, which become one group.

    p, q: probabilities of the target and of the drafter [v], float32 or float64, of any positive sum.
    mean: E[N], the mean number of draws.
    """
    v = p.shape[0]
    group, p_mass, q_mass = np.empty(v, np.int32), np.empty(v), np.empty(v)
    p_scale, q_scale = 1.0 / total_of(p), 1.0 / total_of(q)
    ratio, tokens = np.empty(v), np.empty(v, np.int32)
    k, num_high = 0, 0  # tokens with q > 0 of ratio below E[N], and the others with q > 0
    p_high = q_high = 0.0
    for x in range(v):  # no jump depends on a token, since no processor could foresee it
        p_x, q_x = np.float64(p[x]) * p_scale, np.float64(q[x]) * q_scale
        high = q_x > 0 and p_x >= mean * q_x
        group[x] = 0 if high else -1
        p_high += p_x if high else 0.0
        q_high += q_x if high else 0.0
        num_high += high
        ratio[k], tokens[k] = -p_x / q_x, x  # overwritten by the next token where this one is not counted
        k += q_x > 0 and not high
    first = 0
    if num_high:
        p_mass[0], q_mass[0], first = p_high, q_high, 1
    order = in_order(ratio[:k])
    for j in range(k):
        x = tokens[order[j]]
        group[x] = first + j
        p_mass[first + j] = np.float64(p[x]) * p_scale
        q_mass[first + j] = np.float64(q[x]) * q_scale
    return Groups(group, p_mass[: first + k], q_mass[: first + k])


@compiled
def in_order(ratio: np.ndarray) -> np.ndarray:
    """Return the order that sorts `ratio` upwards, as indices [k], int64; equal numbers keep their order.

    The numbers are sorted by the upper half of their bits, digit by digit, in a fifth of the time of a sort by
    comparisons. Only numbers that share the upper half are then compared.

    ratio: numbers <= 0 [k], float64.
    """
    k = ratio.shape[0]
    bits = ratio.view(np.int64)
    words, moved = np.empty(k, np.int64), np.empty(k, np.int64)  # a number's upper half, then its index
    starts = np.zeros((3, 1 << DIGIT), np.int64)
    for i in range(k):
        key = UPPER - ((bits[i] >> 32) & UPPER)  # more bits of a number below 0 make it smaller
        words[i] = (key << 32) | i
        for n in range(3):
            starts[n, (key >> (n * DIGIT)) & ((1 << DIGIT) - 1)] += 1
    for n in range(3):
        before = 0
        for digit in range(1 << DIGIT):
            count = starts[n, digit]
            starts[n, digit] = before
            before += count
        for i in range(k):
            word = words[i]
            digit = (word >> (32 + n * DIGIT)) & ((1 << DIGIT) - 1)
            moved[starts[n, digit]] = word
            starts[n, digit] += 1
        words, moved = moved, words
    order = words & 0xFFFFFFFF
    first = 0
    for i in range(1, k + 1):
        if i < k and words[i] >> 32 == words[first] >> 32:
            continue
        rising = True  # whether these numbers are in order already, as where all are 0
        for j in range(first + 1, i):
            rising &= ratio[order[j - 1]] <= ratio[order[j]]
        if not rising:
            merge(order, first, i, ratio, moved)
        first = i
    return order


@compiled
def merge(order: np.ndarray, first: int, end: int, ratio: np.ndarray, room: np.ndarray) -> None:
    """Sort order[first:end] by `ratio` upwards, in place; equal numbers keep their order.

    Longer and longer runs are merged. (`np.argsort` and an assignment of arrays would take four seconds to compile.)

    order: indices into ratio [k].
    first, end: the part that is sorted.
    ratio: numbers [k].
    room: may be overwritten [k], int64.
    """
    width = 1
    while width < end - first:
        for low in range(first, end, 2 * width):
            middle, high = min(low + width, end), min(low + 2 * width, end)
            left, right = low, middle
            for to in range(low, high):
                if right == high or (left < middle and ratio[order[left]] <= ratio[order[right]]):
                    room[to] = order[left]
                    left += 1
                else:
                    room[to] = order[right]
                    right += 1
        for to in range(first, end):
            order[to] = room[to]
        width *= 2


@partial(compiled, reorder_sums=True)
def in_groups(p: np.ndarray, q: np.ndarray, mean: float, per_unit: int, most: int) -> Groups:
    """Put tokens of nearly equal ratio into groups, and number those with tokens from 0 on, by falling ratio.

    p, q, mean: as in `by_ratio`.
    per_unit: the number of groups in one unit of phi.
    most: the number of groups before those without tokens are left out.
    """
    v, last = p.shape[0], most - 1
    group, masses, ratio = np.empty(v, np.int32), np.zeros((most, 2)), np.empty(v)
    bits = ratio.view(np.int64)  # phi is linear in them above 1
    p_scale, q_scale = 1.0 / total_of(p), 1.0 / total_of(q)
    for x in range(v):
        q_x = np.float64(q[x]) * q_scale
        ratio[x] = np.float64(p[x]) * p_scale / q_x if q_x > 0.0 else -1.0
    for x in range(v):
        octave, above = (bits[x] >> 52) - 1023, (bits[x] & 0xFFFFFFFFFFFFF) * 2.0**-52
        phi = ratio[x] if ratio[x] <= 1.0 else octave + 1 + above
        b = last - int(min(phi * per_unit, last + 0.5))
        group[x] = (0 if ratio[x] >= mean and mean >= 1.0 else b) if ratio[x] >= 0.0 else -1
    for x in range(v):
        if group[x] >= 0:
            masses[group[x], 0] += np.float64(p[x]) * p_scale
            masses[group[x], 1] += np.float64(q[x]) * q_scale
    moved = np.zeros(last + 1, np.int32)
    n = 0
    for b in range(last + 1):
        if masses[b, 1] > 0.0:
            moved[b] = n
            masses[n, 0], masses[n, 1] = masses[b, 0], masses[b, 1]
            n += 1
    for x in range(v):
        if group[x] >= 0:
            group[x] = moved[group[x]]
    return Groups(group, masses[:n, 0].copy(), masses[:n, 1].copy())
