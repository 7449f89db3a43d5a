"""Global resolution: the optimal transport of i.i.d. draws by two convex minimisations.

Let H be the set of tokens that minimises p(H) - q(H)^n, for n draws, and let a draw set A be *outer* if it is not
inside H. S(i, A) is the transport plan of plan.py. An optimal one gives all of the outer sets to their tokens outside
H, and reaches p(i) for all i in H with the sets inside H (Theorem 5.1).

1. Outer residuals r(i), i outside H: how much of p(i) the outer sets deliver. Feasible where r <= p, r(S) <= P(draws
   hit S) for every S outside H, with equality for the whole (Theorem 6.1).
2. Outer weights e^theta on a truncated set T of tokens outside H: minimise  sum_B M(B) log sum_{i in B} e^theta(i)
   - sum_T r(i) theta(i),  M(B) = P(the draws outside H are exactly B), B inside T.  S(i, A) / Q(A) = e^theta(i) /
   sum_B e^theta, B = A outside H.  (Theorem 6.4)
3. Inner weights on a truncated T inside H: minimise  sum_B M(B) log(1 + sum_{i in B} e^theta(i)) - sum_T p(i) theta(i),
   M(B) = P(the draws are exactly B).  S(i, A) / Q(A) = e^theta(i) / (1 + sum_A e^theta).  (Theorem 6.5)

Where the draws give no token, the token comes from the residual. The entries of the gradient are the errors of S in r
and in p; what the tokens outside of T should get is missing besides. Let e_1 and e_2 be the sums of these errors
outside and inside of H. The distribution of the emitted token is at most 2 (e_1 + e_2) from p in L1 norm: an error
counts where it is made, and in the residual (Lemma 6.6).

Source: Thomas and Pal 2025, Global Resolution: Optimal Multi-Draft Speculative Sampling via Convex Minimization,
arXiv:2511.15898, Algorithm 1 and the theorems named above.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretoken.core.laws import IID, Law
from foretoken.core.shapes import Float
from foretoken.verify.published.plan import Solver, residual_of
from foretoken.verify.published.sets import draw_sets, iid_probability, subsets
from foretoken.verify.rule import TINY

Residuals = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # (p, q, n) -> r, as `greedy_residuals`
MOST_STEPS = 25  # of L-BFGS-B
SHARE = 1 / 8  # of the tolerance, for each of two truncations and two gradients, whose errors all count twice
MOST_TOKENS = {1: 2000, 2: 150, 3: 45, 4: 25, 5: 18}  # n -> the most tokens in T: some 10,000 sets; not from the paper
MOST_TOKENS_BEYOND = 14  # the same for larger n
LARGEST = math.log(1e100)  # of |theta|


def greedy_residuals(p: np.ndarray, q: np.ndarray, n: int) -> np.ndarray:
    """Return outer residuals by the greedy polymatroid algorithm: differences of cumulative minima (Theorem 6.2).

    With G_j = P(a draw is among the first j tokens) and P_j = p of the first j, the first j tokens get at most
    f_j = P_j + min over i <= j of (G_i - P_i), and r_j = f_j - f_{j-1}. O(v).

    p, q: probabilities of the tokens outside H, in the order of falling p/q [m].
    n: the number of draws.
    """
    g, total = _prefix_curve(q, n), np.append(0.0, p.cumsum())
    most = total + np.minimum.accumulate(g - total)
    return np.clip(np.diff(most), 0, p)


def capped_residuals(p: np.ndarray, q: np.ndarray, n: int) -> np.ndarray:
    """Return outer residuals min(p, tau q) that sum to P(a draw is outside H): an interior point. O(v).

    They are feasible: over the capped tokens their running sum is a line below the concave G of `greedy_residuals`;
    after these it grows as p does, and is nearest to G at the end.

    p, q: probabilities of the tokens outside H, in the order of falling p/q [m].
    n: the number of draws.
    """
    goal = _prefix_curve(q, n)[-1]
    # Tokens by falling p / q: the first i are capped at tau q, the rest keep p.
    rest, capped = np.append(p[::-1].cumsum()[::-1], 0.0), np.append(0.0, q.cumsum())
    ratio = np.append(p / q, 0.0)
    reached = ratio * capped + rest  # the sum at tau = ratio_i, falling along i
    i = int(np.searchsorted(-reached, -goal, side="left"))
    tau = (goal - rest[i]) / capped[i] if 0 < i <= len(p) and capped[i] > 0 else np.inf
    return np.minimum(p, max(tau, 0.0) * q)


def _prefix_curve(q: np.ndarray, n: int) -> np.ndarray:
    return -np.expm1(n * np.log1p(-np.minimum(np.append(0.0, q.cumsum()), 1 - 2**-53)))


@dataclass(frozen=True, eq=False)
class Weights:
    """One convex problem solved. From a set B inside T token i is picked with weight(i) / (slack + sum_B weight).

    From other sets none is picked.
    """

    weight: np.ndarray  # e^theta of each token [v], 0 outside T
    known: np.ndarray  # T as a mask [v]
    slack: float  # 0 in the outer problem, 1 in the inner one
    given: np.ndarray  # the probability that each token is picked [v]
    error: float  # L1 distance of `given` from the goal: the gradient's norm, and the goal of the tokens outside T


@dataclass(frozen=True, eq=False)
class Resolution:
    """The solution of both problems."""

    p: np.ndarray  # the target's distribution [v]
    inside: np.ndarray  # H as a mask [v]
    outer: Weights
    inner: Weights
    residual: np.ndarray  # the distribution of the token where nothing is picked, or the pick is not kept [v]
    accept: np.ndarray  # the probability that each token is kept if it is picked [v]

    def row(self, draws: tuple[int, ...]) -> np.ndarray:
        tokens = np.array(sorted(set(draws)), dtype=np.int64)
        part = self.outer
        outside = tokens[~self.inside[tokens]]
        if len(outside):
            tokens = outside
        else:
            part = self.inner
        row = np.zeros(len(self.p))
        if len(tokens) and part.known[tokens].all():
            weight = part.weight[tokens]
            total = part.slack + weight.sum()
            if total > TINY:
                row[tokens] = weight / total * self.accept[tokens]
        return row + max(1 - row.sum(), 0) * self.residual

    @property
    def kept(self) -> float:
        """P(a token is picked and kept): the acceptance, but for residual tokens that happen to be among the draws."""
        return float(((self.outer.given + self.inner.given) * self.accept).sum())


@dataclass(frozen=True, eq=False)
class Failure:
    """The solver gave up: the token comes from p, whatever was drawn."""

    p: np.ndarray  # the target's distribution [v]
    reason: str  # why, for messages

    def row(self, draws: tuple[int, ...]) -> np.ndarray:
        return self.p


@dataclass(frozen=True)
class Resolving(Solver):
    """What the published rule and the thinned one share: their law is a fixed number n of i.i.d. draws."""

    def accepts(self, law: Law) -> bool:
        return isinstance(law, IID) and law.counts is None

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return the acceptance of the rule as it is, by one solution per pair and a sum over all draw sets.

        Raises ForetokenError where there are too many sets, as for ot-lp.
        """
        self.check_installed()
        found = torch.zeros(len(p), dtype=torch.float64)
        for i, pair in enumerate(zip(p.cpu().numpy(), q.cpu().numpy(), strict=True)):
            solution, sets = self.solve(*pair, law), draw_sets(law, pair[1])
            for draws, prob in zip(sets.index, sets.prob, strict=True):
                found[i] += prob * float(solution.row(draws)[list(draws)].sum())
        return found


