"""A drafter whose distribution is changed before anything is drawn from it: cut to its likeliest tokens, or flattened.

The changed q is what children are drawn from and what their record holds, so every rule stays lossless.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.draft.lm import LMDrafter, LMDraftSession

Shape = Callable[[Float[Tensor, "m v"]], Float[Tensor, "m v"]]
STEPS = 30  # of a bisection


@dataclass(frozen=True)
class Likeliest:
    """The map from q to q restricted to its `number` likeliest tokens."""

    number: int

    def __call__(self, q: Float[Tensor, "m v"]) -> Float[Tensor, "m v"]:
        best, tokens = q.topk(min(self.number, q.shape[1]), dim=1)
        return torch.zeros_like(q).scatter_(1, tokens, best / best.sum(1, keepdim=True))


@dataclass(frozen=True)
class Flattened:
    """The map from q to q^power, normalised: the drafter's logits times `power`, at any temperature above 0."""

    power: float

    def __call__(self, q: Float[Tensor, "m v"]) -> Float[Tensor, "m v"]:
        weights = q**self.power
        return weights / weights.sum(1, keepdim=True)


def flattened_to(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], accepted: float) -> Flattened:
    """Return the map after which one draft is accepted with probability `accepted` in the mean over the pairs.

    It has power 1 where q itself is accepted less often than that.
    """

    def mean(power: float) -> float:
        return float(torch.minimum(p, Flattened(power)(q)).sum(1).mean())

    low, high = 0.0, 1.0
    if mean(high) <= accepted:
        return Flattened(high)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < accepted else (low, middle)
    return Flattened(high)


@dataclass(frozen=True)
class ShapedDrafter(LMDrafter):
    """An LMDrafter that draws from shape(q), at temperatures above 0.

    shape: maps rows of q to the rows that are drawn from
    """

    shape: Shape

    def open(self, batch: int, slots: int) -> "ShapedSession":
        return ShapedSession(self, batch, slots)


class ShapedSession(LMDraftSession):
    def __init__(self, drafter: ShapedDrafter, batch: int, slots: int) -> None:
        super().__init__(drafter, drafter.lm.open(batch, slots))
        self._shape = drafter.shape
        self._chains = None  # a compiled chain would draw from q itself

    def _weights_after(self, sequences: Seq[Sequence], nodes: Seq[list[int]]) -> list[Float[Tensor, "_ _"]]:
        weights = super()._weights_after(sequences, nodes)
        return [self._shape(q) if wanted else q for q, wanted in zip(weights, nodes, strict=True)]
