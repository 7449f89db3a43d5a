"""Trees whose shape is fixed before anything is drawn: chain, k-ary, any parent list."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from foretoken.core.laws import Law
from foretoken.core.policy import Plan
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.trees.grammar import check_parents


@dataclass(frozen=True)
class StaticTree:
    """The shape with the given parent list: parents[0] = -1 (the root), parents[i] < i. State: a shape node."""

    parents: tuple[int, ...]
    floor: float = field(default=0.0, init=False)
    weighs: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_parents(self.parents)

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self.parents]
        for i, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(i)
        return tuple(tuple(c) for c in children)

    def sizes(self) -> tuple[int, ...]:
        """Nodes besides the root when the tree is cut at depth 0, 1, .. its own."""
        depths = [0] * len(self.parents)
        for i, parent in enumerate(self.parents[1:], start=1):
            depths[i] = depths[parent] + 1
        return tuple(sum(0 < depth <= d for depth in depths) for d in range(max(depths) + 1))

    def root(self, past: None) -> int:
        return 0

    def past(self, states: Sequence[Any]) -> None:
        return None

    @property
    def max_nodes(self) -> int:
        return len(self.parents)

    @property
    def max_draws(self) -> int:
        return max(len(c) for c in self._children)

    @cached_property
    def chain_depth(self) -> int:
        """Of a path its length, else 0."""
        return len(self.parents) - 1 if self.parents == tuple(range(-1, len(self.parents) - 1)) else 0

    def laws(self, family: LawFamily) -> tuple[Law, ...]:
        return (family(self.max_draws),)

    def at(self, family: LawFamily, temperature: float) -> "StaticTree":
        return self

    def plan(self, states: Sequence[int], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        return [Plan(family(len(nodes)), nodes) if (nodes := self._children[state]) else None for state in states]

    def grow(
        self, plans: Sequence[Plan], q: Float[Tensor, "m v"] | None, draws: Sequence[tuple[int, ...]]
    ) -> Sequence[Sequence[Any]]:
        return [plan.memo for plan in plans]

    def select(self, states: Sequence[int], first: int) -> list[int]:
        return [i for i in range(first, len(states)) if self._children[states[i]]]

    def keep(self, states: Sequence[Any]) -> None:
        return None


def chain(depth: int) -> StaticTree:
    """One path of `depth` drafted tokens."""
    return StaticTree(tuple(range(-1, depth)))


def kary(k: int, depth: int) -> StaticTree:
    """k children at every node down to `depth`."""
    parents, level = [-1], [0]
    for _ in range(depth):
        first = len(parents)
        parents += [node for node in level for _ in range(k)]
        level = list(range(first, len(parents)))
    return StaticTree(tuple(parents))
