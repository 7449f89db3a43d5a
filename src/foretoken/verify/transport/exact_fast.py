"""The compiled loops of exact transport; `exact.py` holds what they compute, in plain Python.

Groups of tokens stand in the order of falling p/q; p and q are a group's masses, in float64. `ns` and `cs` are the
possible numbers of draws and their probabilities. R_j is the q-mass after group j, so that G_j = 1 - E[R_j^N].
"""

from collections.abc import Callable

import numpy as np

from foretoken.core.compiled import compiled

Groups = tuple[np.ndarray, np.ndarray, np.ndarray]
Grouping = Callable[[np.ndarray, np.ndarray, float], Groups]


def fast_row(
    p: np.ndarray,
    q: np.ndarray,
    draws: np.ndarray,
    groups: Groups,
    ns: np.ndarray,
    cs: np.ndarray,
) -> np.ndarray:
    """`exact.plain_row`, compiled."""
    group, p_mass, q_mass = groups
    rho, beta = np.empty_like(p_mass), np.zeros_like(p_mass)
    compiled(selected_loop)(p_mass, q_mass, ns, cs, rho)
    compiled(threshold_loop)(rho, q_mass, ns, cs, beta)
    row = np.empty_like(p)
    compiled(row_loop)(p, q, group, rho, beta, draws, row)
    return row


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


def selected_loop(p: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray, rho: np.ndarray) -> None:
    """rho = clip(p/q, sigma, tau): steps 1 and 2. Every q > 0."""
    k = p.shape[0]
    rest = np.empty(k + 1)  # R
    before = np.empty(k + 1)  # Q
    rest[k], before[0] = 0.0, 0.0
    for j in range(k):
        before[j + 1] = before[j] + q[j]
        rest[k - 1 - j] = rest[k - j] + q[k - 1 - j]
    mean, hit = 0.0, 0.0
    for i in range(ns.shape[0]):
        mean += ns[i] * cs[i]
        if ns[i] > 0:
            hit += cs[i]
    h, least, prefix = 0, 0.0, 0.0
    for j in range(1, k + 1):
        prefix += p[j - 1]
        g = 0.0
        for i in range(ns.shape[0]):
            g += cs[i] * (1.0 - rest[j] ** ns[i])
        if g - prefix < least:
            h, least = j, g - prefix
    left = 0.0  # G_h, to its last digit also where it is tiny
    for i in range(ns.shape[0]):
        if ns[i] > 0 and h > 0:
            left -= cs[i] * np.expm1(ns[i] * np.log1p(-min(before[h], 1.0)))
    lowest = left / before[h] if h > 0 else 0.0
    tau = mean  # tau <= g'(0) = E[N], and with h = 0 no ratio is above that: so it stands for infinity
    for j in range(h - 1, -1, -1):  # groups 0..j are capped at t
        t = max(left / before[j + 1], lowest)
        if j + 1 < h:
            t = max(t, p[j + 1] / q[j + 1])
        if p[j] >= t * q[j]:
            tau = min(t, mean)
            break
        left -= p[j]
    missing = hit
    for j in range(k):
        missing -= min(p[j], tau * q[j])
    missing = max(missing, 0.0)
    sigma, p_low, q_low = 0.0, 0.0, 0.0
    for j in range(k - 1, -1, -1):  # groups j.. are floored at sigma
        p_low += min(p[j], tau * q[j])
        q_low += q[j]
        sigma = min((missing + p_low) / q_low, tau)
        if j > 0 and sigma * q[j - 1] <= min(p[j - 1], tau * q[j - 1]):
            break
    for j in range(k):
        rho[j] = min(max(p[j] / q[j], sigma), tau)


