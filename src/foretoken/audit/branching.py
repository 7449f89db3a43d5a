"""A source of randomness that takes every branch: it runs a random function once per outcome, with its probability.

All randomness of decoding is an argument (`core.random.Random`). The source in this file gives uniforms that are not
numbers. Code that draws a token by such a uniform passes it the weights of all tokens; `outcomes` then runs the
function once for each choice, that is for every token of positive weight.
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
    """The choices of one run. Those in `taken` come first; every later one is the first token of positive weight.

    taken: the choices, each an index among the tokens of positive weight; later ones are appended during the run.
    options: the number of tokens of positive weight at each choice so far.
    prob: the probability of all choices so far.
    gives_numbers: False, since its uniforms are not numbers.
    """

    taken: list[int]
    options: list[int] = field(default_factory=list)
    prob: float = 1.0
    gives_numbers: bool = False

    def uniforms(self, rows: int, columns: int) -> "Undecided":
        """Return undecided uniforms of shape [rows, columns]."""
        return Undecided(self, torch.empty(rows, columns, device="meta"))

    def choose(self, weights: list[float]) -> int:
        """Make the next choice and return its token, the last one if all `weights` are 0; they need not sum to 1."""
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
        """Return the run after this one, in which the last choice with a further option takes it; None at the end."""
        taken = list(self.taken)
        while taken and taken[-1] + 1 == self.options[len(taken) - 1]:
            taken.pop()
        return Branches([*taken[:-1], taken[-1] + 1]) if taken else None


@dataclass(frozen=True)
class Undecided:
    """Uniforms that stand for every outcome.

    source: makes the choices.
    size: a tensor of their shape that has no numbers.
    """

    source: Branches
    size: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the uniforms."""
        return tuple(self.size.shape)

    def __getitem__(self, index: Any) -> "Undecided":
        return Undecided(self.source, self.size[index])

    def choose(self, weights: Float[Tensor, "m v"]) -> Int[Tensor, "m k"]:
        """Make one choice per uniform [m, k], row after row; weights: row i is for the uniforms of row i [m, v]."""
        return torch.tensor([[self.source.choose(row) for _ in range(self.shape[1])] for row in weights.tolist()])


def outcomes(run: Callable[[Random], T]) -> Iterator[tuple[T, float]]:
    """Yield (result, probability) for every sequence of choices that a random function can make.

    run: the function of a source of randomness; it is called once per sequence of choices.
    """
    source: Branches | None = Branches([])
    while source is not None:
        result = run(source)
        yield result, source.prob
        source = source.next()
