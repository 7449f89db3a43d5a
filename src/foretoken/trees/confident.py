"""Trees of a fixed shape that end where the drafter is unsure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import weights_of
from foretoken.core.policy import Plan
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.trees.static import StaticTree


@dataclass(frozen=True)
class ConfidentTree(StaticTree):
    """The shape, without what is below nodes of whose path the drafter is less sure than `floor`.

    State: (shape node, product of q down to it). See `core.policy.ShapePolicy`.
    """

    floor: float = field(kw_only=True)
    weighs: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.floor <= 1:
            raise ForetokenError(f"A tree may end where the drafter is less sure than 0 to 1, not {self.floor}.")

    def root(self, past: None) -> Any:
        return 0, 1.0

    def plan(self, states: Sequence[Any], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        plans = super().plan([node for node, _ in states], q, family)
        return [
            None if plan is None else Plan(plan.law, (plan.memo, sure))
            for plan, (_, sure) in zip(plans, states, strict=True)
        ]

    def grow(
        self, plans: Sequence[Plan], q: Float[Tensor, "m v"] | None, draws: Sequence[tuple[int, ...]]
    ) -> Sequence[Sequence[Any]]:
        assert q is not None
        grown = []
        for plan, drawn, weights in zip(plans, draws, weights_of(draws, q).tolist(), strict=True):
            nodes, sure = plan.memo
            # A law may give fewer draws than there are children, where few tokens have any probability.
            grown.append([(node, sure * x) for _, node, x in zip(drawn, nodes, weights, strict=False)])
        return grown

    def select(self, states: Sequence[Any], first: int) -> list[int]:
        shape = super().select([node for node, _ in states], first)
        return [i for i in shape if states[i][1] >= self.floor]
