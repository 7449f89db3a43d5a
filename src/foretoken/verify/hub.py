"""Rules for the hub law: the k - 1 likeliest tokens of q, the *hubs* T, are always drawn, and one, z, from the rest.

`hub`, any k. Let r be q restricted to the rest, r = q / (1 - q(T)) outside T and 0 on it; z has law r. Standard
rejection against r,

    accept z with probability  min(1, p(z) / r(z)),    else draw from  norm((p - r)+),

emits p exactly (Leviathan et al. 2023), whatever else is among the draws. But the residual holds p(t) whole for every
hub t, and the hubs are children too, so the token is among the draws with probability

    p(T) + sum over the rest of min(p, r),

and no rule can do better: a token y is emitted as a draw with at most probability min(p(y), P(y among the draws)).

`spechub`, k = 2, is the published rule, which tests both draws one after the other; its acceptance is the same.

Source of `spechub`: Sun et al. 2024, SpecHub, arXiv:2411.05289, Algorithms 2 and 3, Theorem 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.laws import Hub, Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.verify.rejection import recursive_row, rrs_acceptance
from foretoken.verify.rule import TINY, Kinds, Rule


def by_rank(q: Float[Tensor, " v"], draws: tuple[int, ...]) -> list[int]:
    """Return the draws by falling q, the lower id first among equals: the hubs, then the draw from the rest.

    q: the weights that the draws were made from [v].
    draws: distinct token ids in any order.
    """
    weights = q[list(draws)].tolist()
    return [x for _, x in sorted((-weight, x) for weight, x in zip(weights, draws, strict=True))]


@dataclass(frozen=True)
class HubRule(Rule):
    """The standard rule for the one draw from the rest. Law: hub, any k. Optimal for it. Cost: O(v)."""

    name: str = "hub"
    laws: Kinds = (Hub,)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        q, draws = siblings.q, siblings.draws
        assert q is not None
        if len(draws) < 2:
            return recursive_row(p, q, draws, without_replacement=False)
        *hubs, own = by_rank(q, draws)
        rest = q.index_fill(0, torch.tensor(hubs, device=q.device), 0.0)
        return recursive_row(p, rest, (own,), without_replacement=False)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return sum over x of min(p(x), P(x is among the draws)); that probability is 1 for the hubs."""
        return torch.minimum(p, law.marginals(q)).sum(-1) if isinstance(law, Hub) else rrs_acceptance(p, q, law)


@dataclass(frozen=True)
class SpecHub(HubRule):
    """SpecHub as published: tries the draw that is no hub first, then the hub, then draws from the residual.

    With a the hub, Q(y, z) the probability of the draws y and z in this order, so that Q(x, a) = q(x) and
    Q(a, x) = q(a) q(x) / (1 - q(a)) for x != a, and with
    p'(x) = (p(x) - q(x))+, p''(x) = (p'(x) - Q(a, x))+, S = sum (Q(a, x) - p'(x))+, R = sum (q(x) - p(x))+:

        draws (a, x):  x with min(1, p'(x) / Q(a, x));  else a with min(1, p(a) / S);          else norm(p'')
        draws (x, a):  x with min(1, p(x) / q(x));      else a with min(1, (p(a) - S)+ / R);   else norm(p'')

    Law: hub with k <= 2. Accepts with probability p(a) + sum over x != a of min(p(x), q(x) / (1 - q(a))). Cost: O(v).
    Where q(a) = 1 the paper's formulas divide by zero; there is one draw then, and the standard rule decides.
    """

    name: str = "spechub"

    def accepts(self, law: Law) -> bool:
        return law.k <= 2 and super().accepts(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        q, draws = siblings.q, siblings.draws
        assert q is not None
        if len(draws) < 2:
            return super().__call__(p, siblings)
        hub = by_rank(q, draws)[0]
        # q(a) / (1 - q(a)) is taken as q(a) / (sum of the rest), and p(a) as what the rest leaves: nothing cancels.
        first = q.double() / q.double().sum()  # Q(x, a)
        target = p.double() / p.double().sum()
        p_hub, q_hub = target[hub].clone(), first[hub].clone()
        first[hub] = target[hub] = 0.0
        second = first / first.sum() * q_hub  # Q(a, x), also where 1 / first.sum() would be infinite
        after_first = (target - first).clamp(min=0)  # p'
        residual = (after_first - second).clamp(min=0)  # p''
        spare_second = (second - after_first).clamp(min=0).sum()  # S
        spare_first = (first - target).clamp(min=0).sum()  # R
        if draws[0] == hub:
            own, weight, wanted = draws[1], second[draws[1]], after_first[draws[1]]
            hub_share, spare = p_hub, spare_second
        else:
            own, weight, wanted = draws[0], first[draws[0]], target[draws[0]]
            hub_share, spare = (p_hub - spare_second).clamp(min=0), spare_first
        accept = torch.where(weight > TINY, (wanted / weight).clamp(max=1), 0.0)
        accept_hub = torch.where(spare > TINY, (hub_share / spare).clamp(max=1), 1.0)
        total = residual.sum()
        # Nothing may be left of p beside the hub; then the hub is taken but for rounding.
        residual = torch.where(total > TINY, residual / total, torch.zeros_like(residual))
        accept_hub = torch.where(total > TINY, accept_hub, 1.0)
        row = (1 - accept) * (1 - accept_hub) * residual
        row[own] += accept
        row[hub] += (1 - accept) * accept_hub
        return row.to(p.dtype)
