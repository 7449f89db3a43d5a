"""The contract of a tree policy: which children each node gets, decided BEFORE they are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.laws import Law
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily


@dataclass(frozen=True)
class Plan:
    """How the children of one node will be drawn. memo: what the policy itself wants to know again of it."""

    law: Law
    memo: Any = None


@runtime_checkable
class TreePolicy(Protocol):
    """`plan` may look at q and at earlier randomness, never at the draws it decides for: else the law is another.

    A state is whatever the policy wants to remember of a node, a past whatever of a sequence's earlier trees. The
    policy itself is the same for all sequences and remembers nothing. What has a body here is the answer of most
    policies, which a class below this one need not repeat.
    """

    def root(self, past: Any) -> Any:
        """The root's state, where the sequence's trees so far left `past`: None before the first."""
        ...

    def past(self, states: Sequence[Any]) -> Any:
        """What the sequence's next tree is to know, from the states of all nodes of this one, as they were drawn."""
        return None

    @property
    def max_nodes(self) -> int:
        """The largest tree, root included."""
        ...

    @property
    def max_draws(self) -> int:
        """The largest number of draws at one node."""
        ...

    def sizes(self) -> tuple[int, ...]:
        """Nodes besides the root, at most, when the tree is cut at depth 0, 1, .. its own."""
        ...

    @property
    def weighs(self) -> bool:
        """Whether q must be a distribution for opaque children too; else any score that ranks the same will do."""
        return False

    def laws(self, family: LawFamily) -> tuple[Law, ...]:
        """The largest laws by which children may be drawn, where laws of `family` are asked for."""
        ...

    def at(self, family: LawFamily, temperature: float) -> "TreePolicy":
        """The policy for children of this family at this temperature; itself, if it is the same for all."""
        return self

    def plan(self, states: Sequence[Any], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        """The law of the children of each of m nodes, all of one level and one tree; None where there are to be none.

        q is None for drafters that have none.
        """
        ...

    def grow(
        self, plans: Sequence[Plan], q: Float[Tensor, "m v"] | None, draws: Sequence[tuple[int, ...]]
    ) -> Sequence[Sequence[Any]]:
        """The states of the draws of each of m planned nodes, all of one level and one tree: a node's in draw order,
        where a token drawn twice keeps its first draw's state."""
        ...

    def select(self, states: Sequence[Any], first: int) -> list[int]:
        """Of all nodes of a tree, those of its lowest level, from node `first` on, that the drafter has to score."""
        ...

    def keep(self, states: Sequence[Any]) -> list[int] | None:
        """Of all nodes of a grown tree, in order, those that stay; None: all, as it must be where any was sampled."""
        return None


@runtime_checkable
class ShapePolicy(Protocol):
    """A policy whose shape is known before anything is drawn."""

    @property
    def parents(self) -> tuple[int, ...]:
        """The shape: parents[0] = -1 is the root, parents[i] < i."""
        ...

    @property
    def chain_depth(self) -> int:
        """Levels of one draw each; 0 where the tree is not one path."""
        ...

    @property
    def floor(self) -> float:
        """The shape ends below nodes of whose path the drafter is less sure; 0: nowhere.

        How sure it is: the product of q down to the node, by which EAGLE-2 (Li et al. 2024) ranks nodes. It is known
        before the node's children are drawn.
        """
        ...
