"""Exact match: draw from p, and descend if a child happens to carry the token."""

from dataclasses import dataclass

from torch import Tensor

from foretoken.core.laws import IID, Law, Opaque, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily


@dataclass(frozen=True)
class ExactMatch:
    """row = p, whatever was drawn.

    Law: every law. Optimal for deterministic children; at temperature 0 every rule is this one. Cost: none.
    """

    name: str = "exact-match"
    laws: tuple[LawFamily, ...] = (Opaque, IID, WithoutReplacement)

    def accepts(self, law: Law) -> bool:
        return True

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        return p
