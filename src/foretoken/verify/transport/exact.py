"""Exact transport: the optimal rule for any number of i.i.d. draws, fixed or random, in O(v log v).

With g(x) = 1 - E[(1 - x)^N] (`IID.hit`), tokens in the order of falling p/q, prefix sums P_j, Q_j and G_j = g(Q_j):

    cap         h minimises G_j - P_j;  tau solves  sum_{i <= h} min(p_i, tau q_i) = G_h;  m = min(p, tau q) is accepted
    floor       sigma solves  sum s_i = g(1)  with  s_i = q_i rho_i,  rho_i = clip(p_i / q_i, sigma, tau)
    thresholds  beta_j: the largest u for which j is a vertex of the least concave curve above S - u G
    row         for u uniform in (0, 1), the boundaries with beta_j > u cut the tokens into blocks; the pick is the
                first draw in the first block that is hit; it is accepted with probability min(1, p_i / s_i), else (and
                where there is no draw) the token comes from norm(p - m)

docs/transport.md proves that the pick has law s, and that no rule accepts more than sum m. The compiled loops are in
`exact_fast`; the functions here are the same in plain Python, quadratic in v.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily
from foretoken.verify.hub import HubRule
from foretoken.verify.optimum import iid_optimum
from foretoken.verify.rejection import is_single
from foretoken.verify.transport.exact_fast import Grouping, Groups, by_ratio, fast_row

HUB = HubRule()


@dataclass(frozen=True)
class Transport:
    """The optimum for i.i.d. draws of any number, fixed or random, and for hub draws: accepts with probability alpha*.

    Formula: the module's docstring; proof: docs/transport.md. One draw: the standard rule. Hub draws: rule `hub`, which
    is the optimum for them. O(v log v), on the CPU: rows on an accelerator are copied there and back.
    """

    name: str = "transport"
    laws: tuple[LawFamily, ...] = (IID, Hub)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, IID | Hub) or is_single(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        return HUB(p, siblings) if isinstance(siblings.law, Hub) else transport_row(p, siblings, by_ratio)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """alpha* = 1 + min over j of G_j - P_j, where P_j counts the tokens with q = 0 too."""
        return HUB.acceptance(p, q, law) if isinstance(law, Hub) else iid_optimum(p, q, as_iid(law))


def transport_row(p: Float[Tensor, " v"], siblings: Siblings, grouping: Grouping) -> Float[Tensor, " v"]:
    """The row for tokens put into groups by `grouping`: exact if tokens of one group have one ratio p/q."""
    law, q = as_iid(siblings.law), siblings.q
    if len(siblings.draws) > law.k:
        raise ForetokenError(f"The law makes at most {law.k} draws at a node, but there are {len(siblings.draws)}.")
    if law.k == 0:
        return p
    assert q is not None
    p_row, q_row = as_numpy(p), as_numpy(q)
    ns, cs = draw_counts(law)
    groups = grouping(p_row, q_row, float(ns @ cs))
    draws = np.array(siblings.draws, dtype=np.int64)
    check_draws(draws, groups[0])
    return torch.from_numpy(fast_row(p_row, q_row, draws, groups, ns, cs)).to(p.device, p.dtype)


def as_iid(law: Law) -> IID:
    """A single draw is i.i.d. under other laws too."""
    if isinstance(law, IID):
        return law
    if is_single(law):
        return IID(law.k)
    raise ForetokenError(f"Transport is not lossless for law {law.name} with {law.k} draws: draw them i.i.d.")


def as_numpy(row: Float[Tensor, " v"]) -> np.ndarray:
    """In CPU memory, contiguous; half precision as float32."""
    row = row.detach().cpu()
    return np.ascontiguousarray((row if row.dtype in (torch.float32, torch.float64) else row.float()).numpy())


def draw_counts(law: IID) -> tuple[np.ndarray, np.ndarray]:
    """The possible numbers of draws, and the probability of each."""
    counts = {law.k: 1.0} if law.counts is None else {n: c for n, c in enumerate(law.counts) if c > 0}
    return np.array(list(counts), dtype=np.int64), np.array(list(counts.values()), dtype=np.float64)


def check_draws(draws: np.ndarray, group: np.ndarray) -> None:
    """Refuse tokens that q cannot have given."""
    for x in draws:
        if not 0 <= x < len(group) or group[x] < 0:
            raise ForetokenError(f"Draw {x} cannot come from q: its probability is 0 or it is outside the vocabulary.")


def plain_row(
    p: np.ndarray, q: np.ndarray, draws: np.ndarray, groups: Groups, ns: np.ndarray, cs: np.ndarray
) -> np.ndarray:
    """What `exact_fast.fast_row` computes."""
    group, p_mass, q_mass = groups
    rho = plain_selected(p_mass, q_mass, ns, cs)
    beta = plain_thresholds(rho, q_mass, ns, cs)
    p, q = p / p.sum(dtype=np.float64), q / q.sum(dtype=np.float64)
    selected = np.where(group >= 0, rho[group] * q, 0.0)
    accepted = np.minimum(p, selected)
    row = np.zeros(len(p))
    ranks = sorted({int(group[x]) for x in draws})
    reached = 0.0
    for rank, following in zip(ranks, [*ranks, len(beta)][1:], strict=True):
        upto = max(reached, float(beta[rank:following].max()))  # the boundary at the end never dies
        pick = next(x for x in draws if group[x] <= rank)
        row[pick] += (upto - reached) * (accepted[pick] / selected[pick] if selected[pick] > p[pick] else 1.0)
        reached = upto
    residual = p - accepted
    return row + (1 - row.sum()) * (residual / residual.sum() if residual.sum() > 0 else p)


def plain_selected(p: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray) -> np.ndarray:
    """rho: the cap and the floor, each found by bisection."""
    mean, hit = float(ns @ cs), float(cs[ns > 0].sum())
    hits = _g(np.cumsum(q)[:, None], ns) @ cs
    h = int(np.concatenate([[0.0], hits - np.cumsum(p)]).argmin())
    tau = mean
    if h > 0:
        tau = _bisect(lambda t: float(np.minimum(p[:h], t * q[:h]).sum() - hits[h - 1]), mean)
    with np.errstate(over="ignore"):
        ratio = np.minimum(p / q, tau)
    sigma = _bisect(lambda s: float((q * np.maximum(ratio, s)).sum()) - hit, tau)
    return np.maximum(ratio, sigma)


def plain_thresholds(rho: np.ndarray, q: np.ndarray, ns: np.ndarray, cs: np.ndarray) -> np.ndarray:
    """beta: merge the two neighbours whose slopes of S - u G meet first, again and again."""
    ends = [j for j in range(len(rho)) if j == len(rho) - 1 or rho[j] != rho[j + 1]]
    beta = np.zeros(len(rho))
    rest = np.cumsum(q[::-1])[::-1]  # the q-mass from group j on
    time = 0.0
    while len(ends) > 1:
        blocks = [slice(start, end + 1) for start, end in zip([0, *(e + 1 for e in ends[:-1])], ends, strict=True)]
        a = [float((rho[b] * q[b]).sum() / q[b].sum()) for b in blocks]
        s = [float(rest[b.start] ** ns @ (cs * _g(q[b].sum() / rest[b.start], ns)) / q[b].sum()) for b in blocks]
        meet = [
            (a[i] - a[i + 1]) / (s[i] - s[i + 1]) if s[i] > s[i + 1] else (np.inf if a[i] > a[i + 1] else 0.0)
            for i in range(len(a) - 1)
        ]
        first = int(np.argmin(meet))
        if meet[first] >= 1:
            break
        time = max(time, meet[first])
        beta[ends.pop(first)] = time
    beta[ends] = 1.0
    return beta


def _g(x: np.ndarray | np.float64, ns: np.ndarray) -> np.ndarray:
    """1 - (1 - x)^n, n along the last dimension."""
    with np.errstate(divide="ignore", invalid="ignore"):  # log(0) is right
        return np.where(ns > 0, -np.expm1(ns * np.log1p(-np.minimum(x, 1.0))), 0.0)


def _bisect(rising: Callable[[float], float], high: float) -> float:
    """The least t in [0, high] with rising(t) >= 0, or high."""
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) >= 0 else (middle, high)
    return high
