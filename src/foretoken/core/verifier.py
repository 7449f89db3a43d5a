"""The contract of a verification rule."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.laws import IID, Coins, Hub, Law, Opaque, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings

LawFamily = type[IID] | type[WithoutReplacement] | type[Hub] | type[Opaque] | Coins


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


@runtime_checkable
class HasAcceptance(Protocol):
    """A verifier whose acceptance has a closed form. `foretoken.acceptance` checks and normalises what it passes on."""

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """P(the emitted token is among the draws) for m pairs of float64 distributions, without sampling.

        A rule may leave out the draws that come up after its pick is rejected, and then says so.

        law: one that the rule accepts. For the opaque law q is any score: its k best tokens are the children.
        Raises ForetokenError where this law has no closed form of affordable cost.
        """
        ...


@runtime_checkable
class Approximate(Protocol):
    """A verifier that is not lossless: the law it emits is within `tolerance` (L1) of p. The engine refuses it."""

    @property
    def tolerance(self) -> float: ...
