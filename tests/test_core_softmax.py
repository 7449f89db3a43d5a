"""The compiled softmax against the plain one in float64, and the best of a row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretoken.core.errors import NotFiniteError
from foretoken.core.softmax import best, fast_softmax, likeliest, plain_softmax, softmax

INFINITY = float("inf")
SIZES = [1, 2, 15, 16, 17, 4096, 50257]


def scores(v: int, spread: float = 5.0) -> Tensor:
    x = spread * torch.randn(3, v, generator=torch.Generator().manual_seed(v))
    if v > 1:
        x[0, 0] = -INFINITY  # a token that a processor has forbidden
    return x


@pytest.mark.parametrize("temperature", [1e-35, 1e-25, 1e-3, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("v", SIZES)
def test_compiled_softmax_is_that_of_float64(v: int, temperature: float) -> None:
    x = scores(v)
    p = fast_softmax(x, temperature)
    # Rounding of the exponent: |x| / T of up to 30 / T in float32, where the row is not one-hot anyway.
    assert torch.allclose(
        p.double(), plain_softmax(x.double(), temperature), rtol=1e-5 / min(temperature, 1), atol=1e-7
    )
    assert (p.double().sum(-1) - 1).abs().max() < 2e-7
    assert v == 1 or p[0, 0] == 0


@pytest.mark.parametrize("v", SIZES)
def test_the_best_is_that_of_float64(v: int) -> None:
    assert torch.equal(likeliest(scores(v)), likeliest(scores(v).double()))
    assert torch.equal(best(scores(v)).double(), best(scores(v).double()))
    assert best(scores(v)).sum(-1).tolist() == [1, 1, 1]


def test_the_first_of_equals_is_best() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert best(x).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    "rule", [best, lambda x: best(x.double()), lambda x: softmax(x, 0.7), lambda x: plain_softmax(x, 0.7)]
)
@pytest.mark.parametrize("place", [0, 13, 4095])
@pytest.mark.parametrize("v", [20, 4096])
@pytest.mark.parametrize("bad", [float("nan"), INFINITY])
def test_what_is_not_finite_is_refused(rule: Callable[[Tensor], Tensor], place: int, v: int, bad: float) -> None:
    x = scores(v)
    x[1, place % v] = bad
    with pytest.raises(NotFiniteError):
        rule(x)


@pytest.mark.parametrize("rule", [best, lambda x: softmax(x, 0.7)])
def test_a_row_without_any_finite_score_is_refused(rule: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotFiniteError):
        rule(torch.full((2, 40), -INFINITY))


def test_rows_that_are_views_are_read_rightly() -> None:
    x = scores(64)
    assert torch.equal(softmax(x[1:2], 1.0), softmax(x[1:2].clone(), 1.0))
    assert torch.equal(softmax(x[:, 3:40], 1.0), softmax(x[:, 3:40].clone(), 1.0))
    assert torch.equal(best(x[:, 3:40]), best(x[:, 3:40].contiguous()))
