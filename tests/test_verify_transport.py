"""Exact transport: the compiled loops are the plain ones; the selection and the groups are as the proof has them."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import foretoken
from foretoken.audit import enumerate as exact
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, WithoutReplacement
from foretoken.core.tree import Siblings
from foretoken.verify import VERIFIERS, ratio_groups
from foretoken.verify.exact_transport import Transport, selection
from foretoken.verify.ratio_groups import by_ratio, in_order
from rates import f64
from thinning import one_in

RULES = [VERIFIERS["transport"], VERIFIERS["transport-grouped"]]
COUNTS = [(0.2, 0.5, 0.3), (0.0, 0.3, 0.0, 0.7), (0.4, 0.6), (1.0, 0.0), (0.1, 0.2, 0.3, 0.2, 0.2)]
LAWS = [IID(n) for n in range(1, 5)] + [IID(len(c) - 1, c) for c in COUNTS]


def test_a_residual_whose_inverse_is_not_finite() -> None:
    row = VERIFIERS["transport"](f64(1.0, 1e-310), Siblings((), f64(1.0, 1e-30), IID(1)))
    assert float(row.sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_draws_without_replacement_are_refused(rule: Transport) -> None:
    """The rule itself looks, since a tree policy of somebody else may plan another law than it says."""
    p = f64(0.5, 0.3, 0.2)
    with pytest.raises(ForetokenError, match="Transport is not lossless for law without_replacement"):
        rule(p, Siblings((0, 1), p, WithoutReplacement(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@pytest.mark.parametrize(("temperature", "n"), list(itertools.product([0.02, 0.3, 1.0, 4.0], [1, 4, 64, 4096])))
def test_large_rows(rule: Transport, temperature: float, n: int, dtype: torch.dtype) -> None:
    """Prefix masses that underflow, thousands of draws: the row is a distribution of p's dtype, and accepts."""
    rng = torch.Generator().manual_seed(n)
    logits = 3 * torch.randn(2, 2000, generator=rng, dtype=torch.float64) + 3 * torch.randn(2000, generator=rng)
    p, q = torch.softmax(logits / temperature, -1).to(dtype)
    law = IID(n)
    draws = tuple(law.draw(q[None], torch.rand(1, n, generator=rng, dtype=torch.float64))[0].tolist())
    row = rule(p, Siblings(draws, q, law))
    assert row.dtype == dtype
    assert float(row.min()) >= 0
    assert float(row.double().sum()) == pytest.approx(1, abs=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rule", one_in(2, RULES), ids=lambda r: r.name)
def test_the_sampled_law_is_p_at_full_size(rule: Transport) -> None:
    """The mean row over 20,000 draws, without sampling the row: within 5 standard errors of p on sets of tokens."""
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 300, generator=rng, dtype=torch.float64)
    p, q = torch.softmax(logits * 2, -1)
    law, num = IID(4, (0.1, 0.2, 0.2, 0.2, 0.3)), 20_000
    u = torch.rand(num, law.num_uniforms, generator=rng, dtype=torch.float64)
    drawn = law.draw(q.expand(num, -1), u).tolist()
    sets = torch.rand(300, 20, generator=rng).round().double()
    shares = torch.stack([rule(p, Siblings(tuple(x for x in d if x >= 0), q, law)) @ sets for d in drawn])
    errors = (shares.mean(0) - p @ sets).abs() / (shares.std(0) / num**0.5)
    assert float(errors.max()) < 5


