"""A transport plan S(i, A), the rule that it gives, and the contract of the rules that solve for a plan."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily
from foretoken.verify.published.sets import DrawSets
from foretoken.verify.rejection import TINY


@runtime_checkable
class Solution(Protocol):
    """What a solver found for one p, q and law: the row for any draws."""

    def row(self, draws: tuple[int, ...]) -> np.ndarray:
        """Return the law of the token given the draws [v], float64."""
        ...


@runtime_checkable
class SetSolution(Solution, Protocol):
    """A solution whose acceptance is known."""

    @property
    def acceptance(self) -> float:
        """P(the emitted token is among the draws)."""
        ...


@dataclass(frozen=True, eq=False)
class Plan:
    """row = S(., A) / Q(A) plus what is missing to 1 times the residual, p - sum_A S normalised.

    p: what is to be emitted [v], of any sum
    flow: S, one number per entry of `sets`; feasible, see `feasible`
    """

    sets: DrawSets
    p: np.ndarray
    flow: np.ndarray

    @cached_property
    def residual(self) -> np.ndarray:
        return residual_of(self.p, self.sets.per_token(self.flow))

    def row(self, draws: tuple[int, ...]) -> np.ndarray:
        number = self.sets.number(draws)
        if number is None:  # nothing is known of it, and p is always right
            return self.p
        entries = self.sets.owner == number
        row = np.zeros(self.sets.v)
        row[self.sets.token[entries]] = self.flow[entries] / self.sets.prob[number]
        return row + max(1 - row.sum(), 0) * self.residual

    @property
    def accepted(self) -> np.ndarray:
        """Return P(the draws are A, and the emitted token is one of them), for each set A [sets]."""
        given = self.sets.per_set(self.flow)
        again = self.sets.per_set(self.residual[self.sets.token])  # P(the residual's token is among the draws | A)
        return given + np.maximum(self.sets.prob - given, 0) * again

    @property
    def acceptance(self) -> float:
        """P(the emitted token is among the draws)."""
        return float(self.accepted.sum())


def residual_of(p: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Return norm((p - taken)+) [v]; p where nothing is left, which is then reached with probability 0."""
    left = np.maximum(p - taken, 0)
    total = left.sum()
    return left / total if total > TINY else p


def feasible(sets: DrawSets, p: np.ndarray, flow: np.ndarray) -> np.ndarray:
    """Return the flow, cut where it breaks a constraint by more than rounding.

    A solver's tolerance then costs acceptance, never losslessness.
    """
    flow = np.maximum(flow, 0)
    flow = flow * _cut(sets.prob, sets.per_set(flow))[sets.owner]
    return flow * _cut(p, sets.per_token(flow))[sets.token]


def _cut(capacity: np.ndarray, used: np.ndarray) -> np.ndarray:
    return np.where(used > capacity, capacity / np.maximum(used, TINY), 1.0)


class Solver(ABC):
    """A rule that solves for all draws of one p and q at once.

    `__call__` solves anew each time; for many draws of the same p and q call `plan` once and take its rows.
    """

    name: str
    laws: ClassVar[tuple[LawFamily, ...]]

    @abstractmethod
    def accepts(self, law: Law) -> bool: ...

    @abstractmethod
    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Solution:
        """Solve for p and q [v], float64, normalised."""
        ...

    def check_installed(self) -> None:
        if find_spec("scipy") is None:
            raise ForetokenError(f"Verifier {self.name} needs scipy: pip install -e '.[transport]'.")

    def plan(self, p: Float[Tensor, " v"], q: Float[Tensor, " v"], law: Law) -> Solution:
        """Return the rows for all draws of `law` at p and q."""
        self.check_installed()
        p_array, q_array = (x.detach().double().cpu().numpy() for x in (p, q))
        return self.solve(p_array / p_array.sum(), q_array / q_array.sum(), law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        row = self.plan(p, siblings.q, siblings.law).row(siblings.draws)
        return torch.from_numpy(row).to(p)


def over_sets(solution: Solution, sets: DrawSets) -> float:
    """Return P(the emitted token is among the draws), set by set. O(sets v)."""
    return sum(
        prob * float(solution.row(draws)[list(draws)].sum()) for draws, prob in zip(sets.index, sets.prob, strict=True)
    )


class SetSolver(Solver):
    """A solver that enumerates the draw sets, for any law that has them."""

    laws: ClassVar[tuple[LawFamily, ...]] = (IID, WithoutReplacement, Hub)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, IID | WithoutReplacement | Hub)

    @abstractmethod
    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> SetSolution: ...

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Solve once per pair and sum over all draws: exact for the rule as it is."""
        self.check_installed()
        solved = [self.solve(*pair, law).acceptance for pair in zip(p.cpu().numpy(), q.cpu().numpy(), strict=True)]
        return torch.tensor(solved, dtype=torch.float64)
