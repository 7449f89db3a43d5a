"""A rule known to be wrong, kept so that every test of losslessness can show that it sees the difference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.laws import IID, Law, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily


@dataclass(frozen=True)
class EachAlone:
    """Tests each draft alone, as if it were the only one, and keeps the first that passes: lossy for k >= 2 draws.

    row = sum_j a_j prod_{i<j} (1 - a_i) [x_j] + prod_i (1 - a_i) norm((p - q)+), a_j = min(1, p(x_j) / q(x_j)).
    It looks like the standard rule, and is, for one draw; with more it emits drafted tokens too often.
    """

    name: str = "each-alone"
    laws: tuple[LawFamily, ...] = (IID, WithoutReplacement)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, self.laws)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        q = siblings.q
        if q is None:
            return p
        row, reach = torch.zeros_like(p), 1.0
        for x in siblings.draws:
            accept = min(1.0, float(p[x]) / float(q[x]))
            row[x] += reach * accept
            reach *= 1 - accept
        residual = (p - q).clamp(min=0)
        total = float(residual.sum())
        return row + reach * (residual / total if total > 0 else p)