def selected(p: Tensor, q: Tensor, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p, q and rho in the order of falling ratio."""
    groups = by_ratio(p.numpy(), q.numpy(), float(n))
    return groups.p, groups.q, selection(groups.p, groups.q, np.array([n]), np.array([1.0]))


@pytest.mark.parametrize("mean", [0.0, 0.4, 1.0, 1.7, 100.0])
def test_tokens_of_ratio_e_n_or_more_are_one_group_and_all_others_alone(mean: float) -> None:
    rng = np.random.default_rng(0)
    p, q = rng.random((2, 400)) * (rng.random((2, 400)) < 0.8)
    groups = by_ratio(p, q, mean)
    p, q = p / p.sum(), q / q.sum()
    high = (q > 0) & (p >= mean * q)
    low = np.flatnonzero((q > 0) & ~high)
    low = low[np.argsort(-p[low] / q[low], kind="stable")]
    first = int(high.any())
    want = np.full(400, -1)
    want[high], want[low] = 0, first + np.arange(len(low))
    assert (groups.group == want).all()
    assert groups.p == pytest.approx(np.concatenate((p[high].sum(keepdims=True)[:first], p[low])))
    assert groups.q == pytest.approx(np.concatenate((q[high].sum(keepdims=True)[:first], q[low])))


@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_the_selection_is_as_the_proof_wants_it(n: int, temperature: float) -> None:
    """docs/theory.md, Theorem 7, (a) to (d), for a large row; and it has few values of rho where there is room."""
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    p, q, rho = selected(*torch.softmax(logits / temperature, -1), n)
    g, s = 1 - (1 - np.minimum(q.cumsum(), 1)) ** n, rho * q
    h = int(np.append(0.0, g - p.cumsum()).argmin())
    assert (np.diff(rho) <= 0).all()
    assert (s.cumsum() <= g + 1e-13).all()
    assert s.sum() == pytest.approx(1, abs=1e-13)
    assert s[:h].sum() == pytest.approx(g[h - 1] if h else 0, abs=1e-13)
    assert (s[:h] <= p[:h] * (1 + 1e-14)).all()
    assert (s[h:] >= p[h:] * (1 - 1e-14)).all()
    if n == 2 and temperature <= 1:
        assert len(np.unique(rho)) < 100


def test_where_all_of_p_can_be_accepted_the_selection_is_p() -> None:
    """p = the chance to be the best draw in some order: G = P at every boundary, no room for steps, every beta is 1."""
    q = torch.softmax(torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64), -1)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    p = torch.empty_like(q)
    p[order] = torch.diff(1 - (1 - q[order].cumsum(0).clamp(max=1)) ** 3, prepend=torch.zeros(1).double())
    p_sorted, q_sorted, rho = selected(p, q, 3)
    assert np.abs(rho * q_sorted - p_sorted).max() < 1e-13
    row = VERIFIERS["transport"](p, Siblings(tuple(order[[70, 3, 150]].tolist()), q, IID(3)))
    assert float(row[order[3]]) == pytest.approx(1, abs=1e-9)
    assert float(foretoken.acceptance("transport", IID(3), p, q)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4, 16])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_the_gap_of_groups_is_bounded(n: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with so few groups that there is a gap to see."""
    rng = torch.Generator().manual_seed(n)
    p, q = torch.softmax(torch.randn(2, 20, 3000, generator=rng, dtype=torch.float64) / temperature, -1)
    best = foretoken.alpha_star(IID(n), p, q)
    spread = 1 + (p - q).abs().sum(-1) / 2
    for groups in (1024, 32, 8):
        monkeypatch.setattr(ratio_groups, "GROUPS", groups)
        gap = 1 / (4 * ratio_groups.per_unit(float(n)))
        lost = best - foretoken.acceptance("transport-grouped", IID(n), p, q)
        assert bool((lost <= gap * spread + 1e-12).all())
        assert bool((lost > -1e-12).all())
        if groups == 8 and n > 1 and temperature >= 1:
            assert float(lost.max()) > 0.02 * gap, "the test sees no gap"


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_the_order_of_the_draws_does_not_matter(rule: Transport) -> None:
    """What the draws share is given to all of them alike, which whole paths are better with."""
    rng = torch.Generator().manual_seed(5)
    p, q = torch.softmax(0.2 * torch.randn(2, 6, generator=rng, dtype=torch.float64), -1)
    for draws in ((0, 1, 2), (3, 3, 4), (5, 2, 1)):
        rows = [rule(p, Siblings(order, q, IID(3))) for order in itertools.permutations(draws)]
        assert max(float((row - rows[0]).abs().max()) for row in rows) < 1e-14
        assert min(float(rows[0][x]) for x in draws) > 0.1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@pytest.mark.parametrize("law", [IID(1, (0.7, 0.3)), IID(3, (1 - 2e-9, 1e-9, 1e-9, 0.0))], ids=str)
@pytest.mark.parametrize("tiny", [1e-323, 1e-320, 1e-300])
def test_a_split_behind_next_to_nothing_of_q(rule: Transport, law: IID, tiny: float) -> None:
    """P(a draw is before it) has few digits, or none: the cap that it gives must not hold for all tokens."""
    for p, q in ((f64(0.1, 1e-3, 0.899), f64(0.5, 0.5, tiny)), (f64(5e-310, 5e-300, 1.0), f64(1.0, 1e-12, tiny))):
        assert exact.deviation(rule, law, p, q) < 1e-12


def test_more_draws_than_the_law_makes_and_tokens_that_q_cannot_give_are_refused() -> None:
    p, q = torch.tensor([0.2, 0.8, 0.0]), torch.tensor([0.7, 0.3, 0.0])
    for rule in RULES:
        for draws, word in (((0, 1, 0), "at most 2"), ((2,), "Draw 2"), ((3,), "Draw 3")):
            with pytest.raises(ForetokenError, match=word):
                rule(p, Siblings(draws, q, IID(2)))


@pytest.mark.parametrize("numbers", ["spread", "nearly equal", "mostly 0", "few"])
def test_ratios_are_ordered_as_by_a_stable_sort(numbers: str) -> None:
    rng = np.random.default_rng(0)
    ratio = {
        "spread": -np.exp(rng.normal(size=5000) * 3),
        "nearly equal": -(1 + 1e-12 * rng.normal(size=5000).round(1)),
        "mostly 0": -np.where(rng.random(5000) < 0.01, rng.random(5000), 0.0),
        "few": -np.array([0.0, np.inf, 3.0, 1e-310, 3.0, 0.0]),
    }[numbers]
    assert np.array_equal(in_order(ratio), np.argsort(ratio, kind="stable"))
