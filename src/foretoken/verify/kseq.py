"""K-SEQ, the sequential rule of SpecTr: every i.i.d. draw faces the same test, against p / rho instead of p.

    beta(rho) = sum min(q, p / rho): the probability that a draw passes the test at rho
    c(rho) = (1 - (1 - beta)^k) / beta
    rho*: the number in [1, k] with c(rho) = rho, at which the test is made

    accept x_1, x_2, .. in turn, each with probability   a(x) = min(1, p(x) / (rho q(x)))
    when none passes draw from                           norm(p - c min(q, p / rho))

Why it is exact for any rho with c(rho) <= rho: a draw passes and is y with probability b(y) = min(q(y), p(y) / rho),
so the first draw that passes is y with probability b(y) (1 + (1 - beta) + .. + (1 - beta)^(k-1)) = c b(y). That is at
most c p(y) / rho <= p(y), the residual fills up p - c b, and its mass is 1 - c beta = (1 - beta)^k, the probability
that none passes. c grows with rho and c(k) <= k, so the root exists; the smaller rho, the more is accepted.

Source: Sun et al. 2023, SpecTr, arXiv:2310.15141, Algorithm 2 and Theorem 2.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from foretoken.core.laws import Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import total_of
from foretoken.verify.rule import TINY, Rule, as_numpy, count_chances

HALVINGS = 52  # of the interval [1, k] by bisection, as many as the fraction of a float64 has bits


@dataclass(frozen=True)
class KSeq(Rule):
    """Test every draw alike, as strictly as it takes to stay lossless.

    Law: k i.i.d. draws, or a random number of them, to each of which the rule for that number is applied.
    Accepts k draws with probability 1 - (1 - beta)^k, at least 1 - 1/e of the optimum; where their number is random,
    that bound does not hold (docs/theory.md, Theorem 4). One draw is decided as by the standard rule. Cost: O(v) for
    each of about ten Newton steps, and O(v + k) for the row, on the CPU: rows on an accelerator are copied there and
    back.
    """

    name: str = "kseq"

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        if not siblings.draws:
            return p
        row = as_numpy(p).copy()
        fill_row(row, as_numpy(siblings.q), np.array(siblings.draws, dtype=np.int64))
        return torch.from_numpy(row).to(p)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return 1 - E[(1 - beta)^N] over the number N of draws, with beta at the rho* for each N."""
        accepted = torch.zeros_like(p[:, 0])
        for n, count in enumerate(count_chances(law)):
            if n > 0 and count > 0:
                beta = _beta(p, q, solve_rho(p, q, n))
                accepted -= count * torch.expm1(n * torch.log1p(-beta))
        return accepted


def first_pass(beta: Float[Tensor, "*rows"], k: int) -> Float[Tensor, "*rows"]:
    """Return c(beta) = (1 - (1 - beta)^k) / beta without cancellation, which is k at beta = 0.

    beta: probabilities that a draw passes, float64, of any shape, which the result has too.
    k: the number of draws.
    """
    c = -torch.expm1(k * torch.log1p(-beta)) / beta
    return torch.where(beta > TINY, c, float(k))


def solve_rho(p: Float[Tensor, "*rows v"], q: Float[Tensor, "*rows v"], k: int) -> Float[Tensor, "*rows"]:
    """Return rho* by bisection, or up to 2^-52 of the interval more, so that c(rho) <= rho. O(v) per halving.

    p, q: distributions of the target and of the drafter, float64, normalised [*rows, v].
    k: the number of draws, at least 1.
    """
    low = torch.ones_like(p[..., 0])
    high = torch.full_like(low, k)
    high = torch.where(first_pass(_beta(p, q, low), k) <= 1, low, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = first_pass(_beta(p, q, middle), k) <= middle
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


def _beta(p: Tensor, q: Tensor, rho: Tensor) -> Tensor:
    return torch.minimum(q, p / rho[..., None]).sum(-1).clamp(max=1)


@partial(compiled, reorder_sums=True)
def fill_row(p: np.ndarray, q: np.ndarray, draws: np.ndarray) -> None:
    """Turn p into the row, in place, with Newton steps instead of the bisection of `solve_rho`.

    The root of f(rho) = rho - c(beta(rho)) is kept between `low` and `high`. With n(rho) = sum of p where p < rho q,
    d beta / d rho = -n / rho^2 and dc / d beta = (k (1 - beta)^(k-1) - c) / beta.

    p: target probabilities [v], float32 or float64, of any positive sum.
    q: draft probabilities [v], float32 or float64, of any positive sum.
    draws: token ids in draw order [k], int64, k > 0.
    """
    v, k = p.shape[0], draws.shape[0]
    p_sum, q_sum = total_of(p), total_of(q)
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
