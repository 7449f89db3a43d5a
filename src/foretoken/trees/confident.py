"""A chain that ends where the drafter is no longer sure of its path: what would hardly be accepted is not drafted.

A node's confidence is the product of q over the drafts down to it, the score by which EAGLE-2 (Li et al. 2024) ranks
nodes. A node of which it is below `floor` gets no child. Whether a node has a child depends on the text and on drafts
down to the node itself, which are known before the child is drawn, so a rule of one node is lossless as it stands; for
`block`, whose decision covers the whole path, see docs/losslessness.md, section 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Law
from foretoken.core.policy import Plan
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily


class Sure(NamedTuple):
    """confidence: the product of q down to a node; level: its depth."""

    confidence: float = 1.0
    level: int = 0


@dataclass(frozen=True)
class ConfidentChain:
    """One path of at most `chain_depth` drafts, ended below a node with a confidence lower than `floor`."""

    chain_depth: int
    floor: float
    root: Sure = field(default=Sure(), init=False)
    max_draws: int = field(default=1, init=False)
    weighs: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ForetokenError(f"In tree chain:D@C the confidence C must be above 0 and at most 1, not {self.floor}.")

    @property
    def max_nodes(self) -> int:
        return 1 + self.chain_depth

    def sizes(self) -> tuple[int, ...]:
        return tuple(range(self.chain_depth + 1))

    def laws(self, family: LawFamily) -> tuple[Law, ...]:
        return (family(1),)

    def at(self, family: LawFamily, temperature: float) -> "ConfidentChain":
        return self

    def plan(self, states: Sequence[Sure], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        return [Plan(family(1), state) if self._goes_on(state) else None for state in states]

    def grow(self, plan: Plan, q: Float[Tensor, " v"] | None, draws: tuple[int, ...]) -> Sequence[Sure]:
        assert q is not None
        confidence, level = plan.memo
        return [Sure(confidence * float(q[token]), level + 1) for token in draws]

    def select(self, states: Sequence[Sure], first: int) -> list[int]:
        return [i for i in range(first, len(states)) if self._goes_on(states[i])]

    def keep(self, states: Sequence[Sure]) -> None:
        return None

    def _goes_on(self, state: Sure) -> bool:
        return state.level < self.chain_depth and state.confidence >= self.floor
