"""The contract of a verification rule."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.laws import IID, Coins, Hub, Law, Opaque, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings

RowFunction = Callable[[Float[Tensor, " v"], Siblings], Float[Tensor, " v"]]  # (p, siblings) -> row, see Verifier
LawFamily = type[IID] | type[WithoutReplacement] | type[Hub] | type[Opaque] | Coins


@runtime_checkable
class Verifier(Protocol):
    """A rule: a pure function row = verify(p, siblings), the distribution of the emitted token GIVEN the draws.

    It is lossless for a law if for all p and q the sum over all draws of
    law.prob(q, draws) * verify(p, Siblings(draws, q, law)) is p. The tests enumerate that identity for every verifier
    and every law that it accepts.
    """

    @property
    def name(self) -> str:
        """The name by which users choose the rule."""
        ...

    @property
    def laws(self) -> tuple[LawFamily, ...]:
        """The kinds of laws that the rule is made for, the best first."""
        ...

    def accepts(self, law: Law) -> bool:
        """Whether the identity above holds for `law` and its number of draws."""
        ...

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        """Return the row, a distribution over the target's vocabulary [v].

        p: the target's distribution at a node [v].
        siblings: the record of the node's children.
        """
        ...


@runtime_checkable
class HasAcceptance(Protocol):
    """A verifier whose acceptance has a closed form. `foretoken.acceptance` checks and normalises what it passes on."""

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return P(the emitted token is among the draws) for m pairs of distributions, by a formula [m].

        A rule may leave out the case that the token after a rejected pick happens to be a draw; its docstring then says
        so.

        p: the target's distributions, float64 [m, v].
        q: the drafter's, float64 [m, v]. For the opaque law they may be any scores: the k best tokens are the children.
        law: one that the rule accepts.

        Raises ForetokenError where this law has no closed form of affordable cost.
        """
        ...


@runtime_checkable
class Approximate(Protocol):
    """A verifier that is not lossless. The engine refuses it."""

    @property
    def tolerance(self) -> float:
        """The largest L1 distance from p of the emitted token's distribution, averaged over the draws."""
        ...
