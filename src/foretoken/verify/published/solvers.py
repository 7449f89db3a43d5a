"""Published solvers of the relaxed optimal transport problem that sets.py states: maximise sum S(i, A).

`ot-lp`: a linear program. `ot-maxflow`: a maximal flow from a source to the sets A, with capacity Q(A), from each set
to its tokens, and from each token i to a sink, with capacity p(i). `ot-maxflow-optimised`: two smaller flows instead.
`canonical`: select one of the draws, then verify it alone.

Sources: Thomas and Pal 2025, Global Resolution, arXiv:2511.15898, equations 2 and 3, section 5.2, Theorems 4.1 and 5.1,
here with draw tuples grouped by their set of tokens; Khisti et al. 2025, Multi-Draft Speculative Sampling: Canonical
Decomposition and Theoretical Limits, arXiv:2410.18234, Theorem 1.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from foretoken.core.laws import IID, Hub, Law, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.verify.published.plan import Plan, Solver, feasible
from foretoken.verify.published.sets import DrawSets, draw_sets, hall_set
from foretoken.verify.rule import TINY, Kinds

UNITS = 2**30  # of probability: SciPy's flows are 32-bit integers


@dataclass(frozen=True)
class SetSolver(Solver):
    """A solver that enumerates the draw sets, for any law but the opaque one."""

    laws: Kinds = (IID, WithoutReplacement, Hub)

    @abstractmethod
    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> "Plan | Halves": ...

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return the acceptance of the rule as it is, solver tolerance included, by one solution per pair."""
        self.check_installed()
        solved = [self.solve(*pair, law).acceptance for pair in zip(p.cpu().numpy(), q.cpu().numpy(), strict=True)]
        return torch.tensor(solved, dtype=torch.float64)


@dataclass(frozen=True)
class LinearProgram(SetSolver):
    """The relaxed optimal transport problem, solved by HiGHS.

    Law: any that can be enumerated. Optimal up to HiGHS's tolerance (1e-9 asked for), lossless exactly. Cost: a linear
    program with (number of sets) (k + 1) entries: milliseconds for 10 tokens and 3 draws, minutes for 100 and 3.
    """

    name: str = "ot-lp"

    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Plan:
        sets = draw_sets(law, q)
        return Plan(sets, p, feasible(sets, p, flow_by_program(sets, p)))


