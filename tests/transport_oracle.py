"""Exact transport in plain Python, quadratic in v: what the compiled loops are tested against."""

from collections.abc import Callable

import numpy as np

from foretoken.verify.ratio_groups import Groups


def plain_row(
    p: np.ndarray, q: np.ndarray, draws: np.ndarray, groups: Groups, ns: np.ndarray, cs: np.ndarray
) -> np.ndarray:
    """What `exact_transport.compiled_row` computes."""
    group, p_mass, q_mass = groups
    rho = plain_selected(p_mass, q_mass, ns, cs)
    beta = plain_thresholds(rho, q_mass, ns, cs)
    p, q = p / p.sum(dtype=np.float64), q / q.sum(dtype=np.float64)
    selected = np.where(group >= 0, rho[group] * q, 0.0)
    accepted = np.minimum(p, selected)
    row = np.zeros(len(p))
    ranks = sorted({int(group[x]) for x in draws})
    reached = 0.0
    for rank, following in zip(ranks, [*ranks, len(beta)][1:], strict=True):
        upto = max(reached, float(beta[rank:following].max()))  # the boundary at the end never dies
        picks = [x for x in draws if group[x] <= rank]
        for x in picks:
            row[x] += (upto - reached) / len(picks) * (accepted[x] / selected[x] if selected[x] > p[x] else 1.0)
        reached = upto
    residual = p - accepted
    return row + (1 - row.sum()) * (residual / residual.sum() if residual.sum() > 0 else p)


def plain_selected(p: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray) -> np.ndarray:
    """rho: the steps, then the cap and the floor, each found by bisection."""
    mean, hit = float(ns @ cs), float(cs[ns > 0].sum())
    hits = np.append(0.0, _g(np.cumsum(q)[:, None], ns) @ cs)
    spare = hits - np.append(0.0, np.cumsum(p))
    h = int(spare.argmin())
    rho = plain_steps(p, q, spare, h, mean)
    tau = mean
    if h > 0:
        tau = _bisect(lambda t: float((np.minimum(rho[:h], t) * q[:h]).sum() - hits[h]), mean)
    rho = np.minimum(rho, tau)
    sigma = _bisect(lambda s: float((q * np.maximum(rho, s)).sum()) - hit, tau)
    return np.maximum(rho, sigma)


def plain_steps(p: np.ndarray, q: np.ndarray, spare: np.ndarray, h: int, mean: float) -> np.ndarray:
    """Runs of equal rho, away from h: the ratio nearest to h, for as many groups as spare room below G allows."""
    with np.errstate(over="ignore"):
        ratio = np.minimum(p / q, mean)
    rho = np.empty(len(p))
    runs = [
        (range(h, len(p)), np.minimum.accumulate(spare[::-1])[::-1][1:]),  # room[j]: after group j
        (range(h - 1, -1, -1), np.minimum.accumulate(spare)),  # before it
    ]
    for groups, room in runs:
        step, spent = None, spare[h]
        for j in groups:
            if step is None or spent + abs(p[j] - step * q[j]) > room[j]:
                step = ratio[j]
            else:
                spent += abs(p[j] - step * q[j])
            rho[j] = step
    return rho


def plain_thresholds(rho: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray) -> np.ndarray:
    """beta: merge the two neighbours whose slopes of S - u G meet first, again and again."""
    ends = [j for j in range(len(rho)) if j == len(rho) - 1 or rho[j] != rho[j + 1]]
    beta = np.zeros(len(rho))
    rest = np.cumsum(q[::-1])[::-1]  # the q-mass from group j on
    time = 0.0
    while len(ends) > 1:
        blocks = [slice(start, end + 1) for start, end in zip([0, *(e + 1 for e in ends[:-1])], ends, strict=True)]
        a = [float((rho[b] * q[b]).sum() / q[b].sum()) for b in blocks]
        s = [float(rest[b.start] ** ns @ (cs * _g(q[b].sum() / rest[b.start], ns)) / q[b].sum()) for b in blocks]
        meet = [
            (a[i] - a[i + 1]) / (s[i] - s[i + 1]) if s[i] > s[i + 1] else (np.inf if a[i] > a[i + 1] else 0.0)
            for i in range(len(a) - 1)
        ]
        first = int(np.argmin(meet))
        if meet[first] >= 1:
            break
        time = max(time, meet[first])
        beta[ends.pop(first)] = time
    beta[ends] = 1.0
    return beta


def _g(x: np.ndarray | np.float64, ns: np.ndarray) -> np.ndarray:
    """1 - (1 - x)^n, n along the last dimension."""
    with np.errstate(divide="ignore", invalid="ignore"):  # log(0) is right
        return np.where(ns > 0, -np.expm1(ns * np.log1p(-np.minimum(x, 1.0))), 0.0)


def _bisect(rising: Callable[[float], float], high: float) -> float:
    """The least t in [0, high] with rising(t) >= 0, or high."""
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) >= 0 else (middle, high)
    return high
