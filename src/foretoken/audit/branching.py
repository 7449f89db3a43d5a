"""A source of randomness that takes every way: run a random function once per outcome, with each one's probability.

All randomness of decoding ends in `laws.inverse_cdf(weights, uniforms)` (or in a compiled equal of it, which is set
aside here). While `outcomes` runs a function, that one call is replaced by a choice that is tried in turn with every
token of positive weight. A draw made in any other way would be counted with probability 1, and the law of what comes
out would be wrong.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from foretoken.core import laws
from foretoken.core.shapes import Float, Int

T = TypeVar("T")


@dataclass
class Choices:
    """The choices of one run: those in `taken` come first, after them always the first token of positive weight."""

    taken: list[int]  # indices among the tokens of positive weight
    options: list[int] = field(default_factory=list)  # how many there were
    prob: float = 1.0

    def inverse_cdf(self, weights: Float[Tensor, "m v"], u: Float[Tensor, "m k"]) -> Int[Tensor, "m k"]:
        """In place of laws.inverse_cdf."""
        return torch.tensor([[self._choose(row) for _ in range(u.shape[1])] for row in weights.tolist()])

    def _choose(self, weights: list[float]) -> int:
        tokens = [x for x, weight in enumerate(weights) if weight > 0]
        if not tokens:  # nothing left to draw: what the real one returns
            return len(weights) - 1
        here = len(self.options)
        if here == len(self.taken):
            self.taken.append(0)
        self.options.append(len(tokens))
        token = tokens[self.taken[here]]
        self.prob *= weights[token] / math.fsum(weights)
        return token

    def next(self) -> "Choices | None":
        """The run after this one: its last choice that has another option takes that; None after the last run."""
        taken = list(self.taken)
        while taken and taken[-1] + 1 == self.options[len(taken) - 1]:
            taken.pop()
        return Choices([*taken[:-1], taken[-1] + 1]) if taken else None


def outcomes(run: Callable[[], T]) -> Iterator[tuple[T, float]]:
    """(result, probability) for every sequence of choices that `run` can make; it is called afresh for each."""
    choices: Choices | None = Choices([])
    while choices is not None:
        with patch.object(laws, "inverse_cdf", choices.inverse_cdf), patch.object(laws, "on_cpu", lambda _: False):
            result = run()
        yield result, choices.prob
        choices = choices.next()
