"""Trees whose shape is fixed before anything is drawn: a chain, k children at every node, or any parent list.

Such a tree may end early where the drafter is unsure: a node gets no children if the product of q down to it is below a
floor. EAGLE-2 ranks nodes by this product (Li et al. 2024, EAGLE-2, arXiv:2406.16858). It is known before the children
are drawn, so the draws that are made keep their law. The floor is applied in draft/growth.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.policy import Plan, TreePolicy
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.trees.forms import check_parents


@dataclass(frozen=True)
class StaticTree(TreePolicy):
    """The shape with a given parent list. The state of a node is its index in that list.

    parents: the parent of each node: parents[0] = -1 (the root), parents[i] < i.
    floor: the least product of q down to a node for the node to get children, in (0, 1]; 0 if all get theirs.

    Raises ForetokenError for what is no parent list, and for a floor above 1 or below 0.
    """

    parents: tuple[int, ...]
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_parents(self.parents)
        if not 0 <= self.floor <= 1:
            raise ForetokenError(f"The confidence at which a tree ends is {self.floor}: it must be from 0 to 1.")

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self.parents]
        for i, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(i)
        return tuple(tuple(c) for c in children)

    def sizes(self) -> tuple[int, ...]:
        depths = [0] * len(self.parents)
        for i, parent in enumerate(self.parents[1:], start=1):
            depths[i] = depths[parent] + 1
        return tuple(sum(0 < depth <= d for depth in depths) for d in range(max(depths) + 1))

    def root(self, past: None) -> int:
        return 0

    @property
    def max_nodes(self) -> int:
        return len(self.parents)

    @property
    def max_draws(self) -> int:
        return max(len(c) for c in self._children)

    @cached_property
    def chain_depth(self) -> int:
        """The depth of a tree that is one path; 0 for any other shape."""
        return len(self.parents) - 1 if self.parents == tuple(range(-1, len(self.parents) - 1)) else 0

    def plan(self, states: Sequence[int], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        return [Plan(family(len(nodes)), nodes) if (nodes := self._children[node]) else None for node in states]

    def grow(
        self, plans: Sequence[Plan], q: Float[Tensor, "m v"] | None, draws: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        return [plan.memo for plan in plans]

    def select(self, states: Sequence[int], first: int) -> list[int]:
        return [i for i in range(first, len(states)) if self._children[states[i]]]


def chain(depth: int, floor: float = 0.0) -> StaticTree:
    """Make the tree that is one path of `depth` draft tokens; floor: as in StaticTree."""
    return StaticTree(tuple(range(-1, depth)), floor)


def kary(k: int, depth: int, floor: float = 0.0) -> StaticTree:
    """Make the tree with k children at every node above `depth`; floor: as in StaticTree."""
    parents, level = [-1], [0]
    for _ in range(depth):
        first = len(parents)
        parents += [node for node in level for _ in range(k)]
        level = list(range(first, len(parents)))
    return StaticTree(tuple(parents), floor)
