"""Grouped transport: the exact rule over at most GROUPS groups of tokens of nearly equal p/q, in O(v) and no sort.

The groups stand in the place of tokens, with their masses P_b and Q_b: a pick still has the law q_i rho_b of its token,
so that m_i = min(p_i, q_i rho_b) is accepted and the row stays exactly lossless (docs/transport.md, section 5). What is
given up of the optimum, alpha* - sum m, is at most

    width / 4 * sum max(p, q)  =  width / 4 * (1 + TV(p, q)),    1 / width = floor((GROUPS - 1) / (1 + ln max(1, E[N])))

for groups of equal width in phi(r) = min(r, 1) + ln(max(r, 1)), r = p/q, up to r = E[N]; above that is one group.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretoken.core.compiled import compiled
from foretoken.core.laws import IID, Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily
from foretoken.verify.rejection import is_single
from foretoken.verify.transport.exact import as_iid, draw_counts, transport_row
from foretoken.verify.transport.exact_fast import Groups, selected_loop

GROUPS = 1024


@dataclass(frozen=True)
class TransportGrouped:
    """Within `gap` of the optimum for i.i.d. draws of any number, fixed or random, and exactly lossless. O(v).

    Formula: the module's docstring; proof: docs/transport.md. On the CPU: rows elsewhere are copied there and back.
    """

    name: str = "transport-grouped"
    laws: tuple[LawFamily, ...] = (IID,)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, IID) or is_single(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        return transport_row(p, siblings, by_near_ratio)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """sum m: the picks that are accepted. The token after a rejected one may by chance be a draw too: less than
        `gap` in all, and not counted."""
        if law.k == 0:
            return torch.zeros_like(p[:, 0])
        pairs = zip(p.cpu().numpy(), q.cpu().numpy(), strict=True)
        return torch.tensor([accepted_mass(*pair, as_iid(law)) for pair in pairs], dtype=p.dtype, device=p.device)


def gap(law: IID) -> float:
    """The largest acceptance given up per unit of 1 + TV(p, q)."""
    return _width(sum(law.tails)) / 4


def accepted_mass(p: np.ndarray, q: np.ndarray, law: IID) -> float:
    ns, cs = draw_counts(law)
    group, p_mass, q_mass = by_near_ratio(p, q, float(ns @ cs))
    rho = np.empty_like(p_mass)
    compiled(selected_loop)(p_mass, q_mass, ns, cs, rho)
    return float(np.minimum(p, np.where(group >= 0, rho[group] * q, 0.0)).sum())


def by_near_ratio(p: np.ndarray, q: np.ndarray, mean: float) -> Groups:
    """(group of each token or -1, p of the groups, q of the groups), groups in the order of falling ratio."""
    group, masses, size = np.empty(len(p), np.int32), np.zeros((2, GROUPS)), np.empty(1, np.int64)
    compiled(group_loop)(p, q, mean, _width(mean), group, masses, size)
    return group, masses[0, : size[0]], masses[1, : size[0]]


def group_loop(
    p: np.ndarray,
    q: np.ndarray,
    mean: float,
    width: float,
    group: np.ndarray,
    masses: np.ndarray,
    size: np.ndarray,
) -> None:
    """Groups with tokens move together at the front; size = [their number]."""
    p_total, q_total = 0.0, 0.0
    for x in range(p.shape[0]):
        p_total += np.float64(p[x])
        q_total += np.float64(q[x])
    last = masses.shape[1] - 1
    for x in range(p.shape[0]):
        p_x, q_x = np.float64(p[x]) / p_total, np.float64(q[x]) / q_total
        group[x] = -1
        if q_x <= 0.0:
            continue
        if p_x >= mean * q_x and mean >= 1.0:
            b = 0
        elif p_x <= q_x:
            b = last - int(p_x / q_x / width)
        else:
            b = last - int((1.0 + np.log(p_x / q_x)) / width)
        b = max(b, 0)
        group[x] = b
        masses[0, b] += p_x
        masses[1, b] += q_x
    moved = np.zeros(last + 1, np.int32)
    n = 0
    for b in range(last + 1):
        if masses[1, b] > 0.0:
            moved[b] = n
            masses[0, n], masses[1, n] = masses[0, b], masses[1, b]
            n += 1
    for x in range(p.shape[0]):
        if group[x] >= 0:
            group[x] = moved[group[x]]
    size[0] = n


def _width(mean: float) -> float:
    """1 / width is whole, so that no group reaches across r = 1; the first group, above E[N], has no width."""
    return 1 / max(1, int((GROUPS - 1) / (1 + math.log(max(1.0, mean)))))
