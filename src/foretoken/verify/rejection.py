"""Rejection rules: the standard one for one draw, and recursive ones, for i.i.d. draws (RRS) or distinct ones (RRSw).

All three are one recursion over the draws. p is the target's distribution, q the drafter's; norm(..) divides by the
sum, (..)+ sets negative numbers to 0. With p_1 = p, q_1 = q, at draw x_j

    accept x_j with probability   a_j = min(1, p_j(x_j) / q_j(x_j))
    else go on with               p_{j+1} = norm((p_j - q_j)+)
                                  q_{j+1} = q_j (RRS),   norm(q_j with x_j set to 0) (RRSw)

and when no draw is left the token comes from p_{k+1}. The row is the law of that token given the draws:

    row = sum_j  a_j prod_{i<j} (1 - a_i)  [x_j]   +   prod_i (1 - a_i)  p_{k+1}

Why it is exact: given that draws 1..j-1 were rejected, x_j has law q_j, so accepting it and falling back on p_{j+1}
together give p_j; by induction from the last draw to the first the sum is p_1 = p.

The compiled loop and the acceptance rest on one identity: p_j is proportional to (p - c_j q)+ for a number c_j, since
with Z_j = sum (p - c_j q)+ and L_j the mass of q that is still to be drawn,

    (p_j - q_j)+  =  ((p - c_j q)+ / Z_j  -  q / L_j)+  ∝  (p - (c_j + Z_j / L_j) q)+

So c_1 = 0, c_{j+1} = c_j + Z_j / L_j, draw j is rejected, given the draws that were rejected before it, with
probability Z_{j+1} / Z_j, and a draw costs one read of p and q, without a residual vector that is written.

Source: Sun et al. 2024, SpecHub, arXiv:2411.05289, Algorithm 1 (black lines: RRS; with the red lines: RRSw).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Law, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import total_of
from foretoken.verify.rule import TINY, Kinds, Rule, count_chances, is_single, loops_take

MOST_STATES = 10_000_000  # the most numbers in a table of `RRSw.acceptance`


@dataclass(frozen=True)
class RRS(Rule):
    """Recursive rejection sampling: tests each draw in turn against what the draws before it left of p.

    Law: k i.i.d. draws. Cost: O(k v).
    """

    name: str = "rrs"

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        return recursive_row(p, siblings.q, siblings.draws, without_replacement=False)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return 1 - E[Z_{N+1}] for N draws, where c_{j+1} = c_j + Z_j: sum min(p, q) for one draw. O(k v)."""
        return rrs_acceptance(p, q, law)


@dataclass(frozen=True)
class Standard(RRS):
    """The standard rule: accept x with probability min(1, p(x)/q(x)), else draw from norm((p - q)+).

    Law: one draw from q. Optimal for it: accepts with probability sum min(p, q). Cost: O(v).
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; Chen et al. 2023, arXiv:2302.01318, Algorithm 2.
    """

    name: str = "standard"

    def accepts(self, law: Law) -> bool:
        return is_single(law)


