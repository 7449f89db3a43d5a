"""Two draws without replacement, decided pair by pair of groups of tokens: near the optimum, and exactly lossless.

    groups   tokens of nearly equal ratio p/q form one group; a token of large probability is a group by itself
    pick     one of the two draws: with the first in group a and the second in group b, the first with probability
             keep_ab, else the second; keep depends on p and q alone, and keep_aa = 1
    s_x      P(x is the pick)
    row      the pick is accepted with probability min(1, p_x / s_x), else the token comes from norm(p - min(p, s))

Whatever keep is, the row is exact: x comes out as an accepted pick with probability min(p_x, s_x), and the rest of p_x
comes from the residual. With u = q / (1 - q), and Q_b, U_b the sums of q and u over group b,

    P(x is drawn, then y) = q_x q_y / (1 - q_x) = u_x q_y
    s_x = u_x (sum_b keep_ab Q_b - q_x)  +  q_x sum_b (1 - keep_ba) U_b         for x in group a

so that s takes O(v). The keep that is used minimises the sum over the groups of s_a^2 / p_a, with s_a and p_a the sums
of s and p over group a. It is found by making s / p of two groups equal as far as their draws allow, for every two in
turn, until little mass moves. Of all s that picks can have, this one, the lexicographically optimal base (Fujishige
1980), has the largest sum min(p, s); with a group for every token that sum is alpha*. docs/theory.md, Theorem 22, has
the proof. The search begins with every first draw as the pick, so that s = q: the optimum where p = q.
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
from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import total_of
from foretoken.verify.ratio_groups import by_near_ratio
from foretoken.verify.rejection import recursive_row, rrs_acceptance
from foretoken.verify.rule import TINY, Kinds, Rule, as_numpy

GROUPS = 128  # half as many lose up to twice as much of alpha*, in half of the time: docs/LOG.md, 2026-11-27
LARGEST_RATIO = 64.0  # p/q from which on tokens are one group
SWEEPS = 100  # the most sweeps over all pairs of groups; where p and q are close and flat, more than 20 are needed
STILL = 1e-3  # a sweep that moves less probability than this is the last


@dataclass(frozen=True)
class Pairwise(Rule):
    """Near the optimum for two draws without replacement, and exactly lossless. One draw is left to the standard rule.

    Cost: O(v), and some sweeps over all pairs of at most 2 GROUPS + 1 groups, on the CPU: rows on an accelerator are
    copied there and back.
    """

    name: str = "pairwise"
    laws: Kinds = (WithoutReplacement,)

    def accepts(self, law: Law) -> bool:
        return law.k <= 2 and super().accepts(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        draws = siblings.draws
        if len(draws) == 2:
            row = distribution(p)
            picks = selection(row, distribution(siblings.q))
            if picks is not None and picks.possible(draws):
                fill_row(row, picks.s, np.array(draws, np.int64), picks.kept(*draws))
                return torch.from_numpy(row).to(p)
        return recursive_row(p, siblings.q, draws, without_replacement=True)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return sum min(p, s), the probability that the pick is accepted.

        The token after a rejected pick may by chance be the other draw, which is not counted.
        """
        found = rrs_acceptance(p, q, WithoutReplacement(1) if law.k == 2 else law)
        if law.k == 2:
            for i, (p_row, q_row) in enumerate(zip(p.cpu().numpy(), q.cpu().numpy(), strict=True)):
                if (picks := selection(p_row, q_row)) is not None:
                    found[i] = float(np.minimum(p_row, picks.s).sum())
        return found


class Picks(NamedTuple):
    """How one of two draws is picked.

    s: the probability that each token is the pick [v].
    group: the group of each token, -1 where q is 0 [v].
    keep: keep_ab, the probability that the first draw is the pick [groups, groups].
    """

    s: np.ndarray
    group: np.ndarray
    keep: np.ndarray

    def possible(self, draws: tuple[int, ...]) -> bool:
        """Whether q can have made these two draws: they are different token ids, both with q > 0."""
        return draws[0] != draws[1] and all(self.group[x] >= 0 for x in draws)

    def kept(self, first: int, second: int) -> float:
        """Return the probability that the first draw is the pick; first, second: the token ids of the draws."""
        return float(self.keep[self.group[first], self.group[second]])


def distribution(row: Float[Tensor, " v"]) -> np.ndarray:
    """Return `row` [v] as a float64 array in CPU memory, divided by its sum."""
    found = as_numpy(row).astype(np.float64)
    return found / total_of(found)


def selection(p: np.ndarray, q: np.ndarray) -> Picks | None:
    """Return how draws are picked; None where one token has (almost) all of q, so that there is no second draw.

    p, q: probabilities of the target and of the drafter [v], float64, normalised.
    """
    largest = int(q.argmax())
    rest = 1 - q
    rest[largest] = total_of(q[:largest]) + total_of(q[largest + 1 :])  # 1 - q could be rounding alone
    if rest[largest] <= TINY:
        return None
    u = q / rest
    fine = by_near_ratio(p, q, LARGEST_RATIO)
    group, sums = merge(p, q, u, fine.group, largest, len(fine.p))
    keep = kept_first(sums)
    return Picks(picked(sums, keep, group, q, u), group, keep)


