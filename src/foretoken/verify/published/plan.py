"""A transport plan, the rule that it gives, and the contract of the rules that solve for a plan.

A plan S(i, A) is the probability that the draws are the set A (sets.py) and token i in A is emitted because of it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.verify.published.sets import DrawSets
from foretoken.verify.rule import TINY, Rule


@runtime_checkable
class Solution(Protocol):
    """What a solver found for one p, q and law: the row for any draws of the law."""

    def row(self, draws: tuple[int, ...]) -> np.ndarray:
        """Return the distribution of the emitted token given the draws, float64 [v]; draws: token ids in any order."""
        ...


@dataclass(frozen=True, eq=False)
class Plan:
    """A feasible plan S. Its row for the set A is S(., A) / Q(A), and the rest up to 1 in proportion to the residual.

    The residual is p - sum_A S(., A), normalised.

    sets: the draw sets.
    p: the probability with which each token is to be emitted [v], of any sum.
    flow: S, one number per entry of `sets` [entries]; it keeps within the limits, see `feasible`.
    """

    sets: DrawSets
    p: np.ndarray
    flow: np.ndarray

    @cached_property
    def residual(self) -> np.ndarray:
        return residual_of(self.p, self.sets.per_token(self.flow))

    def row(self, draws: tuple[int, ...]) -> np.ndarray:
        number = self.sets.number(draws)
        if number is None:  # draws of (almost) no probability, for which any row is right
            return self.p
        entries = self.sets.owner == number
        row = np.zeros(self.sets.v)
        row[self.sets.token[entries]] = self.flow[entries] / self.sets.prob[number]
        return row + max(1 - row.sum(), 0) * self.residual

    @property
    def accepted(self) -> np.ndarray:
        """P(the draws are A, and the emitted token is one of them), for each set A [sets]."""
        given = self.sets.per_set(self.flow)
        again = self.sets.per_set(self.residual[self.sets.token])  # P(the residual's token is among the draws | A)
        return given + np.maximum(self.sets.prob - given, 0) * again

    @property
    def acceptance(self) -> float:
        """P(the emitted token is among the draws)."""
        return float(self.accepted.sum())


def residual_of(p: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Return norm((p - taken)+) [v], or p where nothing is left, since the residual then has probability 0.

    p: the probability with which each token is to be emitted [v].
    taken: the part of it that the draws account for [v].
    """
    left = np.maximum(p - taken, 0)
    total = left.sum()
    return left / total if total > TINY else p


def feasible(sets: DrawSets, p: np.ndarray, flow: np.ndarray) -> np.ndarray:
    """Return the flow, scaled down where it exceeds the probability of a set or of a token [entries].

    So the tolerance of a solver costs acceptance, never losslessness.

    sets: the draw sets.
    p: the probability with which each token is to be emitted [v].
    flow: a solver's S, one number per entry of `sets` [entries].
    """
    flow = np.maximum(flow, 0)
    flow = flow * _cut(sets.prob, sets.per_set(flow))[sets.owner]
    return flow * _cut(p, sets.per_token(flow))[sets.token]


def _cut(capacity: np.ndarray, used: np.ndarray) -> np.ndarray:
    return np.where(used > capacity, capacity / np.maximum(used, TINY), 1.0)


@dataclass(frozen=True)
class Solver(Rule, ABC):
    """A rule that solves for all draws of one p and q at once.

    `__call__` solves anew each time; for many draws of the same p and q call `plan` once and take its rows.
    """

    @abstractmethod
    def solve(self, p: np.ndarray, q: np.ndarray, law: Law) -> Solution:
        """Solve for all draws of one law.

        p, q: probabilities of the target and of the drafter [v], float64, normalised.
        law: one that the rule accepts.

        Raises ForetokenError where the law makes too many draw sets.
        """
        ...

    def check_installed(self) -> None:
        """Raise ForetokenError where scipy is not installed."""
        if find_spec("scipy") is None:
            raise ForetokenError(f"Verifier {self.name} needs scipy: pip install -e '.[transport]'.")

    def plan(self, p: Float[Tensor, " v"], q: Float[Tensor, " v"], law: Law) -> Solution:
        """Return the solution, which has the rows for all draws of `law`.

        p, q: probabilities of the target and of the drafter, of any positive sum [v].
        law: one that the rule accepts.

        Raises ForetokenError where scipy is not installed, or as `solve`.
        """
        self.check_installed()
        p_array, q_array = (x.detach().double().cpu().numpy() for x in (p, q))
        return self.solve(p_array / p_array.sum(), q_array / q_array.sum(), law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        row = self.plan(p, siblings.q, siblings.law).row(siblings.draws)
        return torch.from_numpy(row).to(p)
