"""Exact transport's thresholds: for each boundary between groups, the largest u for which it is a vertex of the least
concave curve above S - u G.

S and G are the curves of exact_transport.py, polylines over the q-mass; S is concave and below G. At u = 0 the curve is
S. u is taken as the time. As it grows, a boundary *dies* when the slopes of S - u G on both sides of it become equal;
the two blocks of groups beside it become one. Block b lies to the left of boundary b, until that boundary dies.
death[b] is the time at which boundary b would die if no other did; the death of a neighbour can only make it earlier.
Deaths are queued in lists by span of time, and those of the current span in a heap. docs/theory.md, Theorem 7.
"""

import numpy as np

from foretoken.kernel.compile import compiled


@compiled
def blocks(rho: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the blocks of groups of equal rho: the last group, the q-mass, and the slopes of S and G of each [blocks].

    rho, q, ns, cs: as in `thresholds`.
    """
    k = rho.shape[0]
    ends = np.empty(k, np.int64)
    n = 0
    for j in range(k):
        if j == k - 1 or rho[j] != rho[j + 1]:
            ends[n] = j
            n += 1
    mass, of_s, of_g = np.zeros(n), np.empty(n), np.zeros(n)
    after = 0.0
    for b in range(n - 1, -1, -1):
        for j in range(ends[b], ends[b - 1] if b > 0 else -1, -1):
            mass[b] += q[j]
        rest = after + mass[b]
        of_s[b] = rho[ends[b]]
        for i in range(ns.shape[0]):
            if ns[i] > 0:  # (rest^n - after^n) / (rest - after), computed bit by bit of n, so that nothing cancels
                slope, rest_power, after_power, bit = cs[i], rest, after, 1
                while bit * 2 <= ns[i]:
                    bit *= 2
                while bit > 1:
                    bit //= 2
                    slope *= rest_power + after_power
                    rest_power *= rest_power
                    after_power *= after_power
                    if ns[i] & bit:
                        slope = slope * rest + cs[i] * after_power
                        rest_power *= rest
                        after_power *= after
                of_g[b] += slope
        after = rest
    return ends[:n], mass, of_s, of_g


@compiled
def push(when: np.ndarray, whose: np.ndarray, size: int, t: float, b: int) -> None:
    """Put an entry into the heap.

    when, whose: times, float64, and boundaries, int64; the heap is their first `size` entries, and grows by one.
    t, b: the time and the boundary of the new entry.
    """
    at = size
    while at > 0 and when[(at - 1) // 2] > t:
        when[at], whose[at] = when[(at - 1) // 2], whose[(at - 1) // 2]
        at = (at - 1) // 2
    when[at], whose[at] = t, b


@compiled
def pop(when: np.ndarray, whose: np.ndarray, size: int) -> tuple[float, int]:
    """Take the entry with the least time out of the heap and return it as (time, boundary).

    when, whose: as in `push`.
    size: the number of entries that are left in the heap afterwards.
    """
    t, b = when[0], whose[0]
    at = 0
    while 2 * at + 1 < size:
        least = 2 * at + 1
        if least + 1 < size and when[least + 1] < when[least]:
            least += 1
        if when[least] >= when[size]:
            break
        when[at], whose[at] = when[least], whose[least]
        at = least
    when[at], whose[at] = when[size], whose[size]
    return t, b


@compiled
def thresholds(rho: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray) -> np.ndarray:
    """Return beta [groups]: as u grows from 0 to 1, the boundary after group j dies at u = beta[j], never if that is 1.

    rho: the slope of S in each group, falling [groups], float64.
    q: the q-mass of each group [groups], float64.
    ns, cs: possible numbers of draws [n], int64, and their probabilities [n], float64.
    """
    beta = np.zeros_like(rho)
    ends, mass, of_s, of_g = blocks(rho, q, ns, cs)
    n = ends.shape[0]
    left, right = np.arange(n) - 1, np.arange(n) + 1
    death = np.full(n, np.inf)  # -1 once the boundary is dead
    num_spans = n // 4 + 1
    newest = np.full(num_spans, -1)  # the last entry of each span's list; `older` has the entry before each
    older, who, num_entries = np.empty(3 * n, np.int64), np.empty(3 * n, np.int64), 0
    when, whose, size = np.empty(3 * n), np.empty(3 * n, np.int64), 0  # the heap; outdated entries are skipped
    changed = np.empty(n + 1, np.int64)  # boundaries whose death is to be computed and queued
    time = 0.0
    for b in range(n):
        beta[ends[b]] = 1.0
        changed[b] = b
    num_changed = n - 1
    for span in range(-1, num_spans):  # before the first span all are queued
        if span >= 0:
            entry = newest[span]
            while entry >= 0:
                b = who[entry]
                if 0.0 <= death[b] < 1.0 and int(death[b] * num_spans) == span:
                    death[b] = np.inf
                    changed[num_changed] = b
                    num_changed += 1
                entry = older[entry]
        while num_changed > 0 or size > 0:
            for i in range(num_changed):
                b = changed[i]
                c = right[b]
                t = time  # where the slopes of S are equal up to rounding
                if of_s[b] > of_s[c]:
                    t = max((of_s[b] - of_s[c]) / (of_g[b] - of_g[c]), time) if of_g[b] > of_g[c] else np.inf
                if t >= min(death[b], 1.0):
                    continue
                death[b] = t
                later = int(t * num_spans)
                if later > span:
                    who[num_entries], older[num_entries] = b, newest[later]
                    newest[later] = num_entries
                    num_entries += 1
                else:
                    push(when, whose, size, t, b)
                    size += 1
            num_changed = 0
            if size == 0:
                break
            size -= 1
            t, b = pop(when, whose, size)
            if death[b] != t:
                continue
            time = beta[ends[b]] = t
            death[b] = -1.0
            before, c = left[b], right[b]
            total = mass[b] + mass[c]
            of_s[c] = (mass[b] * of_s[b] + mass[c] * of_s[c]) / total
            of_g[c] = (mass[b] * of_g[b] + mass[c] * of_g[c]) / total
            mass[c] = total
            left[c] = before
            if before >= 0:
                right[before] = c
                changed[0], num_changed = before, 1
            if c < n - 1:
                changed[num_changed] = c
                num_changed += 1
    return beta