@dataclass(frozen=True)
class GlobalResolution(Resolving):
    """Nearly optimal transport of n i.i.d. draws as published: APPROXIMATE, its law is off by up to `tolerance`.

    Law: a fixed number n of i.i.d. draws. Fails, as published, where T, cut to MOST_TOKENS for n, leaves out more than
    half of the tolerance, or the solution is not near enough after MOST_STEPS; then the row is p itself, which is exact
    and accepts little; `solve` returns the reason. Cost: milliseconds, where it succeeds. The engine refuses this rule:
    take global-resolution-thinned, which is exactly lossless.

    tolerance: the largest L1 distance from p of the emitted token's distribution. T takes the likeliest tokens until
        the truncated mass is at most SHARE of the tolerance, and both minimisations stop at a gradient of SHARE of it.
        The result is tested by the bound of Lemma 6.6 on all errors together, so one may exceed its share if others
        stay below theirs.
    """

    name: str = "global-resolution"
    tolerance: float = 1e-3

    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Resolution | Failure:
        """Return the solution, or a Failure that says why there is none."""
        inside, r, *both = problems(p, q, law.k, SHARE * self.tolerance, greedy_residuals)
        left_out = sum(problem.left_out for problem in both)
        if 2 * left_out > self.tolerance:
            most = f"{most_tokens(law.k)} tokens, the most for {law.k} draws"
            return Failure(p, f"{most}, leave out {left_out:.1e} of their mass")
        outer, inner = (minimise(problem, SHARE * self.tolerance) for problem in both)
        bound = 2 * (outer.error + inner.error)
        if bound > self.tolerance:
            return Failure(p, f"the law may be off by {bound:.1e} after {MOST_STEPS} steps")
        residual = residual_of(p, np.where(inside, p, r))  # equation 18
        return Resolution(p, inside, outer, inner, residual, np.ones_like(p))


