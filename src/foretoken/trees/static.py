"""Trees whose shape is fixed before anything is drawn: chain, k-ary, any parent list."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Law
from foretoken.core.policy import Plan
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily

MAX_NODES = 4096


@dataclass(frozen=True)
class StaticTree:
    """The shape with the given parent list: parents[0] = -1 (the root), parents[i] < i. State: a shape node."""

    parents: tuple[int, ...]
    floor: float = field(default=0.0, init=False)
    weighs: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ForetokenError("A tree's parent list must start with -1, the root.")
        for i, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < i:
                raise ForetokenError(f"Tree node {i} has parent {parent}: a parent must come before its child.")

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
        if len(parents) > MAX_NODES:
            raise ForetokenError(f"Tree kary:{k}x{depth} has more than {MAX_NODES} nodes: make it smaller.")
        level = list(range(first, len(parents)))
    return StaticTree(tuple(parents))


def from_file(path: str) -> StaticTree:
    """The parent list in a JSON file, e.g. [-1, 0, 0, 1]."""
    try:
        parents = json.loads(Path(path).read_text())
    except OSError as error:
        raise ForetokenError(f"Cannot read tree file {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ForetokenError(
            f"Tree file {path} is not JSON: it must hold a parent list such as [-1, 0, 0, 1]."
        ) from error
    if not isinstance(parents, list) or not all(type(x) is int for x in parents):
        raise ForetokenError(f"Tree file {path} must hold a list of integers such as [-1, 0, 0, 1].")
    return StaticTree(tuple(parents))
