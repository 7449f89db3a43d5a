"""Budgeted drafting: a random number of i.i.d. draws whose expected number of DISTINCT tokens is a budget.

Equal draws share one tree node, so what a node's children cost is the number of distinct tokens among them. Let
D(n) = sum_x 1 - (1 - q(x))^n be their expected number among n draws. Take N = n or n + 1 such that E[D(N)] = b:

    n = the largest with D(n) <= b,    P(N = n + 1) = (b - D(n)) / (D(n + 1) - D(n)).

N is chosen from q alone, before any draw, so the law is IID with a random count, and every rule for it stays exact.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID
from foretoken.core.shapes import Float
from foretoken.kernel.compile import compiled

MOST = 64  # draws at one node: where q is nearly one-hot no number of draws reaches the budget
ROUNDING = 1e-12
LANES = 16  # sums side by side: of one order wherever the loop is compiled into, and in vector registers all the same


def expected_distinct(q: Float[Tensor, "m v"], n: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """D(n) for each row, with its own n."""
    return -torch.expm1(n[:, None] * torch.log1p(-q.double().clamp(max=1))).sum(1)


def budgeted_laws(q: Float[Tensor, "m v"], budget: float | int, most: int = MOST) -> list[IID]:
    """The law of each row's draws, with E[distinct tokens] = budget, or `most` draws where that is out of reach."""
    if budget < 1:
        raise ForetokenError(f"budget is {budget}: it must be at least 1 distinct token.")
    return laws_within(q, [float(budget)] * len(q), [most] * len(q))[0]


def laws_within(
    q: Float[Tensor, "m v"], budgets: Sequence[float], most: Sequence[int]
) -> tuple[list[IID], list[float]]:
    """(laws, E[distinct tokens]) of each row for its own budget >= 0, with at most `most` draws; O(v n) a row.

    E[distinct tokens] is the budget, or below it where `most` draws do not reach it.
    """
    rows = np.ascontiguousarray(q.detach().cpu().numpy())
    wanted = np.array(budgets, np.float64)
    numbers, shares, expected = np.empty(len(rows), np.int64), np.empty(len(rows)), np.empty(len(rows))
    compiled(number_loop)(rows, wanted, np.array(most, np.int64), numbers, shares, expected)
    laws = [law_with(n, share) for n, share in zip(numbers.tolist(), shares.tolist(), strict=True)]
    return laws, expected.tolist()


def number_loop(
    q: np.ndarray, budgets: np.ndarray, most: np.ndarray, numbers: np.ndarray, shares: np.ndarray, expected: np.ndarray
) -> None:
    """numbers[i] = n, shares[i] = P(N = n + 1), expected[i] = E[D(N)].

    D(n + 1) - D(n) = sum q (1 - q)^n, the probability that draw n + 1 is new.
    """
    m, v = q.shape
    missed, sums = np.empty(v), np.empty(LANES)  # q (1 - q)^n
    whole = v // LANES * LANES
    for i in range(m):
        sums[:] = 0.0
        for x in range(0, whole, LANES):
            for lane in range(LANES):
                sums[lane] += np.float64(q[i, x + lane])
        total = 0.0
        for lane in range(LANES):
            total += sums[lane]
        for x in range(whole, v):
            total += np.float64(q[i, x])
        for x in range(v):
            missed[x] = q[i, x] / total
        n, distinct, fresh = 0, 0.0, 1.0
        while n < most[i] and distinct + fresh <= budgets[i] * (1 + ROUNDING):
            n += 1
            distinct += fresh
            sums[:] = 0.0
            for x in range(0, whole, LANES):
                for lane in range(LANES):
                    missed[x + lane] *= max(0.0, 1.0 - q[i, x + lane] / total)
                    sums[lane] += missed[x + lane]
            fresh = 0.0
            for lane in range(LANES):
                fresh += sums[lane]
            for x in range(whole, v):
                missed[x] *= max(0.0, 1.0 - q[i, x] / total)
                fresh += missed[x]
        share = 0.0
        if n < most[i] and fresh > 0.0:
            share = max(0.0, (budgets[i] - distinct) / fresh)
        numbers[i], shares[i], expected[i] = n, share, distinct + share * fresh


def law_with(n: int, share_of_one_more: float) -> IID:
    """n draws, or n + 1 with that probability."""
    if share_of_one_more < ROUNDING:
        return IID(n)
    return IID(n + 1, counts=(*[0.0] * n, 1 - share_of_one_more, share_of_one_more))
