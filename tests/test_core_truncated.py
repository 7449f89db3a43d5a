"""The compiled truncation keeps the tokens that sorting whole rows keeps."""

import pytest
import torch

from foretoken.core.errors import NotFiniteError
from foretoken.core.truncated import fast_truncated_softmax, plain_truncated, truncated_softmax

SETTINGS = [
    (0, 0.9, 0.0),
    (0, 0.37, 0.0),
    (0, 0.999, 0.0),
    (5, 1.0, 0.0),
    (900, 1.0, 0.0),
    (0, 1.0, 0.1),
    (7, 0.8, 0.1),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 37, 64, 3001])
@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0, 30.0])
@pytest.mark.parametrize("steps", [None, 2], ids=["distinct", "ties"])
def test_the_tokens_kept_are_those_of_whole_sorted_rows(setting, size, spread, steps):
    """Ties: scores are multiples of 1/2, so that many tokens share the one at the cut."""
    generator = torch.Generator().manual_seed(size)
    scores = spread * torch.randn(20, size, generator=generator)
    if steps is not None:
        scores = (scores * steps).round() / steps
    exact = scores.double() / 0.5
    kept = plain_truncated(exact, *setting) > -torch.inf
    p = fast_truncated_softmax(scores, 0.5, *setting)
    wanted = exact.masked_fill(~kept, -torch.inf).softmax(-1)
    sure = ~_near_a_cut(exact, *setting)
    torch.testing.assert_close(p.double()[sure], wanted[sure], rtol=2e-5, atol=1e-37)
    assert int(sure.sum()) > 2 or spread == 0  # equal numbers are all near every cut, or none is


def _near_a_cut(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Whether rounding in float32 may decide."""
    if 0 < top_k < scores.shape[1]:
        scores = plain_truncated(scores, top_k, 1.0, 0.0)
    p = scores.softmax(-1)
    mass = (p.sort(-1).values.cumsum(-1) - (1 - top_p)).abs().amin(-1) < 1e-6
    left = plain_truncated(scores, 0, top_p, 0.0).softmax(-1)
    floor = (left / left.amax(-1, keepdim=True) - min_p).abs().amin(-1) < 1e-6
    return (mass & (top_p < 1)) | (floor & (min_p > 0))


def test_of_equal_scores_at_the_cut_the_last_stay():
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, -5.0]])
    p = torch.softmax(scores, -1)[0]
    for kept in range(1, 5):
        top_p = float(p[0] + (kept - 1.5) * p[1])
        got = fast_truncated_softmax(scores, 1.0, 0, top_p, 0.0)[0]
        assert got.nonzero().flatten().tolist() == [0, *range(5 - (kept - 1), 5)]
        assert torch.equal(got > 0, (plain_truncated(scores, 0, top_p, 0.0) > -torch.inf)[0])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_refused(setting, bad):
    scores = torch.randn(2, 40)
    scores[1, 3] = bad
    with pytest.raises(NotFiniteError):
        truncated_softmax(scores, 1.0, *setting)
    with pytest.raises(NotFiniteError):
        truncated_softmax(torch.full((1, 40), -torch.inf), 1.0, *setting)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_that_are_ruled_out_stay_out(setting):
    scores = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    scores[:, ::2] = -torch.inf
    got = truncated_softmax(scores, 0.7, *setting)
    alone = truncated_softmax(scores[:, 1::2].contiguous(), 0.7, *setting)
    assert bool((got[:, ::2] == 0).all())
    torch.testing.assert_close(got[:, 1::2], alone, rtol=1e-6, atol=0)
