"""Two draws without replacement, decided pair by pair of groups of tokens: near the optimum, and exactly lossless.

    groups   of tokens of nearly equal ratio p/q, at most GROUPS of them; the likeliest token of q is one by itself
    shares   theta_ab in [0, 1] for every two groups, theta_ba = 1 - theta_ab, and theta_aa = 1/2; from p and q alone
    pick     of the draws x and y, of the groups a and b, x with probability theta_ab, else y
    s_x      P(x is the pick) = sum over the other tokens y of  theta_ab P(x and y are drawn)
    row      the pick is accepted with probability min(1, p_x / s_x), else the token comes from norm(p - min(p, s))

Whatever the shares are, the row is exact: x comes out as an accepted pick with probability min(p_x, s_x), and what is
missing comes from the residual. With u = q / (1 - q), and sums over a group in capitals,

    P(x and y are drawn) = q_x q_y / (1 - q_x) + q_x q_y / (1 - q_y) = u_x q_y + q_x u_y
    s_x = u_x sum_b theta_ab Q_b  +  q_x sum_b theta_ab U_b  -  q_x u_x         for x in group a

so that s takes O(v). Which shares: those that minimise sum over the groups of s_a^2 / p_a, found pair by pair. Of all
sums that picks can have, this one, the lexicographically optimal base (Fujishige 1980), has the largest sum min(p, s);
with a group for every token that is alpha*. docs/theory.md, Theorem 22, has the proof.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.core.laws import Law, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily
from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import total_of
from foretoken.verify.exact_transport import as_numpy
from foretoken.verify.ratio_groups import by_near_ratio
from foretoken.verify.rejection import TINY, is_single, recursive_row, rrs_acceptance

GROUPS = 128  # with half of them .0001 to .0007 of acceptance is lost, and half of the time: docs/LOG.md, 2026-11-27
LARGEST_RATIO = 64.0  # p/q from which on tokens are one group
SWEEPS = 20  # over all pairs, at most
STILL = 1e-3  # a sweep that moves less mass is the last


@dataclass(frozen=True)
class Pairwise:
    """Near the optimum for two draws without replacement, and exactly lossless. One draw: the standard rule.

    O(v + GROUPS^2), on the CPU: rows on an accelerator are copied there and back.
    """

    name: str = "pairwise"
    laws: tuple[LawFamily, ...] = (WithoutReplacement,)

    def accepts(self, law: Law) -> bool:
        return (isinstance(law, WithoutReplacement) and law.k <= 2) or is_single(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        p_row, q_row = distribution(p), distribution(siblings.q)
        picks = selection(p_row, q_row) if len(siblings.draws) == 2 else None
        if picks is None:  # a second draw came from almost nothing: without it the rule is exact as well
            return recursive_row(p, siblings.q, siblings.draws[:1], without_replacement=True)
        row = np.empty_like(p_row)
        fill_row(p_row, picks.s, np.array(siblings.draws, np.int64), picks.share(*siblings.draws), row)
        return torch.from_numpy(row).to(p)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return sum min(p, s), the picks that are accepted.

        The token after a rejected pick may by chance be the other draw, which is not counted.
        """
        found = rrs_acceptance(p, q, WithoutReplacement(min(law.k, 1)) if law.k == 2 else law)
        if law.k == 2:
            for i, (p_row, q_row) in enumerate(zip(p.cpu().numpy(), q.cpu().numpy(), strict=True)):
                if (picks := selection(p_row, q_row)) is not None:
                    found[i] = float(np.minimum(p_row, picks.s).sum())
        return found


class Picks(NamedTuple):
    """How a draw is picked: s [v], the group of each token [v], and theta [groups, groups]."""

    s: np.ndarray
    group: np.ndarray
    theta: np.ndarray

    def share(self, x: int, y: int) -> float:
        """Return the probability with which x is picked of the draws x and y."""
        return float(self.theta[self.group[x], self.group[y]])


def distribution(row: Float[Tensor, " v"]) -> np.ndarray:
    """Return the row normalised [v], float64, in CPU memory."""
    found = as_numpy(row).astype(np.float64)
    return found / total_of(found)


def selection(p: np.ndarray, q: np.ndarray) -> Picks | None:
    """Return how draws are picked; None where no second draw comes from more than (almost) nothing.

    p, q: probabilities [v], float64, normalised
    """
    largest = int(q.argmax())
    rest = 1 - q
    rest[largest] = total_of(q[:largest]) + total_of(q[largest + 1 :])  # 1 - q could be rounding alone
    if rest[largest] <= TINY:
        return None
    u = q / rest
    fine = by_near_ratio(p, q, LARGEST_RATIO)
    group = np.empty(len(q), np.int32)
    sums = np.zeros((4, 2 * GROUPS + 3))  # two groups side by side hold more than 2 / GROUPS of 2
    num = merge(p, q, u, fine.group, largest, len(fine.p), group, sums)
    sums = np.ascontiguousarray(sums[:, :num])
    theta, s = np.empty((num, num)), np.empty_like(q)
    share_out(sums, theta)
    fill_selection(sums, theta, group, q, u, s)
    return Picks(s, group, theta)


