"""Dynamic trees of the likeliest tokens: deterministic children, so exact match verifies them at any temperature.

A node's score is the product of the drafter's probabilities on its path, its chance to be accepted if the drafter were
the target. `DynamicTree` is EAGLE-2 (Li et al. 2024): each level, the `width` best new nodes get their `width`
likeliest children; in the end the `budget` best of all nodes are kept. `OptTree` is OPT-Tree (Wang et al. 2024): each
level, the new nodes among the `budget` best so far get children, until a level raises the sum of the `budget` best
scores, the expected number of accepted drafts, by less than `threshold`.

A child's score is at most its parent's, so the best nodes form a tree. Re-ranking after the fact is allowed because
nothing is drawn: the tree is a function of the text so far.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from foretoken.core.laws import Law, Opaque, weights_of
from foretoken.core.policy import Plan, TreePolicy
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.trees.grammar import check_size

WIDTH, DEPTH = 10, 7
WIDE = 35
THRESHOLD, OPT_DEPTH = 0.2, 16

Scored = tuple[float, int]  # (ln of the product of probabilities down to a node, its level): its state
NEVER = 1e-300  # stands for probability 0, which has no logarithm


@dataclass(frozen=True)
class RankedTree(TreePolicy):
    """At most `budget` nodes besides the root, on at most `depth` levels; up to `width` children at a node."""

    budget: int
    width: int
    depth: int

    def __post_init__(self) -> None:
        check_size(self.budget)

    @property
    def weighs(self) -> bool:
        return True

    def root(self, past: None) -> Scored:
        return 0.0, 0

    @property
    def max_nodes(self) -> int:
        """Root and what the drafter scores included, which may be more than is kept."""
        return 1 + max(self.budget, self.max_scored * self.depth)

    @property
    @abstractmethod
    def max_scored(self) -> int:
        """Nodes of one level that get children."""

    @property
    def max_draws(self) -> int:
        return min(self.width, self.budget)

    def sizes(self) -> tuple[int, ...]:
        return tuple(min(self.budget, self.width * d) for d in range(self.depth + 1))

    def laws(self, family: LawFamily) -> tuple[Law, ...]:
        return (Opaque(self.max_draws),)

    def plan(self, states: Sequence[Scored], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        law = Opaque(self.max_draws)
        return [Plan(law, state) for state in states]

    def grow(
        self, plans: Sequence[Plan], q: Float[Tensor, "m v"] | None, draws: Sequence[tuple[int, ...]]
    ) -> list[list[Scored]]:
        assert q is not None
        level = plans[0].memo[1] + 1
        scores = np.log(np.maximum(weights_of(draws, q), NEVER)) + np.array([[plan.memo[0]] for plan in plans])
        return [[(score, level) for score in row] for row in scores.tolist()]

    @abstractmethod
    def select(self, states: Sequence[Scored], first: int) -> list[int]: ...

    def keep(self, states: Sequence[Scored]) -> list[int]:
        return sorted([0, *best(states, 1, self.budget)])


def best(states: Sequence[Scored], first: int, number: int) -> list[int]:
    """Of the nodes from `first` on those with the highest scores; of equals the earlier, so that a parent precedes its
    child."""
    scores = [score for score, _ in states]
    return sorted(range(first, len(states)), key=scores.__getitem__, reverse=True)[:number]  # stable


@dataclass(frozen=True)
class DynamicTree(RankedTree):
    """EAGLE-2: expand the best of each level, keep the best of all. A node that is not among the best of all so far is
    left without children: none of them could be kept, nor any below a node that is less likely."""

    width: int = WIDTH
    depth: int = DEPTH

    @property
    def max_scored(self) -> int:
        return self.max_draws

    def select(self, states: Sequence[Scored], first: int) -> list[int]:
        if states[-1][1] >= self.depth:
            return []
        likely = best(states, 0, 1 + self.budget)
        return sorted([i for i in likely if i >= first][: self.max_draws])


@dataclass(frozen=True)
class ProductTree(DynamicTree):
    """The best of a whole product of levels, of which this grows the first: see draft/product.py.

    wide: children considered at a node of the other levels, which do not depend on the tokens between (Gumiho's s).
    """

    wide: int = WIDE


@dataclass(frozen=True)
class OptTree(RankedTree):
    """OPT-Tree: expand what is among the best so far, as long as it raises the expected length."""

    width: int = WIDTH
    depth: int = OPT_DEPTH
    threshold: float = THRESHOLD

    @property
    def max_scored(self) -> int:
        return self.budget

    def select(self, states: Sequence[Scored], first: int) -> list[int]:
        if states[-1][1] >= self.depth:
            return []
        if first == 0:
            return [0]
        kept, before = best(states, 1, self.budget), best(states[:first], 1, self.budget)
        gained = self._length(states, kept) - self._length(states, before)
        return sorted(i for i in kept if i >= first) if gained >= self.threshold else []

    def _length(self, states: Sequence[Scored], nodes: Sequence[int]) -> float:
        return math.fsum(math.exp(states[i][0]) for i in nodes)
