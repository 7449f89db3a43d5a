"""K-SEQ, the sequential rule of SpecTr: every i.i.d. draw faces the same test, against p / rho instead of p.

    beta(rho) = sum min(q, p / rho),     c(rho) = (1 - (1 - beta)^k) / beta,     rho* in [1, k] solves c(rho) = rho

    accept x_1, x_2, .. in turn, each with probability   a(x) = min(1, p(x) / (rho q(x)))
    when none passes draw from                           norm(p - c min(q, p / rho))

Why it is exact for any rho with c(rho) <= rho: a draw passes and is y with probability b(y) = min(q(y), p(y) / rho),
so the first draw that passes is y with probability b(y) (1 + (1 - beta) + .. + (1 - beta)^(k-1)) = c b(y). That is at
most c p(y) / rho <= p(y), the residual fills up p - c b, and its mass is 1 - c beta = (1 - beta)^k, the probability
that none passes. c grows with rho and c(k) <= k, so the root exists; the smaller rho, the more is accepted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.laws import IID, Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily
from foretoken.verify.kseq_fast import fast_row
from foretoken.verify.rejection import is_single
from foretoken.verify.rejection_fast import TINY

HALVINGS = 52


def first_pass(beta: Float[Tensor, "*rows"], k: int) -> Float[Tensor, "*rows"]:
    """c(beta) = (1 - (1 - beta)^k) / beta, without cancellation; k at beta = 0."""
    c = -torch.expm1(k * torch.log1p(-beta)) / beta
    return torch.where(beta > TINY, c, float(k))


def solve_rho(p: Float[Tensor, "*rows v"], q: Float[Tensor, "*rows v"], k: int) -> Float[Tensor, "*rows"]:
    """rho* by bisection, from above; p and q in float64 and normalised. O(v) a halving."""
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


def plain_row(p: Float[Tensor, " v"], q: Float[Tensor, " v"], draws: tuple[int, ...]) -> Float[Tensor, " v"]:
    """The law of the token given the draws, in float64 inside, on any device and without a host synchronisation."""
    target, draft = p.double() / p.double().sum(), q.double() / q.double().sum()
    if not draws:
        return target.to(p.dtype)
    rho = solve_rho(target, draft, len(draws))
    passing = torch.minimum(draft, target / rho)
    c = torch.minimum(first_pass(passing.sum().clamp(max=1), len(draws)), rho)
    row = torch.zeros_like(target)
    reach = torch.ones_like(rho)
    for x in draws:
        accept = torch.where(draft[x] > TINY, passing[x] / draft[x], 0.0)
        row[x] += reach * accept
        reach = reach * (1 - accept)
    residual = (target - c * passing).clamp(min=0)
    total = residual.sum()
    # p == q leaves no residual; it is then reached with probability 0 up to rounding, and p serves.
    left = torch.where(total > TINY, residual / total, target)
    return (row + reach * left).to(p.dtype)


@dataclass(frozen=True)
class KSeq:
    """Test every draw alike with a(x) = min(1, p(x) / (rho q(x))), rho the smallest that stays lossless.

    rho = (1 - (1 - beta)^k) / beta, beta = sum min(q, p / rho); Sun et al. 2023 (SpecTr), Algorithm 2 and Theorem 2.
    Law: k i.i.d. draws, or a random number of them, to each of which the rule for that number is applied.
    Accepts with 1 - (1 - beta)^k, at least 1 - 1/e of the optimum. O(v) a Newton step, about ten of them, and O(v + k)
    for the row. One draw: the standard rule.
    """

    name: str = "kseq"
    laws: tuple[LawFamily, ...] = (IID,)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, IID) or is_single(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        row = fast_row(p, siblings.q, siblings.draws)
        return plain_row(p, siblings.q, siblings.draws) if row is None else row

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """1 - E[(1 - beta)^N], beta at the rho of each N."""
        counts = law.counts if isinstance(law, IID) and law.counts is not None else (0.0,) * law.k + (1.0,)
        accepted = torch.zeros_like(p[:, 0])
        for n, count in enumerate(counts):
            if n > 0 and count > 0:
                beta = _beta(p, q, solve_rho(p, q, n))
                accepted -= count * torch.expm1(n * torch.log1p(-beta))
        return accepted