@compiled
def merge(
    p: np.ndarray,
    q: np.ndarray,
    u: np.ndarray,
    fine: np.ndarray,
    largest: int,
    num_fine: int,
    group: np.ndarray,
    sums: np.ndarray,
) -> int:
    """Put fine groups side by side into one as long as it holds little; return the number of groups.

    What a group holds is its p and what it would be picked with if every draw were as likely to be the pick.

    p, q, u: per token [v], float64
    fine: groups of tokens in the order of falling p/q [v], int32, -1 where q is 0
    largest: the token that gets group 0 for itself
    num_fine: the number of fine groups
    group: the result, the group of each token [v], int32; -1 where q is 0
    sums: the result, over the tokens of each group: p, q, u and q u [4, groups], float64, zeros at first
    """
    v = p.shape[0]
    held = np.zeros(num_fine)
    all_u = total_of(u)
    for x in range(v):
        if fine[x] >= 0 and x != largest:
            held[fine[x]] += p[x] + (q[x] * all_u + u[x]) / 2 - q[x] * u[x]
    coarse = np.empty(num_fine, np.int32)
    last, holds = 0, 2.0
    for a in range(num_fine):
        if holds + held[a] > 2.0 / GROUPS and holds > 0.0:
            last += 1
            holds = 0.0
        coarse[a] = last
        holds += held[a]
    for x in range(v):
        group[x] = -1 if fine[x] < 0 else 0 if x == largest else coarse[fine[x]]
        if group[x] >= 0:
            sums[0, group[x]] += p[x]
            sums[1, group[x]] += q[x]
            sums[2, group[x]] += u[x]
            sums[3, group[x]] += q[x] * u[x]
    return last + 1


@compiled
def share_out(sums: np.ndarray, theta: np.ndarray) -> None:
    """Fill theta: to minimise sum s_a^2 / p_a, each pair of groups in turn gets equal s / p, as far as it can.

    sums: as `merge` fills them [4, groups], float64
    theta: the result [groups, groups], float64
    """
    p, q, u, own = sums[0], sums[1], sums[2], sums[3]
    n = p.shape[0]
    s = np.zeros(n)
    for a in range(n):
        theta[a, a] = 0.5
        s[a] += q[a] * u[a] - own[a] if a > 0 else 0.0
        for b in range(a + 1, n):
            theta[a, b] = 1.0 if p[a] * q[b] > p[b] * q[a] else 0.0
            both = q[a] * u[b] + u[a] * q[b]
            s[a] += theta[a, b] * both
            s[b] += both - theta[a, b] * both
    for _ in range(SWEEPS):
        moved = 0.0
        for a in range(n):
            for b in range(a + 1, n):
                both = q[a] * u[b] + u[a] * q[b]
                if not (both > 0.0 and p[a] + p[b] > 0.0):
                    continue
                now = theta[a, b] * both
                new = now + (s[b] * p[a] - s[a] * p[b]) / (p[a] + p[b])
                new = min(max(new, 0.0), both)
                theta[a, b] = new / both
                s[a] += new - now
                s[b] -= new - now
                moved += abs(new - now)
        if moved < STILL:
            break
    for a in range(n):
        for b in range(a):
            theta[a, b] = 1.0 - theta[b, a]


@partial(compiled, reorder_sums=True)
def fill_selection(
    sums: np.ndarray, theta: np.ndarray, group: np.ndarray, q: np.ndarray, u: np.ndarray, s: np.ndarray
) -> None:
    """Fill s, the probability that each token is the pick [v], float64; the others as above."""
    n = theta.shape[0]
    of_q, of_u = np.zeros(n), np.zeros(n)  # sum over b of theta_ab U_b, and of theta_ab Q_b
    for a in range(n):
        for b in range(n):
            if a > 0 or b > 0:  # group 0 is one token, which is not drawn twice
                of_q[a] += theta[a, b] * sums[2, b]
                of_u[a] += theta[a, b] * sums[1, b]
    for x in range(q.shape[0]):
        a = group[x]
        s[x] = 0.0
        if a >= 0:
            s[x] = q[x] * of_q[a] + u[x] * of_u[a] - (q[x] * u[x] if a > 0 else 0.0)


@partial(compiled, reorder_sums=True)
def fill_row(p: np.ndarray, s: np.ndarray, draws: np.ndarray, share: float, row: np.ndarray) -> None:
    """Fill the row.

    p, s: probabilities [v], float64, normalised
    draws: the two tokens [2], int64
    share: P(the first is the pick)
    row: the result [v], float64
    """
    residual = 0.0
    for x in range(p.shape[0]):
        row[x] = p[x] - min(p[x], s[x])
        residual += row[x]
    if residual <= TINY:  # p = s: reached with probability 0 up to rounding, and p serves
        residual = 1.0
        row[:] = p
    x, y = draws[0], draws[1]
    first = share * (1.0 if p[x] >= s[x] else p[x] / s[x])
    second = (1.0 - share) * (1.0 if p[y] >= s[y] else p[y] / s[y])
    scale = max(1.0 - first - second, 0.0) / residual
    for i in range(p.shape[0]):
        row[i] *= scale
    row[x] += first
    row[y] += second
