"""Exact transport: the optimal rule for any number of i.i.d. draws, fixed or random, in O(v log v).

With g(x) = 1 - E[(1 - x)^N] (`IID.hit`), tokens in the order of falling p/q, prefix sums P_j, Q_j and G_j = g(Q_j):

    split       h minimises G_j - P_j: no rule accepts more than 1 + G_h - P_h
    selection   s_i = q_i rho_i, rho falling; S_j = s_1 + .. + s_j <= G_j, S_h = G_h, S_K = g(1);
                s <= p up to h and s >= p from there on, so that sum m, m = min(p, s), is that bound
    thresholds  beta_j: the largest u for which j is a vertex of the least concave curve above S - u G
    row         for u uniform in (0, 1), the boundaries with beta_j > u cut the tokens into blocks; the pick is the
                first draw in the first block that is hit; it is accepted with probability min(1, p_i / s_i), else (and
                where there is no draw) the token comes from norm(p - m)

rho is p/q but for a cap, a floor, and steps: tokens side by side have one rho where there is room for that, since the
thresholds cost most where there are many values of it. docs/transport.md proves all of this. The loops are in
`exact_fast`, the same in plain Python in `exact_plain`.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from foretoken.core.draws_fast import on_cpu
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily
from foretoken.verify.acceptance import iid_optimum
from foretoken.verify.hub import HubRule
from foretoken.verify.rejection import is_single
from foretoken.verify.transport.exact_fast import fast_row
from foretoken.verify.transport.groups import Grouping, by_ratio

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
    ns, cs, mean = draw_counts(law)
    groups = grouping(p_row, q_row, mean)
    check_draws(siblings.draws, groups[0])
    row = torch.from_numpy(fast_row(p_row, q_row, np.array(siblings.draws, np.int64), groups, ns, cs))
    return row.to(p)


def as_iid(law: Law) -> IID:
    """A single draw is i.i.d. under other laws too."""
    if isinstance(law, IID):
        return law
    if is_single(law):
        return IID(law.k)
    raise ForetokenError(f"Transport is not lossless for law {law.name} with {law.k} draws: draw them i.i.d.")


def as_numpy(row: Float[Tensor, " v"]) -> np.ndarray:
    """In CPU memory, contiguous; half precision as float32."""
    row = row.detach()
    if not on_cpu(row):
        row = row.to("cpu", torch.promote_types(row.dtype, torch.float32))
    return np.ascontiguousarray(row.numpy())


@lru_cache(maxsize=256)
def draw_counts(law: IID) -> tuple[np.ndarray, np.ndarray, float]:
    """The possible numbers of draws, the probability of each, and their mean."""
    counts = {law.k: 1.0} if law.counts is None else {n: c for n, c in enumerate(law.counts) if c > 0}
    ns, cs = np.array(list(counts), dtype=np.int64), np.array(list(counts.values()), dtype=np.float64)
    return ns, cs, float(ns @ cs)


def check_draws(draws: tuple[int, ...], group: np.ndarray) -> None:
    """Refuse tokens that q cannot have given."""
    for x in draws:
        if not 0 <= x < len(group) or group[x] < 0:
            raise ForetokenError(f"Draw {x} cannot come from q: its probability is 0 or it is outside the vocabulary.")
