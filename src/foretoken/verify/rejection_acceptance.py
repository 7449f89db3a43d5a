"""Acceptance of the recursive rejection rules, from the identity of `rejection_fast`: p_j is prop. to (p - c_j q)+.

With Z(c) = sum (p - c q)+, c_1 = 0, and L_j the q-mass that is still to be drawn, c_{j+1} = c_j + Z(c_j) / L_j, and
draw j is rejected, given the draws that were rejected before it, with probability Z(c_{j+1}) / Z(c_j).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Law
from foretoken.core.shapes import Float

MOST_STATES = 10_000_000


def rrs_acceptance(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
    """1 - E[Z(c_{N+1})], since every L_j is 1."""
    c, z = torch.zeros_like(p[:, :1]), torch.ones_like(p[:, :1])
    counts = _counts(law)
    rejected = counts[0] * z
    for count in counts[1:]:
        c = c + z
        z = (p - c * q).clamp(min=0).sum(-1, keepdim=True)
        rejected = rejected + count * z
    return 1 - rejected[:, 0]


def rrsw_acceptance(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
    """1 - P(all draws are rejected), a sum over the sequences of rejected tokens; row by row."""
    counts, repeats = torch.tensor(_counts(law), dtype=p.dtype, device=p.device), isinstance(law, IID)
    return torch.stack([1 - _all_rejected(p_row, q_row, counts, repeats) for p_row, q_row in zip(p, q, strict=True)])


def _counts(law: Law) -> tuple[float, ...]:
    """P(N = 0), ..., P(N = k)."""
    return law.counts if isinstance(law, IID) and law.counts is not None else (0.0,) * law.k + (1.0,)


def _all_rejected(
    p: Float[Tensor, " v"], q: Float[Tensor, " v"], counts: Float[Tensor, " n"], repeats: bool
) -> Float[Tensor, ""]:
    """A state is a sequence of rejected tokens; weight[s, r] = P(it comes about with r draws to go).

    repeats: a draw may be a token of the sequence, which the rule passes over.
    """
    residual = _residual(p, q)
    left, mass = q[None], q.new_ones(1)  # q of the tokens not drawn yet, and its sum
    c, z, weight = q.new_zeros(1), q.new_ones(1), counts[None].clone()
    rejected = q.new_zeros(())
    while True:
        fresh = torch.where(mass[:, None] > 0, weight, 0.0)  # what goes on to a token that is not in the sequence
        if repeats:
            for r in range(weight.shape[1] - 1, 0, -1):
                fresh[:, r] = weight[:, r] * mass
                weight[:, r - 1] += weight[:, r] - fresh[:, r]
        else:
            weight[:, 0] += (weight - fresh)[:, 1:].sum(-1)  # nothing is left to draw
        rejected = rejected + weight[:, 0].sum()
        fresh = fresh[:, 1:]
        going = fresh.sum(-1) > 0
        mass, c, z, fresh = (x[going] for x in (mass, c, z, fresh))
        if len(fresh) == 0:
            return rejected
        c_next = c + z / mass
        z_next = torch.minimum(residual(c_next), z)
        if fresh.shape[1] == 1:
            return rejected + (fresh[:, 0] * z_next / z).sum()
        left = left[going]
        share = left / mass[:, None] - (p - c[:, None] * q).clamp(min=0) / z[:, None]  # q_j - p_j
        state, token = torch.nonzero((share > 0) & (left > 0) & (z_next > 0)[:, None], as_tuple=True)
        if len(state) * (len(q) if fresh.shape[1] > 2 else 1) > MOST_STATES:
            raise ForetokenError(
                f"The acceptance of rrsw with {len(counts) - 1} draws over {int((q > 0).sum())} tokens is too long a "
                "sum: take fewer draws, or cut q by top-k."
            )
        weight = fresh[state] * share[state, token, None]
        mass = _others(left)[state, token].clamp(max=1)
        c, z = c_next[state], z_next[state]
        if fresh.shape[1] > 2:
            left = left[state].scatter(1, token[:, None], 0.0)


def _others(left: Float[Tensor, "s v"]) -> Float[Tensor, "s v"]:
    """The sum of each row without each entry, and without cancellation."""
    none = torch.zeros_like(left[:, :1])
    before = torch.cat([none, left.cumsum(1)[:, :-1]], 1)
    after = torch.cat([left.flip(1).cumsum(1).flip(1)[:, 1:], none], 1)
    return before + after


def _residual(p: Float[Tensor, " v"], q: Float[Tensor, " v"]) -> Callable[[Tensor], Tensor]:
    """c -> Z(c), by one sort and a look-up."""
    ratio, order = torch.where(q > 0, p / q, torch.inf).sort()
    none = p.new_zeros(1)
    p_from = torch.cat([p[order].flip(0).cumsum(0).flip(0), none])
    q_from = torch.cat([q[order].flip(0).cumsum(0).flip(0), none])

    def at(c: Tensor) -> Tensor:
        i = torch.searchsorted(ratio, c, right=True)
        return (p_from[i] - c * q_from[i]).clamp(min=0)

    return at
