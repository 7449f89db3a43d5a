"""Exact match: draw from p, and descend if a child happens to carry the token."""

from dataclasses import dataclass

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law, Opaque, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily
from foretoken.verify.successive import chance_of_a_draw


@dataclass(frozen=True)
class ExactMatch:
    """The row is p, whatever was drawn: the draw is accepted if it is the token that the target would emit anyway.

    Law: every law. Optimal for deterministic children; at temperature 0 every rule is this one. Cost: none.
    """

    name: str = "exact-match"
    laws: tuple[LawFamily, ...] = (Opaque, IID, WithoutReplacement, Hub)

    def accepts(self, law: Law) -> bool:
        return True

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        return p

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return sum over x of p(x) P(x is among the draws): for opaque children p of the k best tokens of q.

        Draws without replacement from a mass below 1e-290 of q do not count.
        """
        if isinstance(law, IID):
            return (p * law.hit(q)).sum(-1)
        if isinstance(law, Hub | Opaque):
            return (p * law.marginals(q)).sum(-1)
        if isinstance(law, WithoutReplacement):
            return chance_of_a_draw(p, q, law.k)
        raise ForetokenError(f"The acceptance of exact-match has no closed form for law {law.name}.")
