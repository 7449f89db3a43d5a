"""The published solvers of optimal transport: draw sets, the optimum, exact losslessness, declared approximation."""

import numpy as np
import pytest
import torch
from torch import Tensor

import foretoken
from benchmarks.pairs import toy_rows
from foretoken.audit import enumerate as exact
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law, Opaque, WithoutReplacement, outcomes
from foretoken.core.tree import Siblings
from foretoken.core.verifier import Approximate
from foretoken.verify import VERIFIERS
from foretoken.verify.published import plan
from foretoken.verify.published.global_resolution import (
    MOST_TOKENS,
    Failure,
    GlobalResolution,
    ThinnedGlobalResolution,
    capped_residuals,
    greedy_residuals,
)
from foretoken.verify.published.plan import feasible
from foretoken.verify.published.sets import draw_sets, enumerated_sets, hall_set
from rates import optimum
from tables import tiny_engine

SOLVERS = ["ot-lp", "ot-maxflow", "ot-maxflow-optimised", "canonical"]
RANDOM = IID(2, (0.2, 0.5, 0.3))
LAWS: list[Law] = [IID(1), IID(3), RANDOM, WithoutReplacement(2), WithoutReplacement(3), Hub(2), Hub(3)]
PAIRS = exact.all_pairs(seed=3, most=4, num_random=1)


def arrays(p: Tensor, q: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return p.numpy() / p.numpy().sum(), q.numpy() / q.numpy().sum()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_draw_sets_and_the_minimiser(law: Law) -> None:
    """Against the laws themselves, and H against all token sets."""
    for p, q in PAIRS:
        p_array, q_array = arrays(p, q)
        sets = draw_sets(law, q_array)
        wanted = enumerated_sets(law, q_array)
        found = {key: sets.prob[number] for key, number in sets.index.items()}
        assert all(found.get(key, 0.0) == pytest.approx(wanted.prob[i], abs=1e-14) for key, i in wanted.index.items())
        assert sum(found.values()) == pytest.approx(1, abs=1e-13)
        hall = hall_set(sets, law, p_array, q_array)
        caught = sets.prob[sets.per_set(~hall[sets.token]) == 0].sum()
        assert 1 + p_array[hall].sum() - caught == pytest.approx(optimum(law, p, q / q.sum()), abs=1e-12)


def test_a_flow_that_breaks_its_limits_is_cut() -> None:
    q = np.array([0.5, 0.3, 0.2])
    sets, p = draw_sets(IID(2), q), np.array([0.1, 0.6, 0.3])
    cut = feasible(sets, p, np.linspace(-0.1, 1, len(sets.owner)))
    assert cut.min() >= 0
    assert (sets.per_set(cut) <= sets.prob + 1e-15).all()
    assert (sets.per_token(cut) <= p + 1e-15).all()


@pytest.mark.parametrize("name", SOLVERS)
def test_draws_whose_probability_is_too_small_for_a_float_are_answered_by_p(name: str) -> None:
    p, q = torch.tensor([1, 2.3e-166]).double(), torch.tensor([1, 5.5e-166]).double()
    assert torch.equal(VERIFIERS[name](p, Siblings((1, 1), q, IID(2))), p)


def test_too_large_to_enumerate() -> None:
    q = torch.full((1000,), 1e-3).double()
    with pytest.raises(ForetokenError, match=r"too large to enumerate.*limit is 300000.*top-k"):
        VERIFIERS["ot-lp"](q, Siblings((1, 2, 3), q, IID(3)))
    row = VERIFIERS["ot-maxflow"](q, Siblings((0, 1, 2), q, Hub(3)))  # the hub law has few sets
    assert float(row.sum()) == pytest.approx(1)
    with pytest.raises(ForetokenError, match="no density"):
        draw_sets(Opaque(1), q.numpy())


@pytest.mark.parametrize("name", [*SOLVERS, "global-resolution", "global-resolution-thinned"])
def test_without_scipy_one_sentence_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "find_spec", lambda _: None)
    with pytest.raises(ForetokenError, match=rf"{name} needs scipy: pip install -e '\.\[transport\]'"):
        foretoken.verifier(name)
    row = torch.ones(4).double() / 4
    with pytest.raises(ForetokenError, match=rf"{name} needs scipy"):
        foretoken.acceptance(name, IID(2), row, row)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tolerance", [1e-3, 1e-4])