def threshold_loop(rho: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray, beta: np.ndarray) -> None:
    """beta[j] = the time at which the boundary after group j dies, 1 for those that never do: step 3.

    Block b lies to the left of boundary b. The heap holds every boundary, a dead one with an infinite key.
    """
    k = rho.shape[0]
    ends = np.empty(k, np.int64)
    n = 0
    for j in range(k):
        if j == k - 1 or rho[j] != rho[j + 1]:
            ends[n] = j
            n += 1
    mass, a, s = np.zeros(n), np.empty(n), np.zeros(n)
    rest = 0.0
    for b in range(n - 1, -1, -1):
        for j in range(ends[b], ends[b - 1] if b > 0 else -1, -1):
            mass[b] += q[j]
        rest += mass[b]
        a[b] = rho[ends[b]]
        log_left = np.log1p(-mass[b] / rest) if b < n - 1 and mass[b] < rest else -np.inf
        for i in range(ns.shape[0]):
            if ns[i] > 0:  # E[R^N] before the block less E[R^N] after it, without cancellation
                s[b] -= cs[i] * rest ** ns[i] * np.expm1(ns[i] * log_left)
        s[b] /= mass[b]
    before, after = np.arange(n) - 1, np.arange(n) + 1
    alive = np.full(n, True)
    key = np.full(n, np.inf)
    heap, where = np.arange(n - 1), np.arange(n - 1)
    changed, num_changed = np.arange(n - 1), n - 1  # boundaries whose key has to be computed
    changed = np.append(changed, np.zeros(3, np.int64))
    for b in range(n):
        beta[ends[b]] = 1.0
    time = 0.0
    while n > 1:
        for j in range(num_changed):
            b = changed[j]
            c = after[b]
            if not alive[b]:
                key[b] = np.inf
            elif a[b] <= a[c]:  # by rounding
                key[b] = time
            else:
                key[b] = (a[b] - a[c]) / (s[b] - s[c]) if s[b] > s[c] else np.inf
            i = where[b]
            while i > 0 and key[heap[(i - 1) // 2]] > key[b]:
                heap[i] = heap[(i - 1) // 2]
                where[heap[i]] = i
                i = (i - 1) // 2
            while 2 * i + 1 < n - 1:
                least = 2 * i + 1
                if least + 1 < n - 1 and key[heap[least + 1]] < key[heap[least]]:
                    least += 1
                if key[heap[least]] >= key[b]:
                    break
                heap[i] = heap[least]
                where[heap[i]] = i
                i = least
            heap[i] = b
            where[b] = i
        b = heap[0]
        if key[b] >= 1.0:
            break
        time = max(time, key[b])
        beta[ends[b]] = time
        left, c = before[b], after[b]
        total = mass[b] + mass[c]
        a[c] = (mass[b] * a[b] + mass[c] * a[c]) / total
        s[c] = (mass[b] * s[b] + mass[c] * s[c]) / total
        mass[c] = total
        before[c] = left
        alive[b] = False
        changed[0], num_changed = b, 1
        if left >= 0:
            after[left] = c
            changed[num_changed] = left
            num_changed += 1
        if c < n - 1:
            changed[num_changed] = c
            num_changed += 1


def row_loop(
    p: np.ndarray,
    q: np.ndarray,
    group: np.ndarray,
    rho: np.ndarray,
    beta: np.ndarray,
    draws: np.ndarray,
    row: np.ndarray,
) -> None:
    """The row: step 4."""
    p_total, q_total = 0.0, 0.0
    for x in range(p.shape[0]):
        p_total += np.float64(p[x])
        q_total += np.float64(q[x])
    d = draws.shape[0]
    accepted = np.zeros(d)
    ranks = np.empty(d, np.int64)
    for j in range(d):
        ranks[j] = group[draws[j]]
    by_rank = np.argsort(ranks)
    first, reached, rejected = d, 0.0, 1.0
    for i in range(d):
        first = min(first, by_rank[i])
        upto = 1.0
        if i + 1 < d:
            upto = reached
            for j in range(ranks[by_rank[i]], ranks[by_rank[i + 1]]):
                upto = max(upto, beta[j])
        if upto > reached:
            x = draws[first]
            p_x = np.float64(p[x]) / p_total
            s_x = rho[ranks[first]] * (np.float64(q[x]) / q_total)
            accepted[first] += (upto - reached) * (1.0 if p_x >= s_x else p_x / s_x)
            reached = upto
    for j in range(d):
        rejected -= accepted[j]
    residual = 0.0
    if rejected > 0.0:
        for x in range(p.shape[0]):
            p_x = np.float64(p[x]) / p_total
            if group[x] >= 0:
                p_x -= min(p_x, rho[group[x]] * (np.float64(q[x]) / q_total))
            row[x] = p_x
            residual += p_x
        if residual <= 0.0:  # p = m: reached with probability 0 up to rounding, and p serves
            residual = p_total
            for x in range(p.shape[0]):
                row[x] = p[x]
    scale = rejected / residual if residual > 0.0 else 0.0
    for x in range(p.shape[0]):
        row[x] = row[x] * scale if scale > 0.0 else 0.0
    for j in range(d):
        row[draws[j]] += accepted[j]
