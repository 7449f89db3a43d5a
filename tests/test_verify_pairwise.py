"""Rule `pairwise`: what it picks is what enumeration gives, and it comes near the optimum for two draws."""

import numpy as np
import pytest
import torch

import foretoken
from foretoken.audit import enumerate as exact
from foretoken.core.laws import WithoutReplacement, outcomes
from foretoken.verify import VERIFIERS, pairwise
from foretoken.verify.pairwise import selection

LAW = WithoutReplacement(2)
RARE = 1e-9
EXTREME = {
    "one token has nearly all": np.array([RARE, 1 - 3 * RARE, RARE, RARE]),
    "the rest is hardly anything": np.array([1.0, 1e-200, 3e-200, 1e-200]),
    "two tokens have nearly all": np.array([0.5 - RARE, RARE, 0.5 - RARE, RARE]),
    "a token that is never drawn": np.array([0.5, 0.0, 0.25, 0.25]),
}


def rows(v: int, concentration: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(v, concentration))


@pytest.mark.parametrize("groups", [2, 128])
@pytest.mark.parametrize("name", [*EXTREME, *(f"random {seed}" for seed in range(8))])
def test_what_is_picked(name: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every two draws; also where tokens share groups."""
    q = EXTREME[name] if name in EXTREME else rows(9, 0.5, int(name.split()[1]))
    p = rows(len(q), 0.5, 100)
    monkeypatch.setattr(pairwise, "GROUPS", groups)
    monkeypatch.setattr(pairwise, "merge", pairwise.merge.__wrapped__)  # the compiled one has the constant in it
    picks = selection(p, q)
    want = np.zeros(len(q))
    for (x, y), prob in outcomes(LAW, torch.from_numpy(q)):
        assert picks.possible((x, y))
        want[x] += prob * picks.kept(x, y)
        want[y] += prob * (1 - picks.kept(x, y))
    np.testing.assert_allclose(picks.s, want, rtol=0, atol=1e-13)


CLOSE = [
    ([0.9999999999999999, 1.0, 1e-30], [0.32390723843428904, 0.17329861655300072, 0.038027150048271285]),
    (
        [0.021111679653332396, 0.9788883203466676, 4.076032313943459e-18],
        [0.08739166181296867, 0.9126083381870049, 2.6380680431050106e-14],
    ),
]


@pytest.mark.parametrize(("p", "q"), CLOSE)
def test_a_residual_of_rounding_alone(p: list[float], q: list[float]) -> None:
    """All but the last digit of p is picked: what is left must be summed as the row has it."""
    rows = [torch.tensor(row, dtype=torch.float64) for row in (p, q)]
    assert exact.deviation(VERIFIERS["pairwise"], LAW, *(row / row.sum() for row in rows)) < 1e-12


def test_no_second_draw() -> None:
    assert selection(np.array([0.5, 0.5]), np.array([0.0, 1.0])) is None
    assert selection(np.array([0.5, 0.5]), np.array([1e-310, 1.0])) is None


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.2, 0.5, 1.5])
@pytest.mark.parametrize("sharpness", [0.5, 2.0, 6.0])
def test_it_comes_near_the_optimum(sharpness: float, noise: float) -> None:
    """On flat rows and on peaked ones of 3,000 tokens, whether p is close to q or not."""
    rng = torch.Generator().manual_seed(0)
    logits = sharpness * torch.randn(4, 3000, generator=rng, dtype=torch.float64)
    p = logits.softmax(1)
    q = (logits + noise * torch.randn(4, 3000, generator=rng, dtype=torch.float64)).softmax(1)
    lost = foretoken.alpha_star(LAW, p, q) - foretoken.acceptance("pairwise", LAW, p, q)
    assert float(lost.min()) >= -1e-11
    assert float(lost.max()) < (1e-11 if noise == 0 else 0.003)


@pytest.mark.parametrize("v", [4, 8, 20])
@pytest.mark.parametrize("noise", [0.0, 0.001, 0.1, 1.0])
def test_heavy_tokens_of_nearly_equal_ratio_are_apart(v: int, noise: float) -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        q = rows(v, 0.7, seed)
        p = q * np.exp(noise * rng.standard_normal(v))
        pair = torch.from_numpy(p / p.sum()), torch.from_numpy(q)
        lost = float(foretoken.alpha_star(LAW, *pair) - foretoken.acceptance("pairwise", LAW, *pair))
        assert -1e-11 <= lost < 0.001


def test_draws_that_q_cannot_make_change_nothing() -> None:
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.0, 0.5, 0.5])
    for draws in ((0, 1), (1, 1)):
        siblings = foretoken.Siblings(draws, q, LAW)
        assert torch.equal(VERIFIERS["pairwise"](p, siblings), VERIFIERS["rrsw"](p, siblings))


def test_with_a_group_for_every_token_it_has_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "SWEEPS", 5000)
    monkeypatch.setattr(pairwise, "STILL", 0.0)
    monkeypatch.setattr(pairwise, "kept_first", pairwise.kept_first.__wrapped__)
    for seed in range(5):
        p, q = torch.from_numpy(rows(6, 0.7, seed)), torch.from_numpy(rows(6, 0.7, 50 + seed))
        found, best = foretoken.acceptance("pairwise", LAW, p, q), foretoken.alpha_star(LAW, p, q)
        assert float(found) == pytest.approx(float(best), abs=1e-6)


def test_rows_in_single_precision_and_of_any_sum() -> None:
    p, q = (torch.from_numpy(rows(50, 0.3, seed)) for seed in (3, 4))
    want = VERIFIERS["pairwise"](p, foretoken.Siblings((7, 3), q, LAW))
    found = VERIFIERS["pairwise"](2 * p.float(), foretoken.Siblings((7, 3), 3 * q.float(), LAW))
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), want, rtol=0, atol=1e-6)