@dataclass(frozen=True)
class ThinnedGlobalResolution(Resolving):
    """Global resolution made exactly lossless, by a test of the pick.

    Token i is picked with a known probability s(i). The pick is kept with probability min(1, p(i) / s(i)); else, and
    where nothing is picked, the token comes from norm((p - s)+). This is exact for any weights, so the rule never
    fails: what L-BFGS-B has after MOST_STEPS is used, and T is cut at MOST_TOKENS. Its acceptance is below the optimum
    by at most the truncated mass and the gradient's norm. The outer residuals are the capped ones: they lie inside the
    feasible region, the published ones at a corner of it. Law and cost: as `global-resolution`.

    solver_tolerance: each minimisation stops at a gradient of SHARE of this, and each truncation at such a mass.
    """

    name: str = "global-resolution-thinned"
    solver_tolerance: float = 1e-3

    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Resolution:
        tolerance = SHARE * self.solver_tolerance
        inside, _, *both = problems(p, q, law.k, tolerance, capped_residuals)
        outer, inner = (minimise(problem, tolerance) for problem in both)
        s = outer.given + inner.given
        accept = np.where(s > p, p / np.maximum(s, TINY), 1.0)
        return Resolution(p, inside, outer, inner, residual_of(p, s), accept)


def most_tokens(n: int) -> int:
    """Return the largest number of tokens in T for n draws."""
    return MOST_TOKENS.get(n, MOST_TOKENS_BEYOND)


@dataclass(frozen=True, eq=False)
class Problem:
    """One of the two convex problems, truncated to `tokens`."""

    q: np.ndarray  # the drafter's distribution [v]
    goal: np.ndarray  # the probability with which each token is to be picked, 0 on the other problem's side of H [v]
    tokens: np.ndarray  # T, the ids with the largest q first
    free: float  # q-mass of tokens that may be drawn besides: of H in the outer problem, 0 in the inner one
    n: int  # the number of draws
    slack: float  # 0 in the outer problem, 1 in the inner one
    left_out: float  # the truncated mass: the probability of the problem's draw sets that T leaves out


