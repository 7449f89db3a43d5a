"""Trees of independent paths behind a common one.

The paths are i.i.d. where the law of the draws is: equal beginnings share their nodes, and below a token that n paths
have in common n draws are made, one per path.

Source: Thomas et al. 2026, Dynamic Delayed Tree Expansion, arXiv:2602.16994, which branches behind a path of drafts;
Thomas and Pal 2026, Greedy Multi-Path Block Verification, arXiv:2602.16961, which branches at the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.core.laws import IID, Paths
from foretoken.core.policy import Plan, TreePolicy
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.trees.static import chain

Place = tuple[int, int]  # a node's depth, and how many paths lead through it


@dataclass(frozen=True)
class PathTree(TreePolicy):
    """One path, and k paths behind its end. The state of a node is its Place.

    trunk: the number of draft tokens of the common path; 0 if the paths begin at the root.
    k: the number of paths behind it.
    length: the number of draft tokens of each of these paths.
    """

    trunk: int
    k: int
    length: int

    def sizes(self) -> tuple[int, ...]:
        """Return the largest number of nodes besides the root when the tree is cut at depth 0, 1, .. trunk + length."""
        return (*range(self.trunk + 1), *(self.trunk + self.k * below for below in range(1, self.length + 1)))

    def root(self, past: None) -> Place:
        return 0, 1

    @property
    def max_nodes(self) -> int:
        return 1 + self.trunk + self.k * self.length

    @property
    def max_draws(self) -> int:
        return self.k

    def plan(self, states: Sequence[Place], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        plans: list[Plan | None] = []
        for depth, paths in states:
            draws = self.k if depth == self.trunk else paths
            law = Paths(draws) if family is IID and depth >= self.trunk else family(draws)
            plans.append(Plan(law, depth + 1))
        return plans

    def grow(
        self, plans: Sequence[Plan], q: Float[Tensor, "m v"] | None, draws: Sequence[tuple[int, ...]]
    ) -> list[list[Place]]:
        pairs = zip(plans, draws, strict=True)
        return [[(plan.memo, drawn.count(token)) for token in drawn] for plan, drawn in pairs]

    def select(self, states: Sequence[Place], first: int) -> list[int]:
        return [i for i in range(first, len(states)) if states[i][0] < self.trunk + self.length]


def delayed(depth: int, k: int, length: int) -> TreePolicy:
    """Make the tree that is one path of `depth` draft tokens, and behind it k paths of `length` draft tokens each."""
    return chain(depth + length) if k == 1 else PathTree(depth, k, length)
