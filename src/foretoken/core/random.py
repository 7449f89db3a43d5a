"""Sources of randomness. One is an argument of all that draws, so that the audit can pass a source of its own."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.core.shapes import Float, Int


@runtime_checkable
class Choices(Protocol):
    """Uniforms that are not numbers: `choose` takes the weights and returns the drawn tokens.

    The audit's are of this kind. Compiled code takes numbers only, so that torch code runs where these are passed.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns, as of a tensor."""
        ...

    def __getitem__(self, index: Any) -> "Choices":
        """Return the uniforms in the places `index`, by the rules of tensors."""
        ...

    def choose(self, weights: Float[Tensor, "m v"]) -> Int[Tensor, "m k"]:
        """Return the ids that these [m, k] uniforms draw from each of m rows of `weights`, k from a row."""
        ...


Uniforms = Tensor | Choices


@runtime_checkable
class Random(Protocol):
    """A source of random numbers: `Seeded` in production, the audit's in `foretoken.audit.branching`."""

    @property
    def gives_numbers(self) -> bool:
        """Whether its uniforms are tensors, which compiled code can take."""
        ...

    def uniforms(self, rows: int, columns: int) -> Uniforms:
        """Return the next uniforms: independent float64 numbers in [0, 1), or Choices [rows, columns]."""
        ...


@dataclass(frozen=True)
class Seeded:
    """The source of randomness of a CPU `generator` of torch."""

    generator: torch.Generator
    gives_numbers: bool = True

    def uniforms(self, rows: int, columns: int) -> Float[Tensor, "rows columns"]:
        """Return the generator's next numbers [rows, columns]."""
        return torch.rand(rows, columns, generator=self.generator, dtype=torch.float64)


def seeded(seed: int) -> Seeded:
    """Return the source of randomness of a seed: the same numbers for the same seed on every machine."""
    return Seeded(torch.Generator().manual_seed(seed))
