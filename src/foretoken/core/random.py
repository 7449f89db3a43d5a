"""Where decoding's random numbers come from: an argument everywhere, so that the audit can pass a source of its own."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.core.shapes import Float, Int


@runtime_checkable
class Choices(Protocol):
    """Uniforms that are not numbers: the one who draws by them hands over the weights and is given the tokens.

    The audit's are of this kind. Compiled code takes numbers only, so that plain code runs wherever these come.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any) -> "Choices":
        """The uniforms in these places, by the rules of tensors."""
        ...

    def choose(self, weights: Float[Tensor, "m v"]) -> Int[Tensor, "m k"]:
        """The tokens that these [m, k] uniforms draw from each of m rows of weights."""
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
        """[rows, columns] independent float64 uniforms in [0, 1)."""
        ...


@dataclass(frozen=True)
class Seeded:
    """The numbers of a CPU generator."""

    generator: torch.Generator
    gives_numbers: bool = True

    def uniforms(self, rows: int, columns: int) -> Float[Tensor, "rows columns"]:
        """[rows, columns] float64 uniforms in [0, 1), the generator's next ones."""
        return torch.rand(rows, columns, generator=self.generator, dtype=torch.float64)


def seeded(seed: int) -> Seeded:
    """The source that a seed stands for: the same numbers for the same seed on every machine."""
    return Seeded(torch.Generator().manual_seed(seed))