def flow_by_program(sets: DrawSets, p: np.ndarray) -> np.ndarray:
    """Return an optimal S by linear programming, one number per entry of `sets` [entries].

    sets: the draw sets.
    p: the target's distribution, float64, normalised [v].
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, vstack

    entries = np.arange(len(sets.owner))
    if not len(entries):
        return np.zeros(0)
    ones = np.ones(len(entries))
    by_set = csr_array((ones, (sets.owner, entries)), shape=(len(sets.prob), len(entries)))
    by_token = csr_array((ones, (sets.token, entries)), shape=(sets.v, len(entries)))
    tight = {"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9}
    solved = linprog(
        -ones, A_ub=vstack([by_set, by_token]), b_ub=np.concatenate([sets.prob, p]), method="highs", options=tight
    )
    return solved.x


@dataclass(frozen=True)
class MaxFlow(SetSolver):
    """The relaxed optimal transport problem as one maximal flow.

    It is found by SciPy's Dinic algorithm. Law: any that can be enumerated. Lossless exactly; capacities are rounded
    down to units of 2^-30, so that it accepts less than the optimum by at most (number of sets + v) 2^-30.
    """

    name: str = "ot-maxflow"

    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Plan:
        sets = draw_sets(law, q)
        everything = np.ones(len(sets.owner), dtype=bool)
        return Plan(sets, p, feasible(sets, p, maximal_flow(sets, p, everything)))


@dataclass(frozen=True)
class OptimisedMaxFlow(SetSolver):
    """Two smaller flows instead of one, outside and inside of H, the minimiser of p(H) - P(all draws are in H).

    An optimal S uses no token of H for a set that is not inside H. So the outer flow has the sets that are not inside
    H, with their tokens outside it, and the inner flow the sets inside. The row of a set that is not inside H needs the
    outer flow alone (equation 8), so the inner flow is computed only when it is needed. Law and accuracy: as `MaxFlow`.
    """

    name: str = "ot-maxflow-optimised"

    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> "Halves":
        sets = draw_sets(law, q)
        return Halves(sets, p, hall_set(sets, law, p, q))


@dataclass(frozen=True, eq=False)
class Halves:
    """The plans of the sets outside and inside of H, each made when one of its rows is asked for.

    The outer sets have together at most as much probability as the tokens outside H. What the outer flow leaves of it
    by rounding goes to these tokens, by the residual of p outside H; the inner sets emit what is then left of p.

    sets: the draw sets.
    p: the target's distribution, float64, normalised [v].
    hall: H as a mask [v].
    """

    sets: DrawSets
    p: np.ndarray
    hall: np.ndarray

    @cached_property
    def inside(self) -> np.ndarray:
        """The sets inside H, as a mask [sets]."""
        return self.sets.per_set(~self.hall[self.sets.token]) == 0

    @cached_property
    def outer(self) -> Plan:
        """The plan whose rows count for the sets that are not inside H."""
        p = np.where(self.hall, 0.0, self.p)
        used = ~self.inside[self.sets.owner] & ~self.hall[self.sets.token]
        return Plan(self.sets, p, feasible(self.sets, p, maximal_flow(self.sets, p, used)))

    @cached_property
    def inner(self) -> Plan:
        """The plan whose rows count for the sets inside H."""
        left = self.sets.prob[~self.inside].sum() - self.outer.flow.sum()
        emitted = self.sets.per_token(self.outer.flow) + left * self.outer.residual
        p = np.maximum(self.p - emitted, 0)
        used = self.inside[self.sets.owner]
        return Plan(self.sets, p, feasible(self.sets, p, maximal_flow(self.sets, p, used)))

    def row(self, draws: tuple[int, ...]) -> np.ndarray:
        number = self.sets.number(draws)
        if number is None:
            return self.p
        row = (self.inner if self.inside[number] else self.outer).row(draws)
        total = row.sum()
        return row / total if total > TINY else self.p  # a half whose tokens have no more probability than rounding

    @property
    def acceptance(self) -> float:
        """P(the emitted token is among the draws)."""
        return float(np.where(self.inside, self.inner.accepted, self.outer.accepted).sum())


def maximal_flow(sets: DrawSets, p: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return S by a maximal flow, one number per entry of `sets`; 0 for entries that are not `used` [entries].

    sets: the draw sets.
    p: the probability that each token can take up [v].
    used: which entries take part, as a mask [entries].
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    flow = np.zeros(len(sets.owner))
    if not used.any():
        return flow
    num_sets = len(sets.prob)
    source, sink = num_sets + sets.v, num_sets + sets.v + 1
    owner, token = sets.owner[used], num_sets + sets.token[used]
    touched_sets, touched = np.unique(owner), np.unique(token)
    tails = np.concatenate([np.full(len(touched_sets), source), owner, touched])
    heads = np.concatenate([touched_sets, token, np.full(len(touched), sink)])
    into, out = sets.prob[touched_sets], p[touched - num_sets]
    capacity = np.concatenate([into, sets.prob[owner], out])
    units = np.floor(capacity * UNITS).astype(np.int32)
    graph = csr_array((units, (tails, heads)), shape=(sink + 1, sink + 1))
    found = maximum_flow(graph, source, sink, method="dinic").flow
    flow[used] = np.asarray(found[owner, token]).ravel() / UNITS
    return flow


@dataclass(frozen=True)
class Canonical(SetSolver):
    """Optimal transport in two steps: select one of the draws, then the standard rule for it.

    Select i from A with probability w(i | A) and accept it with probability min(1, p(i) / s(i)), where
    s(i) = sum_A Q(A) w(i | A); else draw from norm((p - s)+). Lossless for any w: the selected token has law s, and the
    rest is the standard rule for one draw from s. Here w(i | A) = S(i, A) / sum_j S(j, A), or uniform where that sum is
    0, with S an optimum of the relaxed problem: these are the optimal selection weights. Law: any that can be
    enumerated. Optimal up to the linear program's tolerance, lossless exactly. Cost: as ot-lp.
    """

    name: str = "canonical"

    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Plan:
        sets = draw_sets(law, q)
        flow = feasible(sets, p, flow_by_program(sets, p))
        total = sets.per_set(flow)[sets.owner]
        size = np.bincount(sets.owner, minlength=len(sets.prob))[sets.owner]
        used = total > 1e-12 * sets.prob[sets.owner]
        picked = np.where(used, flow / np.where(used, total, 1.0), 1 / size) * sets.prob[sets.owner]
        s = sets.per_token(picked)
        return Plan(sets, p, picked * np.minimum(1, p / np.maximum(s, TINY))[sets.token])
