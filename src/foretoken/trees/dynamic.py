"""Dynamic trees of the likeliest tokens: deterministic children, so exact match verifies them at any temperature.

A node's score is the product of the drafter's probabilities on its path: the probability that the node is accepted, if
the drafter were the target. `DynamicTree` is EAGLE-2 (Li et al. 2024): on each level, the `width` best new nodes get
their `width` likeliest children; in the end the `budget` best of all nodes are kept. `OptTree` is OPT-Tree (Wang et al.
2024): on each level, the new nodes among the `budget` best so far get children. It stops when a level raises the sum of
the `budget` best scores, the expected number of accepted draft tokens, by less than `threshold`.

A child's score is at most its parent's, so the best nodes form a tree. Nodes may be ranked and dropped after the tree
has grown because nothing is drawn: the tree is a function of the text so far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from foretoken.core.laws import Law, Opaque, weights_of
from foretoken.core.policy import Plan, TreePolicy
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.trees.forms import check_size

WIDTH, DEPTH = 10, 7
WIDE = 35
THRESHOLD, OPT_DEPTH = 0.2, 16

Scored = tuple[float, int]  # the state of a node: (ln of its score, its depth)
NEVER = 1e-300  # stands for probability 0, which has no logarithm


@dataclass(frozen=True)
class RankedTree(TreePolicy):
    """What both kinds of dynamic tree share.

    budget: the largest number of nodes that are kept, the root excluded.
    width: the largest number of children of a node.
    depth: the largest depth of the tree.

    Raises ForetokenError for a budget above MAX_NODES.
    """

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
        """The root, and the largest number of nodes that the drafter scores, or the budget if that is larger."""
        return 1 + max(self.budget, self.max_draws * self.depth)

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

    def keep(self, states: Sequence[Scored]) -> list[int]:
        return sorted([0, *best(states, 1, self.budget)])


def best(states: Sequence[Scored], first: int, number: int) -> list[int]:
    """Return the indices of the nodes with the highest scores, the best first.

    Among equal scores the earlier node comes first, so that a parent precedes its child.

    states: those of all nodes, in order.
    first: the index of the first node that is considered.
    number: the number of nodes to return; fewer are returned where there are no more.
    """
    scores = [score for score, _ in states]
    return sorted(range(first, len(states)), key=scores.__getitem__, reverse=True)[:number]  # stable


@dataclass(frozen=True)
class DynamicTree(RankedTree):
    """EAGLE-2: the best nodes of each level get children, and the best of all nodes are kept.

    A node that is not among the `budget` best of all nodes so far gets no children, since none of them could be kept.
    """

    width: int = WIDTH
    depth: int = DEPTH

    def select(self, states: Sequence[Scored], first: int) -> list[int]:
        if states[-1][1] >= self.depth:
            return []
        likely = best(states, 0, 1 + self.budget)
        return sorted([i for i in likely if i >= first][: self.max_draws])


@dataclass(frozen=True)
class ProductTree(DynamicTree):
    """The best nodes of a whole product of levels; this policy grows the first levels, and draft/product.py the others.

    wide: the number of children that are considered at a node of the other levels, whose distributions do not depend on
        the tokens between (s in Gumiho).
    """

    wide: int = WIDE


@dataclass(frozen=True)
class OptTree(RankedTree):
    """OPT-Tree: the new nodes among the best so far get children, as long as that raises the expected length enough.

    threshold: the least gain of the last level in expected accepted draft tokens for another level to be added.
    """

    width: int = WIDTH
    depth: int = OPT_DEPTH
    threshold: float = THRESHOLD

    @property
    def max_nodes(self) -> int:
        return 1 + self.budget * max(self.depth, 1)

    def select(self, states: Sequence[Scored], first: int) -> list[int]:
        if states[-1][1] >= self.depth:
            return []
        if first == 0:
            return [0]
        kept, before = best(states, 1, self.budget), best(states[:first], 1, self.budget)
        gained = self._length(states, kept) - self._length(states, before)
        return sorted(i for i in kept if i >= first) if gained >= self.threshold else []

    def _length(self, states: Sequence[Scored], nodes: Sequence[int]) -> float:
        """Return the sum of the scores of `nodes`: their expected number of accepted draft tokens."""
        return math.fsum(math.exp(states[i][0]) for i in nodes)
