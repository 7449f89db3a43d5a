"""Budgeted drafting: a random number of i.i.d. draws whose expected number of DISTINCT tokens is a budget.

Equal draws share one tree node, so what a node's children cost is the number of distinct tokens among them. Let
D(n) = sum_x 1 - (1 - q(x))^n be their expected number among n draws. Take N = n or n + 1 such that E[D(N)] = k:

    n = the largest with D(n) <= k,    P(N = n + 1) = (k - D(n)) / (D(n + 1) - D(n)).

N is chosen from q alone, before any draw, so the law is IID with a random count, and every rule for it stays exact.
"""

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID
from foretoken.core.shapes import Float

MOST = 64  # draws at one node: where q is nearly one-hot no number of draws reaches the budget
ROUNDING = 1e-12


def expected_distinct(q: Float[Tensor, "m v"], n: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """D(n) for each row, with its own n."""
    return -torch.expm1(n[:, None] * torch.log1p(-q.double().clamp(max=1))).sum(1)


def budgeted_laws(q: Float[Tensor, "m v"], budget: int, most: int = MOST) -> list[IID]:
    """The law of each row's draws, with E[distinct tokens] = budget, or `most` draws where that is out of reach.

    O(m v log most).
    """
    if budget < 1:
        raise ForetokenError(f"budget is {budget}: it must be at least 1 distinct token.")
    q = q.double() / q.double().sum(1, keepdim=True)
    low = torch.ones(len(q), dtype=torch.float64, device=q.device)  # D(low) <= budget < D(high), or high is too many
    high = torch.full_like(low, most + 1)
    while bool((high - low > 1).any()):
        middle = torch.floor((low + high) / 2)
        fits = expected_distinct(q, middle) <= budget
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    below = expected_distinct(q, low)
    share = ((budget - below) / (expected_distinct(q, low + 1) - below)).clamp(0, 1)
    share = torch.where(low < most, share.nan_to_num(0.0), 0.0)
    return [_law(int(n), w) for n, w in zip(low.tolist(), share.tolist(), strict=True)]


def _law(n: int, share_of_one_more: float) -> IID:
    if share_of_one_more < ROUNDING:
        return IID(n)
    return IID(n + 1, counts=(*[0.0] * n, 1 - share_of_one_more, share_of_one_more))
