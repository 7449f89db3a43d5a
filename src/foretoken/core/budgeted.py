"""Budgeted drafting: a random number of i.i.d. draws whose expected number of DISTINCT tokens is a budget.

Equal draws share one tree node, so what a node's children cost is the number of distinct tokens among them. Let
D(n) = sum_x 1 - (1 - q(x))^n be their expected number among n draws. Take N = n or n + 1 such that E[D(N)] = b:

    n = the largest with D(n) <= b,    P(N = n + 1) = (b - D(n)) / (D(n + 1) - D(n)).

N is chosen from q alone, before any draw, so the law is IID with a random count, and every rule for it stays exact.
"""

from functools import partial

import numpy as np

from foretoken.core.laws import IID
from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import total_of

ROUNDING = 1e-12


@compiled
def number(row: np.ndarray, budget: float, most: int) -> tuple[int, float, float]:
    """Find the number of draws whose expected number of distinct tokens is the budget.

    D(n + 1) - D(n) = sum q (1 - q)^n, the probability that draw n + 1 is a new token.

    row: q, of any positive sum [v].
    budget: the expected number of distinct tokens, at least 0.
    most: the largest number of draws, where the budget may not be reached.

    Returns n, P(N = n + 1) and E[D(N)].
    """
    total = total_of(row)
    missed = row / np.float64(total)  # q (1 - q)^n
    n, distinct, fresh = 0, 0.0, 1.0
    while n < most and distinct + fresh <= budget * (1 + ROUNDING):
        n += 1
        distinct += fresh
        for x in range(row.shape[0]):
            missed[x] *= max(0.0, 1.0 - row[x] / total)
        fresh = total_of(missed)
    one_more = 0.0
    if n < most and fresh > 0.0:
        one_more = max(0.0, (budget - distinct) / fresh)
    return n, one_more if one_more >= ROUNDING else 0.0, distinct + one_more * fresh


@partial(compiled, reorder_sums=True)
def sums(row: np.ndarray) -> tuple[float, float]:
    """Return the sum of the numbers of `row` [v], and the sum of their squares."""
    total = square = 0.0
    for x in range(row.shape[0]):
        weight = np.float64(row[x])
        total += weight
        square += weight * weight
    return total, square


def law_with(n: int, one_more: float) -> IID:
    """Return the law of n independent draws, with probability `one_more` of n + 1."""
    if one_more == 0:
        return IID(n)
    return IID(n + 1, counts=(*[0.0] * n, 1 - one_more, one_more))
