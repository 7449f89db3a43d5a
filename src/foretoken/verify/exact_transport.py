"""Exact transport: the optimal rule for any number of i.i.d. draws, fixed or random, in O(v log v).

The rule selects one of the draws, the *pick*, so that token i is the pick with a known probability s_i, and accepts it
with probability min(1, p_i / s_i). N is the number of draws, g(x) = 1 - E[(1 - x)^N] (`IID.hit`) the probability that
a draw falls into a set of q-mass x. With the tokens 1 .. K in the order of falling p/q, prefix sums P_j and Q_j of p
and q, and G_j = g(Q_j):

    split       h minimises G_j - P_j: no rule accepts more than 1 + G_h - P_h
    selection   s_i = q_i rho_i, rho falling; S_j = s_1 + .. + s_j <= G_j, S_h = G_h, S_K = g(1);
                s <= p up to h and s >= p from there on, so that sum m, m = min(p, s), is that bound
    thresholds  beta_j: the largest u for which j is a vertex of the least concave curve above S - u G (thresholds.py)
    row         for u uniform in (0, 1), the boundaries with beta_j > u cut the tokens into blocks; the pick is one of
                the draws in the first block that is hit, each with the same probability; it is accepted with
                probability min(1, p_i / s_i), else (and where there is no draw) the token comes from norm(p - m)

rho is p/q but for a cap, a floor, and steps: tokens side by side have one rho where there is room for that, since the
thresholds cost most where there are many values of it. docs/theory.md, Theorem 7, proves it.

`transport-grouped` puts groups of tokens of nearly equal ratio (ratio_groups.py) in the place of tokens, in O(v) and
without a sort: a pick still has the law q_i rho_b of its token, so that m_i = min(p_i, q_i rho_b) is accepted and the
row stays exactly lossless (docs/theory.md, Theorem 8). What is given up of the optimum, alpha* - sum m, is at most
gap(law) (1 + TV(p, q)).
"""

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import total_of
from foretoken.verify.acceptance import iid_optimum
from foretoken.verify.hub import HubRule
from foretoken.verify.ratio_groups import Grouping, by_near_ratio, by_ratio
from foretoken.verify.rejection import recursive_row
from foretoken.verify.rule import TINY, Kinds, Rule, as_numpy, count_chances, draws_one, is_one_draw, is_single
from foretoken.verify.thresholds import thresholds

HUB = HubRule()


@dataclass(frozen=True)
class Transport(Rule):
    """The optimum for i.i.d. draws of any number, fixed or random, and for hub draws: accepts with probability alpha*.

    One draw is decided by the standard rule, hub draws by rule `hub`, which is the optimum for them. Several i.i.d.
    draws cost O(v log v), on the CPU: rows on an accelerator are copied there and back.
    """

    name: str = "transport"
    laws: Kinds = (IID, Hub)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        return HUB(p, siblings) if isinstance(siblings.law, Hub) else transport_row(p, siblings, by_ratio)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return alpha* = 1 + min over j of G_j - P_j, where P_j counts the tokens with q = 0 too."""
        return HUB.acceptance(p, q, law) if isinstance(law, Hub) else iid_optimum(p, q, as_iid(law))


@dataclass(frozen=True)
class TransportGrouped(Rule):
    """Nearly the optimum for i.i.d. draws of any number, fixed or random, and exactly lossless.

    Cost: O(v), on the CPU: rows on an accelerator are copied there and back.
    """

    name: str = "transport-grouped"

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        return transport_row(p, siblings, by_near_ratio)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return sum m, the probability that the pick is accepted; for one draw, which needs no groups, the optimum.

        The token after a rejected pick may by chance be a draw too. This has less probability than the gap, and is not
        counted.
        """
        if law.k == 0:
            return torch.zeros_like(p[:, 0])
        if draws_one(law):
            return iid_optimum(p, q, as_iid(law))
        ns, cs, mean = draw_counts(as_iid(law))
        found = []
        for p_row, q_row in zip(p.cpu().numpy(), q.cpu().numpy(), strict=True):
            groups = by_near_ratio(p_row, q_row, mean)
            rho = selection(groups.p, groups.q, ns, cs)
            picked = np.where(groups.group >= 0, rho[groups.group] * q_row, 0.0)
            found.append(float(np.minimum(p_row, picked).sum()))
        return torch.tensor(found, dtype=p.dtype, device=p.device)