def problems(
    p: np.ndarray, q: np.ndarray, n: int, tolerance: float, residuals: Residuals
) -> tuple[np.ndarray, np.ndarray, Problem, Problem]:
    """Return H as a mask [v], the outer residuals r [v], the outer problem and the inner problem.

    p, q: probabilities of the target and of the drafter [v], float64, normalised.
    n: the number of draws.
    tolerance: the mass that each truncation leaves out at most, if MOST_TOKENS permits.
    residuals: what computes r.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(-np.where(q > 0, p / q, np.inf), kind="stable")
    order = order[q[order] > 0]  # a token that is never drawn belongs nowhere
    g, total = _prefix_curve(q[order], n), np.append(0.0, p[order].cumsum())
    start = int(np.argmin(g - total))
    outside, hall = order[:start], order[start:]
    inside = np.zeros(len(p), dtype=bool)
    inside[hall] = True
    r = np.zeros_like(p)
    r[outside] = residuals(p[outside], q[outside], n)
    outer = _truncated(q, r, outside, float(q[hall].sum()), n, 0.0, tolerance)
    return inside, r, outer, _truncated(q, np.where(inside, p, 0.0), hall, 0.0, n, 1.0, tolerance)


def _truncated(
    q: np.ndarray, goal: np.ndarray, among: np.ndarray, free: float, n: int, slack: float, tolerance: float
) -> Problem:
    tokens = among[np.argsort(-q[among], kind="stable")]
    mass = np.append(0.0, q[tokens].cumsum())
    missing = (free + mass[-1]) ** n - (free + mass) ** n
    size = min(int(np.argmax(missing <= tolerance)), most_tokens(n))
    return Problem(q, goal, tokens[:size], free, n, slack, float(missing[size]))


def minimise(problem: Problem, tolerance: float) -> Weights:
    """Minimise by L-BFGS-B until the gradient's L1 norm is below `tolerance`, in at most MOST_STEPS steps.

    problem: the outer or the inner one.
    """
    from scipy.optimize import minimize

    q, tokens, n, slack = problem.q, problem.tokens, problem.n, problem.slack
    groups = []  # (members as positions in tokens, probability), by size
    for size in range(1, min(n, len(tokens)) + 1):
        members = subsets(np.arange(len(tokens)), size)
        groups.append((members, iid_probability(q[tokens], members, IID(n), problem.free)))
    wanted = problem.goal[tokens]
    active = wanted > 0  # a token that is to get nothing has theta = -inf

    def given(weight: np.ndarray) -> tuple[float, np.ndarray]:
        value, got = 0.0, np.zeros(len(tokens))
        for members, prob in groups:
            inner = weight[members]
            total = slack + inner.sum(axis=1)
            some = total > TINY
            value += float(prob[some] @ np.log(total[some]))
            share = np.where(some, prob / np.where(some, total, 1.0), 0.0)[:, None] * inner
            got += np.bincount(members.ravel(), share.ravel(), len(tokens))
        return value, got

    def weights(theta: np.ndarray) -> np.ndarray:
        weight = np.zeros(len(tokens))
        weight[active] = np.exp(np.clip(theta, -LARGEST, LARGEST))
        return weight

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, got = given(weights(theta))
        return value - float(wanted[active] @ theta), (got - wanted)[active]

    theta = np.log(wanted[active] / q[tokens][active])  # the weights would be p / q if no two draws met in a set
    if len(theta):
        tight = {"maxiter": MOST_STEPS, "gtol": tolerance / len(theta), "ftol": 0.0}
        theta = minimize(objective, theta, jac=True, method="L-BFGS-B", options=tight).x
    got = given(weights(theta))[1]
    weight, picked, known = np.zeros(len(q)), np.zeros(len(q)), np.zeros(len(q), dtype=bool)
    weight[tokens], picked[tokens], known[tokens] = weights(theta), got, True
    return Weights(weight, known, slack, picked, float(np.abs(picked - problem.goal).sum()))