@compiled
def merge(
    p: np.ndarray, q: np.ndarray, u: np.ndarray, fine: np.ndarray, largest: int, num_fine: int
) -> tuple[np.ndarray, np.ndarray]:
    """Merge fine groups that are neighbours by ratio into at most 2 GROUPS + 1 coarser ones of similar weight.

    The weight of a token is p plus half of the probability that it is drawn; the weights of all tokens sum to 2. A
    token that weighs more than 1 / GROUPS becomes a group by itself. Of the other tokens, fine groups are merged as
    long as the coarse one weighs at most 2 / GROUPS.

    p, q, u: of each token: target and draft probabilities, and q / (1 - q) [v], float64.
    fine: the fine group of each token, in the order of falling p/q [v], int32, -1 where q is 0.
    largest: the id of the token with the largest q.
    num_fine: the number of fine groups.

    Returns the group of each token [v], int32, -1 where q is 0, and the sums of p, q and u over each group [3, groups].
    """
    v = p.shape[0]
    group, sums = np.empty(v, np.int32), np.zeros((3, 2 * GROUPS + 2))
    holds, of_fine = np.empty(v), np.zeros(num_fine)
    others = total_of(u[:largest]) + total_of(u[largest + 1 :])
    for x in range(v):
        second = q[x] * (others if x == largest else others - u[x] + u[largest])
        holds[x] = p[x] + (q[x] + second) / 2
        if fine[x] >= 0 and holds[x] <= 1.0 / GROUPS:
            of_fine[fine[x]] += holds[x]
    coarse = np.empty(num_fine, np.int32)
    num, held = 0, 0.0
    for a in range(num_fine):
        if num == 0 or held + of_fine[a] > 2.0 / GROUPS:
            num += 1
            held = 0.0
        held += of_fine[a]
        coarse[a] = num - 1
    for x in range(v):
        group[x] = -1
        if fine[x] >= 0:
            group[x] = coarse[fine[x]]
            if holds[x] > 1.0 / GROUPS:
                group[x] = num
                num += 1
            sums[0, group[x]] += p[x]
            sums[1, group[x]] += q[x]
            sums[2, group[x]] += u[x]
    return group, sums[:, :num].copy()


@compiled
def kept_first(sums: np.ndarray) -> np.ndarray:
    """Return the keep that minimises the sum over groups of s_a^2 / p_a [groups, groups]; sums: as from `merge`."""
    p, q, u = sums[0], sums[1], sums[2]
    n = p.shape[0]
    s = q.copy()
    # For a < b: the probability of picks in a that are second draws, after a first draw in b, less those the other way.
    gained = np.zeros((n, n))
    for _ in range(SWEEPS):
        moved = 0.0
        for a in range(n):
            for b in range(a + 1, n):
                if p[a] + p[b] <= 0.0:
                    continue
                now = gained[a, b]
                new = now + (s[b] * p[a] - s[a] * p[b]) / (p[a] + p[b])
                new = min(max(new, -u[a] * q[b]), u[b] * q[a])
                gained[a, b] = new
                s[a] += new - now
                s[b] -= new - now
                moved += abs(new - now)
        if moved < STILL:
            break
    keep = np.eye(n)
    for a in range(n):
        for b in range(a + 1, n):
            mass = gained[a, b]
            keep[a, b] = 1.0 + mass / (u[a] * q[b]) if mass < 0.0 else 1.0
            keep[b, a] = 1.0 - mass / (u[b] * q[a]) if mass > 0.0 else 1.0
    return keep


@partial(compiled, reorder_sums=True)
def picked(sums: np.ndarray, keep: np.ndarray, group: np.ndarray, q: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return s, the probability that each token is the pick [v], float64.

    sums: the sums of p, q and u over each group [3, groups].
    keep: keep_ab, the probability that the first draw is the pick [groups, groups].
    group: the group of each token [v], int32, -1 where q is 0.
    q, u: of each token: draft probabilities, and q / (1 - q) [v], float64.
    """
    n, s = keep.shape[0], np.empty_like(q)
    of_u, of_q = np.zeros(n), np.zeros(n)  # sums over the other groups b: keep_ab Q_b, and (1 - keep_ba) U_b
    for a in range(n):
        for b in range(n):
            if a != b:
                of_u[a] += keep[a, b] * sums[1, b]
                of_q[a] += (1.0 - keep[b, a]) * sums[2, b]
    for x in range(q.shape[0]):
        a = group[x]
        s[x] = u[x] * (of_u[a] + max(sums[1, a] - q[x], 0.0)) + q[x] * of_q[a] if a >= 0 else 0.0
    return s


@partial(compiled, reorder_sums=True)
def fill_row(row: np.ndarray, s: np.ndarray, draws: np.ndarray, kept: float) -> None:
    """Turn p into the row, in place.

    row: holds p at first [v], float64, normalised.
    s: the probability that each token is the pick [v], float64.
    draws: the ids of the two draws in draw order [2], int64.
    kept: the probability that the first draw is the pick.
    """
    x, y = draws[0], draws[1]
    first = kept * (1.0 if row[x] >= s[x] else row[x] / s[x])
    second = (1.0 - kept) * (1.0 if row[y] >= s[y] else row[y] / s[y])
    residual = 0.0
    for i in range(row.shape[0]):
        row[i] = max(row[i] - s[i], 0.0)  # a difference of sums, which the compiler may take, would be rounding here
        residual += row[i]
    # p = s leaves no residual: it is then reached with probability 0 up to rounding.
    scale = max(1.0 - first - second, 0.0) / residual if residual > TINY else 0.0
    for i in range(row.shape[0]):
        row[i] *= scale
    row[x] += first
    row[y] += second