def transport_row(p: Float[Tensor, " v"], siblings: Siblings, grouping: Grouping) -> Float[Tensor, " v"]:
    """Return the row for tokens put into groups by `grouping`: optimal if tokens of one group have one ratio p/q.

    One draw is decided by the standard rule, which is optimal for it and needs no groups.

    p: target probabilities after the node, of any positive sum [v].
    siblings: the draws, q, and an i.i.d. law or one that makes a single draw.
    grouping: `by_ratio` or `by_near_ratio` of ratio_groups.py.

    Raises ForetokenError where the law or q cannot have made the draws.
    """
    law, q, draws = as_iid(siblings.law), siblings.q, siblings.draws
    if len(draws) > law.k:
        raise ForetokenError(f"The law makes at most {law.k} draws at a node, but there are {len(draws)}.")
    if law.k == 0:
        return p
    assert q is not None
    for x in draws:
        if not 0 <= x < len(q) or not q[x] > 0:
            raise ForetokenError(f"Draw {x} cannot come from q: its probability is 0 or it is outside the vocabulary.")
    if is_one_draw(siblings):
        return recursive_row(p, q, draws, without_replacement=False)
    p_row, q_row = as_numpy(p), as_numpy(q)
    ns, cs, mean = draw_counts(law)
    group, p_mass, q_mass = grouping(p_row, q_row, mean)
    rho = selection(p_mass, q_mass, ns, cs)
    tokens = np.array(draws, np.int64)
    ranks = group[tokens]
    apart = len(draws) > 1 and ranks.min() < ranks.max()  # else no boundary lies between draws
    beta = thresholds(rho, q_mass, ns, cs) if apart else np.zeros_like(rho)
    return torch.from_numpy(row_of_picks(p_row, q_row, group, rho, beta, tokens)).to(p)


def as_iid(law: Law) -> IID:
    """Return `law` as i.i.d. draws, which a single draw is under other laws too.

    Raises ForetokenError for several draws that are not i.i.d.
    """
    if isinstance(law, IID):
        return law
    if is_single(law):
        return IID(law.k)
    raise ForetokenError(f"Transport is not lossless for law {law.name} with {law.k} draws: draw them i.i.d.")


