"""Randomised Drafting: a draft token is made only with the draft probability a, and therefore tested less strictly.

    a draft token x ~ q    accept it with probability min(1, p(x) / (a q(x))), else draw from norm((p - a q)+)
    no draft token         draw from norm((p - a q)+)

Token x is emitted as a draft token with probability a q(x) min(1, p(x) / (a q(x))) = min(p(x), a q(x)), which leaves
1 - sum min(p, a q) = sum (p - a q)+ for the residual: together p(x). It is `transport` for N ~ Bernoulli(a), in O(v).

Source: Toner et al. 2025, Higher Acceptance Rates for Speculative Decoding with Randomised Drafting, ICML workshop
TTODLer-FM, openreview.net/forum?id=W6K2g3XJze, Algorithm 2, and equation 2 for the residual.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.laws import IID, Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily


@dataclass(frozen=True)
class Randomised:
    """Randomised Drafting: one draw from q with probability a, else none; the standard rule for a = 1. Cost: O(v)."""

    name: str = "randomised"
    laws: tuple[LawFamily, ...] = (IID,)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, IID) and law.k <= 1

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        law, q = siblings.law, siblings.q
        assert isinstance(law, IID)
        assert q is not None
        probability = sum(law.tails)  # a = P(N = 1)
        target, draft = p.double(), q.double()
        target, draft = target / target.sum(), probability * draft / draft.sum()
        residual = (target - draft).clamp_(min=0)
        total = residual.sum()
        # p == a q leaves no residual; it is then reached with probability 0 up to rounding, and p serves.
        row = torch.where(total > 0, residual / total, target)
        for x in siblings.draws:
            accept = (target[x] / draft[x]).clamp(max=1)
            row = (1 - accept) * row
            row[x] += accept
        return row.to(p.dtype)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return sum min(p, a q) = P(a draft token is made and accepted): a times the acceptance rate of Lemma 4.1."""
        assert isinstance(law, IID)
        return torch.minimum(p, sum(law.tails) * q).sum(1)
