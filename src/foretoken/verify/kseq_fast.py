"""The K-SEQ row in compiled passes, for CPU tensors: `kseq.plain_row` with Newton steps in place of bisection."""

import math

import numpy as np
from torch import Tensor, from_numpy

from foretoken.core.compiled import compiled
from foretoken.core.draws_fast import on_cpu
from foretoken.verify.rejection_fast import TINY


def fast_row(p: Tensor, q: Tensor, draws: tuple[int, ...]) -> Tensor | None:
    """The row, or None where the compiled loop does not serve: other devices or dtypes, or two dtypes."""
    if not on_cpu(p) or not on_cpu(q) or p.dtype != q.dtype:
        return None
    row = p.detach().numpy().copy()
    if draws:
        weights = np.ascontiguousarray(q.detach().numpy())
        compiled(kseq_loop, reorder_sums=True)(row, weights, np.array(draws, dtype=np.int64))
    return from_numpy(row)


def kseq_loop(p: np.ndarray, q: np.ndarray, draws: np.ndarray) -> None:
    """Turn p into the row, in place.

    The root of f(rho) = rho - c(beta(rho)) is kept between `low` and `high`. With n(rho) = sum of p where p < rho q,
    d beta / d rho = -n / rho^2 and dc / d beta = (k (1 - beta)^(k-1) - c) / beta.
    """
    v, k = p.shape[0], draws.shape[0]
    p_sum, q_sum = 0.0, 0.0
    for i in range(v):
        p_sum += np.float64(p[i])
        q_sum += np.float64(q[i])
    low, high, rho = 1.0, float(k), 1.0
    share, c = 0.0, 0.0
    for step in range(60):
        share = q_sum / (p_sum * rho)  # p / (rho q) = share * (raw p / raw q)
        mass, capped = 0.0, 0.0
        for i in range(v):
            b, draft = np.float64(p[i]) * share, np.float64(q[i])
            mass += min(b, draft)
            capped += b if b < draft else 0.0
        beta = min(mass / q_sum, 1.0)
        inside = TINY < beta < 1.0
        c = -math.expm1(k * math.log1p(-beta)) / beta if inside else (1.0 if beta >= 1.0 else float(k))
        f = rho - c
        if abs(f) <= 4e-16 * rho or (step == 0 and f >= 0.0):
            break
        if f < 0.0:
            low = rho
        else:
            high = rho
        slope = 1.0 + (k * (1.0 - beta) ** (k - 1) - c) / beta * capped / (q_sum * rho) if inside else 1.0
        newton = rho - f / slope if slope > 0.0 else low
        following = newton if low < newton < high else 0.5 * (low + high)
        if not low < following < high or step == 59:
            break
        rho = following
    c = min(c, rho)
    accepted = np.zeros(k)
    reach = 1.0
    for j in range(k):
        x = draws[j]
        draft = np.float64(q[x])
        accept = min(np.float64(p[x]) * share / draft, 1.0) if draft > TINY else 0.0
        accepted[j] = reach * accept
        reach -= accepted[j]
    total = 0.0
    for i in range(v):
        b = min(np.float64(p[i]) * share, np.float64(q[i])) / q_sum
        total += max(np.float64(p[i]) / p_sum - c * b, 0.0)
    scale = reach / total if total > TINY else 0.0
    if total <= TINY:
        c, scale = 0.0, reach
    for i in range(v):
        b = min(np.float64(p[i]) * share, np.float64(q[i])) / q_sum
        p[i] = max(np.float64(p[i]) / p_sum - c * b, 0.0) * scale
    for j in range(k):
        p[draws[j]] += accepted[j]