def test_global_resolution_is_as_near_as_it_says(tolerance: float) -> None:
    """L1 distance and acceptance within the tolerance wherever it succeeds; which is nearly everywhere here."""
    rule, solved = GlobalResolution(tolerance=tolerance), 0
    for n in (1, 2, 3):
        for p, q in PAIRS[::2]:
            attempt = rule.solve(*arrays(p, q), IID(n))
            if isinstance(attempt, Failure):
                continue
            solved += 1
            rows = [prob * attempt.row(draws) for draws, prob in outcomes(IID(n), q)]
            assert np.abs(np.sum(rows, axis=0) - p.numpy()).sum() <= tolerance
            assert attempt.kept >= optimum(IID(n), p, q / q.sum()) - tolerance
    assert solved > 1.2 * len(PAIRS)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("v", "n"), [(30, 1), (40, 2)])
def test_what_is_truncated_counts_in_the_bound_of_the_law(v: int, n: int) -> None:
    """Here more is lost with the tokens outside of T than in the gradients."""
    cut = 0
    for p, q in zip(*(rows.numpy() for rows in toy_rows(40, v, 1.0, 0.5, 0)), strict=True):
        found, sets = GlobalResolution(tolerance=0.1).solve(p, q, IID(n)), draw_sets(IID(n), q)
        assert not isinstance(found, Failure)
        law = sum(prob * found.row(draws) for draws, prob in zip(sets.index, sets.prob, strict=True))
        assert np.abs(law - p).sum() <= 2 * (found.outer.error + found.inner.error) + 1e-12
        cut += not (found.outer.known | found.inner.known).all()
    assert cut > 30


@pytest.mark.usefixtures("unchecked")
def test_what_one_part_of_the_tolerance_leaves_unused_the_others_have() -> None:
    """Ten tokens, three draws: gradients of more than an eighth of the tolerance are let pass where both together are
    small enough, and the law is as near as is said. With an eighth for each, 34 of these 60 pairs were solved."""
    p_rows, q_rows = (rows.numpy() for rows in toy_rows(60, 10, 1.0, 0.5, 0))
    found = [GlobalResolution().solve(p, q, IID(3)) for p, q in zip(p_rows, q_rows, strict=True)]
    solved = [i for i, attempt in enumerate(found) if not isinstance(attempt, Failure)]
    assert len(solved) >= 50
    for i in solved:
        sets = draw_sets(IID(3), q_rows[i])
        law = sum(prob * found[i].row(draws) for draws, prob in zip(sets.index, sets.prob, strict=True))
        assert np.abs(law - p_rows[i]).sum() <= 1e-3


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_thinned_rule_is_nearly_optimal(n: int) -> None:
    rule = ThinnedGlobalResolution()
    below = [optimum(IID(n), p, q / q.sum()) - rule.solve(*arrays(p, q), IID(n)).kept for p, q in PAIRS]
    assert max(below) < 1e-2
    assert float(np.median(below)) < 1e-3


def test_outer_residuals_are_feasible() -> None:
    """r <= p, r(S) <= P(draws hit S) for every prefix S, which bind first, with equality for the whole."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
        order = np.argsort(-p / q)
        p, q = p[order], q[order]
        g = 1 - (1 - q.cumsum()) ** 3
        h = int(np.argmin(np.append(0, g - p.cumsum())))
        for residuals in (greedy_residuals, capped_residuals):
            r = residuals(p[:h], q[:h], 3)
            assert (r >= 0).all()
            assert (r <= p[:h] + 1e-15).all()
            assert (r.cumsum() <= g[:h] + 1e-12).all()
            assert r.sum() == pytest.approx(g[h - 1] if h else 0.0, abs=1e-12)


def test_failures_say_why_and_fall_back_on_p() -> None:
    p = torch.softmax(torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 0)
    q = torch.full_like(p, 1 / 400)
    attempt = GlobalResolution().solve(p.numpy(), q.numpy(), IID(2))
    assert isinstance(attempt, Failure)
    assert f"{MOST_TOKENS[2]} tokens" in attempt.reason
    assert torch.equal(VERIFIERS["global-resolution"](p, Siblings((0, 1), q, IID(2))), p)


def test_no_engine_takes_an_approximate_rule() -> None:
    assert [name for name, rule in VERIFIERS.items() if isinstance(rule, Approximate)] == ["global-resolution"]
    with pytest.raises(ForetokenError, match=r"approximately lossless.*global-resolution-thinned"):
        tiny_engine(tree="kary:2x1", verifier="global-resolution")
