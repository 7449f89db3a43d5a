"""Grouped transport: the exact rule over at most GROUPS groups of tokens of nearly equal p/q, in O(v) and no sort.

The groups stand in the place of tokens, with their masses P_b and Q_b: a pick still has the law q_i rho_b of its token,
so that m_i = min(p_i, q_i rho_b) is accepted and the row stays exactly lossless (docs/transport.md, section 4). What is
given up of the optimum, alpha* - sum m, is at most

    width / 4 * sum max(p, q)  =  width / 4 * (1 + TV(p, q)),    1 / width = floor((GROUPS - 1) / phi(max(1, E[N])))

for groups of equal width in phi(r), r = p/q, up to r = E[N]; above that is one group. phi(r) = r up to 1; from there on
it grows by 1 in each octave, straight: phi(r) = e + r / 2^e where 2^e <= r < 2^(e+1).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretoken.core.laws import IID, Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily
from foretoken.kernel.compile import compiled
from foretoken.verify.rejection import is_single
from foretoken.verify.transport.exact import as_iid, draw_counts, transport_row
from foretoken.verify.transport.exact_fast import selected_loop
from foretoken.verify.transport.groups import Groups

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
    return 1 / (4 * _per_unit(sum(law.tails)))


def accepted_mass(p: np.ndarray, q: np.ndarray, law: IID) -> float:
    ns, cs, mean = draw_counts(law)
    group, p_mass, q_mass = by_near_ratio(p, q, mean)
    rho = np.empty_like(p_mass)
    compiled(selected_loop)(p_mass, q_mass, ns, cs, rho)
    return float(np.minimum(p, np.where(group >= 0, rho[group] * q, 0.0)).sum())


def by_near_ratio(p: np.ndarray, q: np.ndarray, mean: float) -> Groups:
    """(group of each token or -1, p of the groups, q of the groups), groups in the order of falling ratio."""
    group, masses, size = np.empty(len(p), np.int32), np.zeros((GROUPS, 2)), np.empty(1, np.int64)
    ratio = np.empty(len(p))
    arguments = (p, q, mean, _per_unit(mean), ratio, ratio.view(np.int64), group, masses, size)
    compiled(group_loop, reorder_sums=True)(*arguments)
    return group, masses[: size[0], 0].copy(), masses[: size[0], 1].copy()


def group_loop(
    p: np.ndarray,
    q: np.ndarray,
    mean: float,
    per_unit: int,
    ratio: np.ndarray,
    bits: np.ndarray,
    group: np.ndarray,
    masses: np.ndarray,
    size: np.ndarray,
) -> None:
    """Groups with tokens move together at the front; size = [their number]. bits: of `ratio`, as integers, for phi
    is linear in them above 1."""
    v, last = p.shape[0], masses.shape[0] - 1
    p_total, q_total = 0.0, 0.0
    for x in range(v):
        p_total += np.float64(p[x])
        q_total += np.float64(q[x])
    p_scale, q_scale = 1.0 / p_total, 1.0 / q_total
    for x in range(v):
        q_x = np.float64(q[x]) * q_scale
        ratio[x] = np.float64(p[x]) * p_scale / q_x if q_x > 0.0 else -1.0
    for x in range(v):
        octave, above = (bits[x] >> 52) - 1023, (bits[x] & 0xFFFFFFFFFFFFF) * 2.0**-52
        phi = ratio[x] if ratio[x] <= 1.0 else octave + 1 + above
        b = last - int(min(phi * per_unit, last + 0.5))
        group[x] = (0 if ratio[x] >= mean and mean >= 1.0 else b) if ratio[x] >= 0.0 else -1
    for x in range(v):
        if group[x] >= 0:
            masses[group[x], 0] += np.float64(p[x]) * p_scale
            masses[group[x], 1] += np.float64(q[x]) * q_scale
    moved = np.zeros(last + 1, np.int32)
    n = 0
    for b in range(last + 1):
        if masses[b, 1] > 0.0:
            moved[b] = n
            masses[n, 0], masses[n, 1] = masses[b, 0], masses[b, 1]
            n += 1
    for x in range(v):
        if group[x] >= 0:
            group[x] = moved[group[x]]
    size[0] = n


def _per_unit(mean: float) -> int:
    """Groups in one unit of phi; whole, so that none reaches across 1, 2, 4, ..; the first, above E[N], is extra."""
    half, octave = math.frexp(max(1.0, mean))
    return max(1, int((GROUPS - 1) / (octave - 1 + 2 * half)))
