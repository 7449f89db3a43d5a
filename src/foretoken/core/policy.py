"""The contract of a tree policy: how many children each node gets, decided BEFORE they are drawn."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.shapes import Float


@runtime_checkable
class TreePolicy(Protocol):
    """`children` may look at q and at earlier randomness, never at the draws it decides for: else the law is another.

    A state is whatever the policy wants to remember of a node; a token drawn twice keeps its first draw's state.
    """

    @property
    def root(self) -> Any:
        """The root's state."""
        ...

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

    def is_leaf(self, state: Any) -> bool:
        """True where the node gets no children whatever q is, so that the drafter need not score it."""
        ...

    def children(self, states: Sequence[Any], q: Float[Tensor, "m v"] | None) -> list[tuple[Any, ...]]:
        """For each of m nodes the states of its draws, one a draw; q is None for drafters that have none."""
        ...
