"""The draft probability: exact optima against a fine grid, and the formulas against simulation."""

import pytest
import torch

from benchmarks.objective import OBJECTIVES, accepted, best, breakpoints, conditions
from benchmarks.pairs import toy_rows

LAMBDAS = [0.1, 0.45, 0.6, 0.9]


def pairs(n: int, seed: int = 0):
    p, q = toy_rows(n, 20, 0.7, 0.6, seed)
    q[0, :5] = 0.0
    p[0, 5:8] = 0.0
    return p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)


def test_z_is_what_it_says():
    p, q = pairs(7)
    a = torch.linspace(0, 1, 23, dtype=torch.float64)
    want = torch.stack([torch.minimum(p, x * q).sum(1).mean() for x in a])
    assert torch.allclose(accepted(p, q, a), want, atol=1e-12)


@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_optimum_at_the_breakpoints_beats_every_other_a(name, lam, n):
    for seed in range(5):
        p, q = pairs(n, seed)
        found = best(p, q, lam, OBJECTIVES[name])
        grid = torch.linspace(0, 1, 20001, dtype=torch.float64)
        values = OBJECTIVES[name](grid, accepted(p, q, grid), lam)
        assert found.value >= float(values.max()) - 1e-12
        assert found.value == pytest.approx(float(values.max()), abs=1e-3)
        assert found.a in breakpoints(p, q)


@pytest.mark.parametrize("lam", LAMBDAS)
def test_the_papers_optimum_minimises_lemma_4_4(lam):
    p, q = pairs(5)
    points = breakpoints(p, q)
    lemma = torch.stack([(p - a * q).abs().sum(1).mean() + a * (2 * lam - 1) for a in points])
    a = best(p, q, lam, OBJECTIVES["paper"]).a
    assert float(lemma[points == a]) == pytest.approx(float(lemma.min()), abs=1e-12)


@pytest.mark.parametrize("lam", LAMBDAS)
def test_the_conditions_decide_whether_less_than_one_wins(lam):
    for seed in range(10):
        p, q = pairs(4, seed)
        c = conditions(p, q, lam)
        near = torch.tensor([1 - 1e-7, 1.0], dtype=torch.float64)
        for name, bound in (("paper", c.paper), ("throughput", c.corrected)):
            below, at = OBJECTIVES[name](near, accepted(p, q, near), lam)
            assert bool(below > at) == (c.under < bound)


def test_throughput_is_what_a_simulation_gives_and_the_papers_rate_is_not():
    """200,000 steps: the standard error is below 0.002."""
    p, q = pairs(1)
    a, lam, n = 0.6, 0.5, 200_000
    rng = torch.Generator().manual_seed(0)
    drafted = torch.rand(n, generator=rng) < a
    hit = torch.rand(n, generator=rng, dtype=torch.float64) < torch.minimum(p, a * q).sum() / a
    tokens = n + int((drafted & hit).sum())
    seconds = n + lam * int(drafted.sum())
    z = accepted(p, q, torch.tensor([a], dtype=torch.float64))
    at = torch.tensor([a], dtype=torch.float64)
    assert tokens / seconds == pytest.approx(float(OBJECTIVES["throughput"](at, z, lam)), abs=0.01)
    assert abs(tokens / seconds - float(OBJECTIVES["paper"](at, z, lam))) > 0.02
