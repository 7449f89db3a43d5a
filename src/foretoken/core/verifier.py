"""The contract of a verification rule."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.laws import IID, Law, Opaque, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings

LawFamily = type[IID] | type[WithoutReplacement] | type[Opaque]


@runtime_checkable
class Verifier(Protocol):
    """row = verify(p, siblings): the distribution of the emitted token GIVEN the draws. Pure.

    Lossless for a law when, for all p and q, sum over draws of law.prob(q, draws) * verify(p, draws, q) == p.
    The tests enumerate that identity for every verifier and every law it accepts.
    """

    @property
    def name(self) -> str: ...

    @property
    def laws(self) -> tuple[LawFamily, ...]:
        """The laws it is made for, the best first."""
        ...

    def accepts(self, law: Law) -> bool:
        """Whether the identity above holds for `law` and its number of draws."""
        ...

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]: ...
