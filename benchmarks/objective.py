"""Choosing the draft probability a of randomised drafting, exactly, for one context or a workload of n.

With Z(a) = mean over contexts of sum min(p, a q) and lam = T(one draft) / T(one target forward):

    Toner et al. 2025, eq. 5   (a + Z(a)) / (1 + lam) + 1 - a   mean tokens per time; Lemma 4.4 minimises its negative
    ours                       (1 + Z(a)) / (1 + a lam)         expected tokens over expected time: the throughput

both in units of plain decoding's tokens/s. Z is concave and linear between the breakpoints p_i / q_i, so the first is
linear and the second monotone there: an optimum lies at a breakpoint or at 0 or 1. Proofs: docs/theory.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.shapes import Float

TIE = 1e-9  # relative; p and q that differ by rounding are equal
Objective = Callable[[Float[Tensor, " a"], Float[Tensor, " a"], float], Float[Tensor, " a"]]


def paper_rate(a: Float[Tensor, " a"], z: Float[Tensor, " a"], lam: float) -> Float[Tensor, " a"]:
    """The mean over steps of tokens / time."""
    return (a + z) / (1 + lam) + 1 - a


def throughput(a: Float[Tensor, " a"], z: Float[Tensor, " a"], lam: float) -> Float[Tensor, " a"]:
    """Expected tokens over expected time; without a draft drafter and target run at the same time."""
    return (1 + z) / (1 + a * lam)


OBJECTIVES: dict[str, Objective] = {"paper": paper_rate, "throughput": throughput}


def accepted(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], a: Float[Tensor, " a"]) -> Float[Tensor, " a"]:
    """Z(a), for many a at once. O(n v log(n v)) for all of them."""
    ratio, p_sum, q_sum = _sorted(p, q)
    below = torch.searchsorted(ratio, a.double(), right=True)
    return (p_sum[below] + a.double() * (q_sum[-1] - q_sum[below])) / len(p)


def breakpoints(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"]) -> Float[Tensor, " b"]:
    """0, 1, and the ratios p_i / q_i between them."""
    ratio, _, _ = _sorted(p, q)
    inside = ratio[(ratio > 0) & (ratio < 1)]
    return torch.cat([torch.zeros(1).double(), inside.unique(), torch.ones(1).double()])


def _sorted(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ratios in ascending order, and the sums of p and q over the tokens before each place."""
    p, q = p.double().flatten(), q.double().flatten()
    p, q = p[q > 0], q[q > 0]
    ratio, order = (p / q).sort()
    zero = torch.zeros(1, dtype=torch.float64)
    return ratio, torch.cat([zero, p[order].cumsum(0)]), torch.cat([zero, q[order].cumsum(0)])


@dataclass(frozen=True)
class Optimum:
    """a: the best draft probability, the smallest of equals. value: in tokens/s of plain decoding."""

    a: float
    value: float


def best(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], lam: float, objective: Objective) -> Optimum:
    """The exact optimum over all breakpoints."""
    points = breakpoints(p, q)
    values = objective(points, accepted(p, q, points), lam)
    i = int(values.argmax())
    return Optimum(float(points[i]), float(values[i]))


@dataclass(frozen=True)
class Conditions:
    """under: mean q-mass of the tokens with p > q; a < 1 beats a = 1 iff it is below a bound."""

    under: float
    paper: float
    corrected: float


def conditions(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], lam: float) -> Conditions:
    """Lemma 4.3's bound lam, and lam (1 + alpha) / (1 + lam) for the throughput."""
    under = float(torch.where(p >= q * (1 - TIE), q, 0.0).sum(1).mean())  # a tie is linear up to a = 1
    alpha = float(torch.minimum(p, q).sum(1).mean())
    return Conditions(under, lam, lam * (1 + alpha) / (1 + lam))
