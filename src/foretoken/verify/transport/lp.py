"""Optimal transport as a linear program."""

from dataclasses import dataclass

import numpy as np

from foretoken.core.laws import Law
from foretoken.verify.transport.plan import Plan, SetSolver, feasible
from foretoken.verify.transport.sets import DrawSets, draw_sets


@dataclass(frozen=True)
class LinearProgram(SetSolver):
    """The relaxed optimal transport problem, solved by HiGHS.

    max sum S(i, A), sum_i S(i, A) <= Q(A), sum_A S(i, A) <= p(i); paper 003, eq. 2 and 3, with draw tuples grouped by
    their set of tokens. Law: any that can be enumerated. Optimal up to HiGHS's tolerance (1e-9 asked for), lossless
    exactly. Cost: a linear program with (number of sets) (k + 1) entries: milliseconds for 10 tokens and 3 draws,
    minutes for 100 and 3. Raises ForetokenError where there are too many sets.
    """

    name: str = "ot-lp"

    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Plan:
        sets = draw_sets(law, q)
        return Plan(sets, p, feasible(sets, p, best_flow(sets, p)))


def best_flow(sets: DrawSets, p: np.ndarray) -> np.ndarray:
    """S, one number an entry."""
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
