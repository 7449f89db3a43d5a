"""Budgeted drafting: the expected number of distinct draws is the budget; test_verify has the rules for such laws."""

import math

import pytest
import torch

from benchmarks.budgeted import MOST, budgeted_laws
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, outcomes

Q = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_expected_number_of_distinct_draws_is_the_budget(budget: int) -> None:
    for q, law in zip(Q, budgeted_laws(Q, budget, most=6), strict=True):
        distinct = math.fsum(prob * len(set(draws)) for draws, prob in outcomes(law, q))
        assert distinct == pytest.approx(min(budget, distinct_of_most(q, 6)), abs=1e-12)


def distinct_of_most(q: torch.Tensor, most: int) -> float:
    return float((1 - (1 - q) ** most).sum())


def test_a_budget_of_one_is_one_draw() -> None:
    assert budgeted_laws(Q, 1) == [IID(1)] * 3
    assert budgeted_laws(torch.softmax(torch.randn(50, 4096), 1), 1) == [IID(1)] * 50  # rounding of the sum


def test_one_hot_and_small_supports_take_the_most_draws() -> None:
    q = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    assert budgeted_laws(q, 2)[0] == IID(MOST)
    assert budgeted_laws(q, 3)[1] == IID(MOST)


def test_no_budget_is_refused() -> None:
    with pytest.raises(ForetokenError, match="budget is 0"):
        budgeted_laws(Q, 0)
