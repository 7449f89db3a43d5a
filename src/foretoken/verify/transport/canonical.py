"""The canonical decomposition: importance-select one draft, then verify it alone."""

from dataclasses import dataclass

import numpy as np

from foretoken.core.laws import Law
from foretoken.verify.rejection import TINY
from foretoken.verify.transport.lp import best_flow
from foretoken.verify.transport.plan import SetSolver, feasible
from foretoken.verify.transport.sets import DrawSets, draw_sets


@dataclass(frozen=True, eq=False)
class Selection:
    """Pick i in A with w(i | A), accept it with min(1, p(i) / s(i)), s = sum_A Q(A) w(i | A); else norm((p - s)+).

    Lossless for any w: the pick has law s, and the rest is the standard rule for one draw of s.
    w: one number an entry of `sets`, summing to 1 over each set.
    """

    sets: DrawSets
    p: np.ndarray
    w: np.ndarray

    def _rule(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(acceptance of each token, residual, s)."""
        s = self.sets.per_token(self.w * self.sets.prob[self.sets.owner])
        accept = np.where(s > TINY, np.minimum(1, self.p / np.maximum(s, TINY)), 0.0)
        left = np.maximum(self.p - s, 0)
        total = left.sum()
        return accept, left / total if total > TINY else self.p, s

    def row(self, draws: tuple[int, ...]) -> np.ndarray:
        key = tuple(sorted(set(draws)))
        if key not in self.sets.index:  # not drawn under this law: p is always right
            return self.p
        accept, residual, _ = self._rule()
        entries = self.sets.owner == self.sets.index[key]
        tokens = self.sets.token[entries]
        row = np.zeros(self.sets.v)
        row[tokens] = self.w[entries] * accept[tokens]
        return row + max(1 - row.sum(), 0) * residual

    @property
    def acceptance(self) -> float:
        accept, residual, s = self._rule()
        kept = self.w * accept[self.sets.token]
        slack = (1 - self.sets.per_set(kept)) * self.sets.prob
        return float(np.minimum(self.p, s) @ (s > TINY) + slack @ self.sets.per_set(residual[self.sets.token]))


@dataclass(frozen=True)
class Canonical(SetSolver):
    """Optimal transport in two steps: select one of the drafts, then the standard rule for it.

    w(i | A) = S(i, A) / sum_j S(j, A), or uniform where that sum is 0, with S an optimum of the relaxed problem: these
    are the optimal selection weights (paper 003, Theorem 4.1; the decomposition is Khisti et al. 2025, Theorem 1).
    Law: any that can be enumerated. Optimal up to the linear program's tolerance, lossless exactly. Cost: as ot-lp.
    """

    name: str = "canonical"

    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Selection:
        sets = draw_sets(law, q)
        flow = feasible(sets, p, best_flow(sets, p))
        total = sets.per_set(flow)[sets.owner]
        size = np.bincount(sets.owner, minlength=len(sets.prob))[sets.owner]
        used = total > 1e-12 * sets.prob[sets.owner]
        return Selection(sets, p, np.where(used, flow / np.where(used, total, 1.0), 1 / size))