@dataclass(frozen=True)
class RRSw(Rule):
    """Recursive rejection sampling for draws without replacement: each rejected draw is also taken out of q.

    Law: successive sampling of k tokens; k i.i.d. draws as well, since the recursion passes over a repeated draw (q_j
    is 0 there), and the distinct tokens among i.i.d. draws, in order of their first draw, are successive samples whose
    number is independent of the next one. Cost: O(k v).
    """

    name: str = "rrsw"
    laws: Kinds = (WithoutReplacement, IID)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        return recursive_row(p, siblings.q, siblings.draws, without_replacement=True)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return 1 - P(all draws are rejected), a sum over the O(v^(k-1)) sequences of all rejected draws but the last.

        Raises ForetokenError where the tables of that sum would hold more than MOST_STATES numbers.
        """
        counts, repeats = torch.tensor(count_chances(law), dtype=p.dtype, device=p.device), isinstance(law, IID)
        return torch.stack([1 - _all_rejected(*pair, counts, repeats) for pair in zip(p, q, strict=True)])


def recursive_row(
    p: Float[Tensor, " v"], q: Float[Tensor, " v"], draws: tuple[int, ...], without_replacement: bool
) -> Float[Tensor, " v"]:
    """Return the row of the recursion at the top of this file, by the compiled loop where `loops_take` the tensors.

    p, q: probabilities of the target and of the drafter, of any positive sum [v].
    draws: token ids in draw order.
    without_replacement: whether q loses each rejected draw (RRSw).

    Returns the distribution of the emitted token, of p's dtype [v].
    """
    if not loops_take(p, q):
        return plain_row(p, q, draws, without_replacement)
    row = p.detach().numpy().copy()  # numpy copies on this thread; torch would wake its pool for it
    rest = q.detach().numpy().copy() if without_replacement else np.ascontiguousarray(q.detach().numpy())
    fill_row(row, rest, np.array(draws, dtype=np.int64), without_replacement)
    return torch.from_numpy(row)


def plain_row(
    p: Float[Tensor, " v"], q: Float[Tensor, " v"], draws: tuple[int, ...], without_replacement: bool
) -> Float[Tensor, " v"]:
    """Compute `recursive_row` by torch, in float64, on any device and without a host synchronisation. O(k v).

    p, q, draws, without_replacement: as in `recursive_row`.
    """
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


@partial(compiled, reorder_sums=True)
def fill_row(p: np.ndarray, q: np.ndarray, draws: np.ndarray, without_replacement: bool) -> None:
    """Turn p into the row of `recursive_row`, in place.

    p: target probabilities [v], float32 or float64, of any positive sum.
    q: draft probabilities [v], of p's dtype and any sum; if `without_replacement` rejected draws are set to 0 in it.
    draws: token ids in draw order [k], int64.
    without_replacement: whether q loses each rejected draw (RRSw).
    """
    left, mass = total_of(p), total_of(q)  # Z_j and L_j
    accepted = np.zeros(draws.shape[0])
    reach = 1.0  # probability that every draw so far was rejected
    c = 0.0
    for j in range(draws.shape[0]):
        x = draws[j]
        p_x, q_x = np.float64(p[x]), np.float64(q[x])
        if mass <= TINY or q_x <= 0.0:
            continue
        p_j, q_j = max(p_x - c * q_x, 0.0) / left, q_x / mass
        if p_j >= q_j:  # accepted for certain: what follows is never reached
            accepted[j] = reach
            reach = 0.0
            break
        accepted[j] = reach * (p_j / q_j)
        reach -= accepted[j]
        c_next = c + left / mass
        if without_replacement:
            p[x] = q[x] = 0.0  # its residual is 0 for good, since p_j < q_j
        left_next, mass = 0.0, 0.0
        for i in range(p.shape[0]):
            left_next += max(np.float64(p[i]) - c_next * np.float64(q[i]), 0.0)
            mass += np.float64(q[i])
        if left_next <= TINY:  # p == q up to rounding: go back to p_j
            if without_replacement:
                p[x], q[x] = p_x, q_x
            break
        left, c = left_next, c_next
    scale = reach / left
    for i in range(p.shape[0]):
        p[i] = max(np.float64(p[i]) - c * np.float64(q[i]), 0.0) * scale
    for j in range(draws.shape[0]):
        p[draws[j]] += accepted[j]


def rrs_acceptance(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
    """Return the acceptance of RRS: 1 - E[Z_{N+1}] over the number N of draws, since every L_j is 1 [m].

    p, q: distributions of the target and of the drafter, float64 [m, v].
    law: i.i.d. draws, or a single draw.
    """
    c, z = torch.zeros_like(p[:, :1]), torch.ones_like(p[:, :1])
    counts = count_chances(law)
    rejected = counts[0] * z
    for count in counts[1:]:
        c = c + z
        z = (p - c * q).clamp(min=0).sum(-1, keepdim=True)
        rejected = rejected + count * z
    return 1 - rejected[:, 0]


def _all_rejected(
    p: Float[Tensor, " v"], q: Float[Tensor, " v"], counts: Float[Tensor, " n"], repeats: bool
) -> Float[Tensor, ""]:
    """Return P(all draws are rejected) for one pair of distributions p and q [v].

    A state s is a sequence of rejected tokens. weight[s, r] is the probability that exactly these were rejected so far
    and r more draws follow.

    counts: P(N = 0) .. P(N = k) for the number N of draws.
    repeats: whether a draw may repeat an earlier token; the rule passes over such a draw.
    """
    residual = _residual(p, q)
    left, mass = q[None], q.new_ones(1)  # q of the tokens not drawn yet, and its sum
    c, z, weight = q.new_zeros(1), q.new_ones(1), counts[None].clone()
    rejected = q.new_zeros(())
    while True:
        fresh = torch.where(mass[:, None] > 0, weight, 0.0)  # part of `weight` whose next draw is a new token
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
    """Return for each entry the sum of all other entries of its row, without a subtraction, so that nothing cancels."""
    none = torch.zeros_like(left[:, :1])
    before = torch.cat([none, left.cumsum(1)[:, :-1]], 1)
    after = torch.cat([left.flip(1).cumsum(1).flip(1)[:, 1:], none], 1)
    return before + after


def _residual(p: Float[Tensor, " v"], q: Float[Tensor, " v"]) -> Callable[[Tensor], Tensor]:
    """Return the function c -> sum (p - c q)+, by one sort and a look-up."""
    ratio, order = torch.where(q > 0, p / q, torch.inf).sort()
    none = p.new_zeros(1)
    p_from = torch.cat([p[order].flip(0).cumsum(0).flip(0), none])
    q_from = torch.cat([q[order].flip(0).cumsum(0).flip(0), none])

    def at(c: Tensor) -> Tensor:
        i = torch.searchsorted(ratio, c, right=True)
        return (p_from[i] - c * q_from[i]).clamp(min=0)

    return at
