"""The compiled loops of exact transport; `exact.py` holds what they compute, in plain Python.

Groups of tokens stand in the order of falling p/q; p and q are a group's masses, in float64. `ns` and `cs` are the
possible numbers of draws and their probabilities. R_j is the q-mass after group j, so that G_j = 1 - E[R_j^N].
"""

import numpy as np

from foretoken.kernel.compile import compiled
from foretoken.verify.transport.groups import Groups

SMALLEST = 1e-290  # of a residual mass, whose inverse would not be finite much below


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


def selected_loop(p: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray, rho: np.ndarray) -> None:
    """rho: the steps, the cap and the floor. Every q > 0."""
    k = p.shape[0]
    spare, rest = np.empty(k + 1), np.empty(k + 1)  # G - P, and R
    rest[k] = 0.0
    for j in range(k - 1, -1, -1):
        rest[j] = rest[j + 1] + q[j]
    mean, hit = 0.0, 0.0
    for i in range(ns.shape[0]):
        mean += ns[i] * cs[i]
        if ns[i] > 0:
            hit += cs[i]
    h, prefix = 0, 0.0
    spare[0] = 0.0
    for j in range(1, k + 1):
        prefix += p[j - 1]
        g = 1.0
        for i in range(ns.shape[0]):
            power, square, bits = cs[i], rest[j], ns[i]
            while bits > 0:  # cs * rest^ns, at a quarter of the time of pow
                if bits & 1:
                    power *= square
                square *= square
                bits >>= 1
            g -= power
        spare[j] = g - prefix
        if spare[j] < spare[h]:
            h = j
    # Steps: away from h, each as long as the curve stays below G there and can stay below it further on.
    for j in range(k - 1, h, -1):
        spare[j] = min(spare[j], spare[j + 1])
    for j in range(1, h):
        spare[j] = min(spare[j], spare[j - 1])
    spent, j = spare[h], h
    while j < k:
        step = min(p[j] / q[j], mean)
        rho[j] = step
        j += 1
        while j < k and spent + (step * q[j] - p[j]) <= spare[j + 1]:
            spent += max(step * q[j] - p[j], 0.0)
            rho[j] = step
            j += 1
    spent, j = spare[h], h - 1
    while j >= 0:
        step = min(p[j] / q[j], mean)
        rho[j] = step
        j -= 1
        while j >= 0 and spent + (p[j] - step * q[j]) <= spare[j]:
            spent += max(p[j] - step * q[j], 0.0)
            rho[j] = step
            j -= 1
    before, left = 0.0, 0.0  # Q_h, and G_h to its last digit also where it is tiny
    for j in range(h):
        before += q[j]
    for i in range(ns.shape[0]):
        if ns[i] > 0 and h > 0:
            left -= cs[i] * np.expm1(ns[i] * np.log1p(-min(before, 1.0)))
    lowest = left / before if h > 0 else 0.0
    tau = mean  # tau <= g'(0) = E[N], and with h = 0 no ratio is above that: so it stands for infinity
    for j in range(h - 1, -1, -1):  # groups 0..j are capped at t
        t = max(left / before, lowest)
        if j + 1 < h:
            t = max(t, rho[j + 1])
        if rho[j] >= t:
            tau = min(t, mean)
            break
        left -= rho[j] * q[j]
        before -= q[j]
    missing = hit
    for j in range(k):
        rho[j] = min(rho[j], tau)
        missing -= rho[j] * q[j]
    missing = max(missing, 0.0)
    sigma, s_low, q_low = 0.0, 0.0, 0.0
    for j in range(k - 1, -1, -1):  # groups j.. are floored at sigma
        s_low += rho[j] * q[j]
        q_low += q[j]
        sigma = min((missing + s_low) / q_low, tau)
        if j > 0 and sigma <= rho[j - 1]:
            break
    for j in range(k):
        rho[j] = max(rho[j], sigma)


def threshold_loop(rho: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray, beta: np.ndarray) -> None:
    """beta[j] = the time at which the boundary after group j dies, 1 for those that never do.

    Block b lies to the left of boundary b, until it dies. `death` is when it would if nothing else died; what dies
    beside it can only bring that forward. They are queued in lists by span of time, in the span at hand in a heap.
    """
    k = rho.shape[0]
    ends = np.empty(k, np.int64)
    n = 0
    for j in range(k):
        if j == k - 1 or rho[j] != rho[j + 1]:
            ends[n] = j
            n += 1
    mass, a, s = np.zeros(n), np.empty(n), np.zeros(n)
    after = 0.0
    for b in range(n - 1, -1, -1):
        for j in range(ends[b], ends[b - 1] if b > 0 else -1, -1):
            mass[b] += q[j]
        rest = after + mass[b]
        a[b] = rho[ends[b]]
        for i in range(ns.shape[0]):
            if ns[i] > 0:  # (rest^n - after^n) / (rest - after), from the leading bit of n down, without a difference
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
                s[b] += slope
        after = rest

    left, right = np.arange(n) - 1, np.arange(n) + 1
    death = np.full(n, np.inf)  # -1 once it has come
    num_spans = n // 4 + 1
    newest = np.full(num_spans, -1)  # entry of each span, and from there on by `older`
    older, who, num_entries = np.empty(3 * n, np.int64), np.empty(3 * n, np.int64), 0
    when, whose, size = np.empty(3 * n), np.empty(3 * n, np.int64), 0  # the heap; an entry with an old time is void
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
                t = time  # where the slopes of S meet by rounding
                if a[b] > a[c]:
                    t = max((a[b] - a[c]) / (s[b] - s[c]), time) if s[b] > s[c] else np.inf
                if t >= min(death[b], 1.0):
                    continue
                death[b] = t
                later = int(t * num_spans)
                if later > span:
                    who[num_entries], older[num_entries] = b, newest[later]
                    newest[later] = num_entries
                    num_entries += 1
                    continue
                at = size
                while at > 0 and when[(at - 1) // 2] > t:
                    when[at], whose[at] = when[(at - 1) // 2], whose[(at - 1) // 2]
                    at = (at - 1) // 2
                when[at], whose[at] = t, b
                size += 1
            num_changed = 0
            if size == 0:
                break
            b, t = whose[0], when[0]
            size -= 1
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
            if death[b] != t:
                continue
            time = beta[ends[b]] = t
            death[b] = -1.0
            before, c = left[b], right[b]
            total = mass[b] + mass[c]
            a[c] = (mass[b] * a[b] + mass[c] * a[c]) / total
            s[c] = (mass[b] * s[b] + mass[c] * s[c]) / total
            mass[c] = total
            left[c] = before
            if before >= 0:
                right[before] = c
                changed[0], num_changed = before, 1
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
        if residual <= SMALLEST:  # p = m: reached with probability 0 up to rounding, and p serves
            residual = p_total
            for x in range(p.shape[0]):
                row[x] = p[x]
    scale = rejected / residual if residual > 0.0 else 0.0
    for x in range(p.shape[0]):
        row[x] = row[x] * scale if scale > 0.0 else 0.0
    for j in range(d):
        row[draws[j]] += accepted[j]
