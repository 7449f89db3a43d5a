"""The contract of a tree policy. It decides how the children of each node are drawn, BEFORE they are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.laws import Law
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily


@dataclass(frozen=True)
class Plan:
    """How the children of one node will be drawn.

    law: the law of the draws.
    memo: what the policy needs of this node again in `grow`; nothing else reads it.
    """

    law: Law
    memo: Any = None


@runtime_checkable
class TreePolicy(Protocol):
    """What chooses the shape of a tree. `plan` may depend on q and on earlier draws, but never on the draws that it
    decides about: they would have another law.

    A *state* is what the policy keeps about one node of a tree, in a form of its own; a *past* is what it keeps about
    the earlier trees of one sequence. The caller stores both. The policy object is the same for all sequences and is
    never changed. Methods with a body give the answer of most policies, which subclasses need not repeat.
    """

    def root(self, past: Any) -> Any:
        """Return the state of the root of a sequence's next tree.

        past: what the method `past` returned for the sequence's last tree; None before the first.
        """
        ...

    def past(self, states: Sequence[Any]) -> Any:
        """Return what the sequence's next tree depends on; states: those of all nodes of the grown tree, in order."""
        return None

    @property
    def max_nodes(self) -> int:
        """The number of nodes of the largest tree, the root included."""
        ...

    @property
    def max_draws(self) -> int:
        """The largest number of draws at one node."""
        ...

    def sizes(self) -> tuple[int, ...]:
        """Return the largest number of nodes besides the root when the tree is cut at depth 0, 1, .. its own.

        It serves to estimate costs, so that a policy without a fixed number may give a typical one.
        """
        ...

    @property
    def weighs(self) -> bool:
        """Whether q must be a distribution for opaque children too; else any scores that rank the same are enough."""
        return False

    def laws(self, family: LawFamily) -> tuple[Law, ...]:
        """Return the laws that children may be drawn by, each with the largest number of draws at one node.

        family: the kind of laws that the verifier is lossless for.
        """
        return (family(self.max_draws),)

    def at(self, family: LawFamily, temperature: float) -> "TreePolicy":
        """Return the policy for laws of `family` at this sampling temperature; the object itself if it fits all."""
        return self

    def plan(self, states: Sequence[Any], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        """Decide how the children of m nodes are drawn, all of one level of one tree.

        states: those of the m nodes.
        q: the drafter's weights of the next token after each node, of any positive sum [m, v] (scores for opaque
            children of a policy that does not weigh); None in randomised drafting, which decides before q is known.
        family: the kind of laws that the children are drawn by.

        Returns one plan per node, None where it gets no children.
        """
        ...

    def grow(
        self, plans: Sequence[Plan], q: Float[Tensor, "m v"] | None, draws: Sequence[tuple[int, ...]]
    ) -> Sequence[Sequence[Any]]:
        """Return the states of the drawn children of m nodes, all of one level of one tree.

        plans: those of the m nodes, which all have one.
        q: as in `plan`, of these nodes only.
        draws: per node the drawn ids, in draw order.

        Returns per node one state per draw, in draw order; of equal draws the state of the first one is used.
        """
        ...

    def select(self, states: Sequence[Any], first: int) -> list[int]:
        """Return the nodes of the lowest level that the drafter has to score, since they may get children.

        states: those of all nodes so far, in order.
        first: the index of the first node of the lowest level.
        """
        ...

    def keep(self, states: Sequence[Any]) -> list[int] | None:
        """Return the nodes of a grown tree that stay in it, in order; None for all, as it must be if any was sampled.

        states: those of all nodes, in order.
        """
        return None


@runtime_checkable
class ShapePolicy(Protocol):
    """A policy whose shape is known before anything is drawn."""

    @property
    def parents(self) -> tuple[int, ...]:
        """The shape as the parent of each node: parents[0] = -1 is the root, parents[i] < i."""
        ...

    @property
    def chain_depth(self) -> int:
        """The depth of a tree that is one path; 0 for any other shape."""
        ...

    @property
    def floor(self) -> float:
        """The least product of q down to a node for the node to get children; 0 where all get those of the shape.

        EAGLE-2 (Li et al. 2024) ranks nodes by this product. It is known before the node's children are drawn.
        """
        ...
