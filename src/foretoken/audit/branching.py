"""A source of randomness that takes every branch: run a random function once per outcome, with its probability.

All randomness of decoding is an argument (`core.random.Random`). The source of this file gives uniforms that are not
numbers. Whoever draws a token by them hands over the token's weights, and in the runs of `outcomes` that one choice is
made in turn for every token of positive weight.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretoken.core.random import Random
from foretoken.core.shapes import Float, Int

T = TypeVar("T")


@dataclass
class Branches:
    """The choices of one run: those in `taken` come first, after them always the first token of positive weight."""

    taken: list[int]  # indices among the tokens of positive weight
    options: list[int] = field(default_factory=list)  # how many there were
    prob: float = 1.0
    gives_numbers: bool = False

    def uniforms(self, rows: int, columns: int) -> "Undecided":
        return Undecided(self, torch.empty(rows, columns, device="meta"))

    def choose(self, weights: list[float]) -> int:
        tokens = [x for x, weight in enumerate(weights) if weight > 0]
        if not tokens:  # nothing is left to draw: the token that `draws.inverse_cdf` returns
            return len(weights) - 1
        here = len(self.options)
        if here == len(self.taken):
            self.taken.append(0)
        self.options.append(len(tokens))
        token = tokens[self.taken[here]]
        self.prob *= weights[token] / math.fsum(weights)
        return token

    def next(self) -> "Branches | None":
        """The run after this one: its last choice that has another option takes that; None after the last run."""
        taken = list(self.taken)
        while taken and taken[-1] + 1 == self.options[len(taken) - 1]:
            taken.pop()
        return Branches([*taken[:-1], taken[-1] + 1]) if taken else None


@dataclass(frozen=True)
class Undecided:
    """Uniforms that stand for every outcome. size: a tensor of their shape that has no numbers."""

    source: Branches
    size: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.size.shape)

    def __getitem__(self, index: Any) -> "Undecided":
        return Undecided(self.source, self.size[index])

    def choose(self, weights: Float[Tensor, "m v"]) -> Int[Tensor, "m k"]:
        """One choice per uniform, row after row."""
        return torch.tensor([[self.source.choose(row) for _ in range(self.shape[1])] for row in weights.tolist()])


def outcomes(run: Callable[[Random], T]) -> Iterator[tuple[T, float]]:
    """(result, probability) for every sequence of choices that `run` can make; it is called afresh for each."""
    source: Branches | None = Branches([])
    while source is not None:
        result = run(source)
        yield result, source.prob
        source = source.next()
