"""Rejection rules, single-draft (Leviathan/Chen) and recursive, with i.i.d. draws (RRS) or without replacement (RRSw).

All three are one recursion over the draws, paper 000 (MDSD), Algorithm 1. With p_1 = p, q_1 = q, at draw x_j

    accept x_j with probability   a_j = min(1, p_j(x_j) / q_j(x_j))
    else go on with               p_{j+1} = norm((p_j - q_j)+)
                                  q_{j+1} = q_j (RRS),   norm(q_j with x_j set to 0) (RRSw)

and when no draw is left the token comes from p_{k+1}. The row is the law of that token given the draws:

    row = sum_j  a_j prod_{i<j} (1 - a_i)  [x_j]   +   prod_i (1 - a_i)  p_{k+1}

Why it is exact: given that draws 1..j-1 were rejected, x_j has law q_j, so accepting it and falling back on p_{j+1}
together give p_j; by induction from the last draw to the first the sum is p_1 = p.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.laws import IID, Hub, Law, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily
from foretoken.verify.rejection_acceptance import rrs_acceptance, rrsw_acceptance
from foretoken.verify.rejection_fast import TINY, fast_row


def plain_row(
    p: Float[Tensor, " v"], q: Float[Tensor, " v"], draws: tuple[int, ...], without_replacement: bool
) -> Float[Tensor, " v"]:
    """The row above, in float64 inside, on any device and without a host synchronisation. O(k v)."""
    left, draft = p.double(), q.double()
    left = left / left.sum()
    row = torch.zeros_like(left)
    reach = torch.ones((), dtype=left.dtype, device=left.device)
    for x in draws:
        mass = draft.sum()
        # A draw from (almost) nothing is passed over: the rule for the draws before it is exact as well.
        draft = torch.where(mass > TINY, draft / mass, 0.0)
        possible = draft[x] > 0  # not so when x was drawn before (RRSw on i.i.d. draws)
        accept = torch.where(possible, (left[x] / draft[x]).clamp(max=1), 0.0)
        row[x] += reach * accept
        reach = reach * (1 - accept)
        residual = (left - draft).clamp_(min=0)
        total = residual.sum()
        # p == q leaves no residual; it is then reached with probability 0 up to rounding, and p serves.
        left = torch.where(possible & (total > TINY), residual / total, left)
        if without_replacement:
            draft[x] = 0.0
    return (row + reach * left).to(p.dtype)


def recursive_row(
    p: Float[Tensor, " v"], q: Float[Tensor, " v"], draws: tuple[int, ...], without_replacement: bool
) -> Float[Tensor, " v"]:
    """`plain_row`, by the compiled loop where there is one for these tensors."""
    row = fast_row(p, q, draws, without_replacement)
    return plain_row(p, q, draws, without_replacement) if row is None else row


@dataclass(frozen=True)
class Standard:
    """Accept x with probability min(1, p(x)/q(x)), else draw from norm((p - q)+).

    Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2. Law: one draw from q. Optimal for it:
    accepts with probability sum min(p, q). O(v).
    """

    name: str = "standard"
    laws: tuple[LawFamily, ...] = (IID,)

    def accepts(self, law: Law) -> bool:
        return is_single(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        return recursive_row(p, siblings.q, siblings.draws, without_replacement=False)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """sum min(p, q), if there is a draw."""
        return rrs_acceptance(p, q, law)


@dataclass(frozen=True)
class RRS:
    """Recursive rejection sampling: each draw in turn against the residual of those before it.

    Paper 000, Algorithm 1 (black lines). Law: k i.i.d. draws. O(k v).
    """

    name: str = "rrs"
    laws: tuple[LawFamily, ...] = (IID,)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, IID) or is_single(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        return recursive_row(p, siblings.q, siblings.draws, without_replacement=False)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """1 - Z_{k+1} with c_1 = 0, Z_j = sum (p - c_j q)+, c_{j+1} = c_j + Z_j. O(k v)."""
        return rrs_acceptance(p, q, law)


@dataclass(frozen=True)
class RRSw:
    """Recursive rejection sampling for draws without replacement: q, too, loses each rejected draw.

    Paper 000, Algorithm 1 (with the red lines). Law: successive sampling of k tokens; k i.i.d. draws as well, since
    the recursion passes over a repeated draw (q_j is 0 there), and the distinct tokens among i.i.d. draws, in order
    of their first draw, are successive samples whose number tells nothing of the next one. O(k v).
    """

    name: str = "rrsw"
    laws: tuple[LawFamily, ...] = (WithoutReplacement, IID)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, IID | WithoutReplacement) or is_single(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        return recursive_row(p, siblings.q, siblings.draws, without_replacement=True)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """A sum over the sequences of rejected draws but the last: O(v^(k-1)) of them, which limits k and v."""
        return rrsw_acceptance(p, q, law)


def is_single(law: Law) -> bool:
    """One draw is one draw from q under each of these laws."""
    return isinstance(law, IID | WithoutReplacement | Hub) and law.k <= 1
