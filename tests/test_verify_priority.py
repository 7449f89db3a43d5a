"""Rule `priority`: what its orders select is what enumeration gives, and it comes near the optimum."""

import numpy as np
import pytest
import torch

import foretoken
from foretoken.core.laws import WithoutReplacement, outcomes
from foretoken.verify import VERIFIERS
from foretoken.verify.priority import TOLERANCE, selection
from foretoken.verify.successive import fill_first, first_times, num_drawn

RARE = 1e-9


def rows(v: int, concentration: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(v, concentration))


EXTREME = {
    "one token has nearly all": np.array([1 - 3 * RARE, RARE, RARE, RARE]),
    "two tokens have nearly all": np.array([0.5 - RARE, 0.5 - RARE, RARE, RARE]),
    "masses below the smallest normal number": np.array([1.0, 1e-310, 1e-310, 1e-310]),
    "a token that is never drawn": np.array([0.5, 0.0, 0.25, 0.25]),
}


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*EXTREME, *(f"random {seed}" for seed in range(6))])
def test_which_draw_stands_first_in_an_order(name: str, k: int) -> None:
    """Against every tuple of draws, for several orders."""
    q = EXTREME[name] if name in EXTREME else rows(6, 0.4, int(name.split()[1]))
    drawn = num_drawn(q, k)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(np.flatnonzero(q > 0))
        place = {int(x): i for i, x in enumerate(order)}
        want, found = np.zeros(len(q)), np.zeros(len(q))
        for draws, prob in outcomes(WithoutReplacement(drawn), torch.from_numpy(q)):
            want[min(draws, key=place.__getitem__)] += prob
        fill_first(q, order, drawn, first_times(q, drawn), found)
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [2, 3])
def test_the_chances_of_the_draws_add_up_to_what_is_selected(k: int) -> None:
    p, q = rows(5, 0.5, 1), rows(5, 0.5, 2)
    want = np.zeros(5)
    for draws, prob in outcomes(WithoutReplacement(k), torch.from_numpy(q)):
        s, picked = selection(p, q, np.array(draws), k)
        assert picked.sum() == pytest.approx(1)
        want[list(draws)] += prob * picked
    np.testing.assert_allclose(s, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("k", "v", "close"), [(2, 3000, TOLERANCE), (3, 300, 3 * TOLERANCE)])
def test_it_comes_near_the_optimum(k: int, v: int, close: float) -> None:
    """Of rows like a model's; `rrsw`, by as many draws, is further from it."""
    rng = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(12, v, generator=rng, dtype=torch.float64)
    p = logits.softmax(1)
    q = (logits + 1.5 * torch.randn(12, v, generator=rng, dtype=torch.float64)).softmax(1)
    law = WithoutReplacement(k)
    best, found = foretoken.alpha_star(law, p, q), foretoken.acceptance("priority", law, p, q)
    assert bool((found <= best + 1e-12).all())
    assert float((best - found).mean()) <= close
    if k == 2:
        assert float((best - foretoken.acceptance("rrsw", law, p, q)).mean()) > 10 * close


def test_rows_in_single_precision_and_of_any_sum() -> None:
    p, q = (torch.from_numpy(rows(50, 0.3, seed)) for seed in (3, 4))
    siblings = foretoken.Siblings((7, 3), q, WithoutReplacement(2))
    want = VERIFIERS["priority"](p, siblings)
    found = VERIFIERS["priority"](2 * p.float(), foretoken.Siblings((7, 3), 3 * q.float(), WithoutReplacement(2)))
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), want, rtol=0, atol=1e-6)