@lru_cache(maxsize=256)
def draw_counts(law: IID) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the numbers of draws that `law` makes [n], int64, the probability of each [n], float64, and their mean."""
    counts = {n: c for n, c in enumerate(count_chances(law)) if c > 0}
    ns, cs = np.array(list(counts), dtype=np.int64), np.array(list(counts.values()), dtype=np.float64)
    return ns, cs, float(ns @ cs)


@compiled
def selection(p: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray) -> np.ndarray:
    """Return rho of each group [groups], float64, by the steps, the cap and the floor of docs/theory.md, Theorem 7.

    p, q: masses of the groups in the order of falling p/q [groups], float64; every q > 0.
    ns, cs: possible numbers of draws [n], int64, and their probabilities [n], float64.
    """
    k = p.shape[0]
    mean, hit = 0.0, 0.0
    for i in range(ns.shape[0]):
        mean += ns[i] * cs[i]
        if ns[i] > 0:
            hit += cs[i]
    rho, h = steps(p, q, ns, cs, mean)
    before, left = 0.0, 0.0  # Q_h, and G_h to its last digit also where it is tiny
    for j in range(h):
        before += q[j]
    if before <= TINY:  # no digit of G_h can be relied on, and a cap that is missing gives away less than that mass
        h = 0
    for i in range(ns.shape[0]):
        if ns[i] > 0 and h > 0:
            left -= cs[i] * np.expm1(ns[i] * np.log1p(-min(before, 1.0)))
    lowest = left / before if h > 0 else 0.0
    tau = mean  # tau <= g'(0) = E[N], and with h = 0 no ratio is above that: so it stands for infinity
    for j in range(h - 1, -1, -1):  # groups 0..j are capped at t
        t = max(left / before, lowest)
        if j + 1 < h:
            t = max(t, rho[j + 1])
        if rho[j] >= t:
            tau = min(t, mean)
            break
        left -= rho[j] * q[j]
        before -= q[j]
    missing = hit
    for j in range(k):
        rho[j] = min(rho[j], tau)
        missing -= rho[j] * q[j]
    missing = max(missing, 0.0)
    sigma, s_low, q_low = 0.0, 0.0, 0.0
    for j in range(k - 1, -1, -1):  # groups j.. are floored at sigma
        s_low += rho[j] * q[j]
        q_low += q[j]
        sigma = min((missing + s_low) / q_low, tau)
        if j > 0 and sigma <= rho[j - 1]:
            break
    return np.maximum(rho, sigma)


@compiled
def steps(p: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray, mean: float) -> tuple[np.ndarray, int]:
    """Return rho by the steps alone [groups], and the split h, the number of groups before it.

    p, q, ns, cs: as in `selection`.
    mean: E[N], the mean number of draws, to which ratios are cut.
    """
    k = p.shape[0]
    rho = np.empty(k)
    spare, rest = np.empty(k + 1), np.empty(k + 1)  # G - P, and the q-mass after group j, R_j: G_j = 1 - E[R_j^N]
    rest[k] = 0.0
    for j in range(k - 1, -1, -1):
        rest[j] = rest[j + 1] + q[j]
    h, prefix = 0, 0.0
    spare[0] = 0.0
    for j in range(1, k + 1):
        prefix += p[j - 1]
        g = 1.0
        for i in range(ns.shape[0]):
            power, square, bits = cs[i], rest[j], ns[i]
            while bits > 0:  # cs * rest^ns, at a quarter of the time of pow
                if bits & 1:
                    power *= square
                square *= square
                bits >>= 1
            g -= power
        spare[j] = g - prefix
        if spare[j] < spare[h]:
            h = j
    # Away from h, each step is as long as the curve stays below G there and can stay below it further on.
    for j in range(k - 1, h, -1):
        spare[j] = min(spare[j], spare[j + 1])
    for j in range(1, h):
        spare[j] = min(spare[j], spare[j - 1])
    spent, j = spare[h], h
    while j < k:
        step = min(p[j] / q[j], mean)
        rho[j] = step
        j += 1
        while j < k and spent + (step * q[j] - p[j]) <= spare[j + 1]:
            spent += max(step * q[j] - p[j], 0.0)
            rho[j] = step
            j += 1
    spent, j = spare[h], h - 1
    while j >= 0:
        step = min(p[j] / q[j], mean)
        rho[j] = step
        j -= 1
        while j >= 0 and spent + (p[j] - step * q[j]) <= spare[j]:
            spent += max(p[j] - step * q[j], 0.0)
            rho[j] = step
            j -= 1
    return rho, h


@partial(compiled, reorder_sums=True)
def row_of_picks(
    p: np.ndarray, q: np.ndarray, group: np.ndarray, rho: np.ndarray, beta: np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """Return the row [v], of p's dtype, from the selection and the thresholds.

    p, q: probabilities of the target and of the drafter [v], float32 or float64, of any positive sum.
    group: the group of each token [v], int32, -1 where q is 0.
    rho, beta: the selection and the threshold of each group [groups], float64.
    draws: token ids [d], int64; their order does not matter.
    """
    row = np.empty_like(p)
    p_total, q_total = total_of(p), total_of(q)
    d = draws.shape[0]
    accepted = np.zeros(d)
    ranks = np.empty(d, np.int64)
    for j in range(d):
        ranks[j] = group[draws[j]]
    by_rank = np.argsort(ranks)
    each = np.empty(d)  # P(the first i + 1 draws by rank are those in the first block hit) / (i + 1)
    reached = 0.0
    for i in range(d):
        upto = 1.0
        if i + 1 < d:
            upto = reached
            for j in range(ranks[by_rank[i]], ranks[by_rank[i + 1]]):
                upto = max(upto, beta[j])
        each[i] = (upto - reached) / (i + 1)
        reached = upto
    picked, rejected = 0.0, 1.0
    for i in range(d - 1, -1, -1):
        picked += each[i]
        j = by_rank[i]
        p_x = np.float64(p[draws[j]]) / p_total
        s_x = rho[ranks[j]] * (np.float64(q[draws[j]]) / q_total)
        accepted[j] = picked * (1.0 if p_x >= s_x else p_x / s_x)
        rejected -= accepted[j]
    residual = 0.0
    if rejected > 0.0:
        for x in range(p.shape[0]):
            p_x = np.float64(p[x]) / p_total
            if group[x] >= 0:
                p_x -= min(p_x, rho[group[x]] * (np.float64(q[x]) / q_total))
            row[x] = p_x
            residual += p_x
        if residual <= TINY:  # p = m: reached with probability 0 up to rounding, and p serves
            residual = p_total
            for x in range(p.shape[0]):
                row[x] = p[x]
    scale = rejected / residual if residual > 0.0 else 0.0
    for x in range(p.shape[0]):
        row[x] = row[x] * scale if scale > 0.0 else 0.0
    for j in range(d):
        row[draws[j]] += accepted[j]
    return row
