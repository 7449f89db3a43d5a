"""Optimal transport as a maximal flow: source -> sets A, capacity Q(A) -> their tokens -> sink, capacity p(i)."""

from dataclasses import dataclass

import numpy as np

from foretoken.core.laws import Law
from foretoken.verify.transport.plan import Plan, SetSolver, feasible
from foretoken.verify.transport.sets import DrawSets, draw_sets, hall_set

UNITS = 2**30  # of probability: SciPy's flows are 32-bit integers


@dataclass(frozen=True)
class MaxFlow(SetSolver):
    """The relaxed optimal transport problem as one maximal flow.

    Paper 003, s. 5.2, with draw tuples grouped by their set of tokens, and SciPy's Dinic algorithm. Law: any that can
    be enumerated. Lossless exactly; capacities are rounded down to units of 2^-30, so that it accepts less than the
    optimum by at most (number of sets + v) 2^-30. Raises ForetokenError where there are too many sets.
    """

    name: str = "ot-maxflow"

    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Plan:
        sets = draw_sets(law, q)
        everything = np.ones(len(sets.owner), dtype=bool)
        return Plan(sets, p, feasible(sets, p, best_flow(sets, p, everything)))


@dataclass(frozen=True)
class OptimisedMaxFlow(SetSolver):
    """Two smaller flows, outside and inside of H, the minimiser of p(H) - P(all draws in H).

    Paper 003, Theorem 5.1: an optimal S uses no token of H for a set that is not inside H. So the outer flow has the
    sets that are not inside H, with their tokens outside it, and the inner flow the sets inside. The rest as `MaxFlow`.
    """

    name: str = "ot-maxflow-optimised"

    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Plan:
        sets = draw_sets(law, q)
        in_hall = hall_set(sets, law, p, q)[sets.token]
        inside = sets.per_set(~in_hall)[sets.owner] == 0
        flow = best_flow(sets, p, ~inside & ~in_hall) + best_flow(sets, p, inside)
        return Plan(sets, p, feasible(sets, p, flow))


def best_flow(sets: DrawSets, p: np.ndarray, used: np.ndarray) -> np.ndarray:
    """S, one number an entry of `sets`; 0 for entries that are not `used`."""
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
