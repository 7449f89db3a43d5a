"""The hub law's rules: their acceptance is the optimum, and SpecHub is the paper's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.audit import enumerate as exact
from foretoken.core.laws import IID, Hub, outcomes
from foretoken.core.tree import Siblings
from foretoken.verify import VERIFIERS
from foretoken.verify.acceptance import acceptance
from foretoken.verify.hub import by_rank, plain_spechub_row, spechub_row
from rates import enumerated, optimum

HUB, SPECHUB = VERIFIERS["hub"], VERIFIERS["spechub"]
PAIRS = exact.all_pairs(seed=3, most=4, num_random=2)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "k"), [("hub", 1), ("hub", 2), ("hub", 3), ("hub", 4), ("spechub", 2)])
def test_acceptance_is_the_optimum_of_the_law(name: str, k: int) -> None:
    rule = VERIFIERS[name]
    for p, q in PAIRS:
        best = optimum(Hub(k), p, q / q.sum())
        assert enumerated(rule, Hub(k), p, q) == pytest.approx(best, abs=1e-9)
        assert float(acceptance(rule, Hub(k), p, q)) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_acceptance_takes_many_rows_at_once(k: int) -> None:
    p, q = torch.rand(3, 2, 5).softmax(-1), torch.rand(3, 2, 5).softmax(-1)
    q[0, 0], q[1, 1] = torch.eye(5)[2], f64(0.5, 0, 0, 0.5, 0).float()
    batch = acceptance(HUB, Hub(k), p, q)
    assert batch.shape == (3, 2)
    assert batch.dtype == torch.float64
    for i in range(3):
        for j in range(2):
            assert float(batch[i, j]) == pytest.approx(float(acceptance(HUB, Hub(k), p[i, j], q[i, j])))


def test_hub_by_hand() -> None:
    """The hub is token 0, r = [0, .6, .4]; draw 2 passes with .3 / .4, and the residual is [.1, 0, 0]."""
    p, q = f64(0.1, 0.6, 0.3), f64(0.5, 0.3, 0.2)
    assert HUB(p, Siblings((0, 2), q, Hub(2))).tolist() == pytest.approx([0.25, 0, 0.75])
    assert HUB(p, Siblings((2, 0), q, Hub(2))).tolist() == pytest.approx([0.25, 0, 0.75])
    assert HUB(p, Siblings((1, 0), q, Hub(2))).tolist() == pytest.approx([0, 1, 0])


def test_spechub_by_hand() -> None:
    """Paper 000's toy distributions, through Algorithms 2 and 3: nothing is left to the residual.

    Q(1,0) = .3, Q(2,0) = .2, Q(0,1) = .3, Q(0,2) = .2; p' = [., .3, .1]; S = .1; R = 0.
    """
    p, q = f64(0.1, 0.6, 0.3), f64(0.5, 0.3, 0.2)
    rows = {
        (1, 0): [0, 1, 0],  # .6 >= .3
        (2, 0): [0, 0, 1],  # .3 >= .2
        (0, 1): [0, 1, 0],  # .3 / .3
        (0, 2): [0.5, 0, 0.5],  # .1 / .2, else the hub with .1 / .1
    }
    for draws, row in rows.items():
        assert SPECHUB(p, Siblings(draws, q, Hub(2))).tolist() == pytest.approx(row)
    assert float(acceptance(SPECHUB, Hub(2), p, q)) == pytest.approx(1)


def test_spechub_spares_the_hub_for_the_second_order() -> None:
    """p(a) > S: draws (x, a) must give the hub what is left, (p(a) - S) / R, R = sum (q - p)+ off the hub."""
    p, q = f64(0.6, 0.1, 0.3), f64(0.4, 0.5, 0.1)  # hub 1: Q(0,1) = .4, Q(2,1) = .1, Q(1,0) = .4, Q(1,2) = .1
    # p' = [.2, ., .2], S = .4 - .2 = .2, R = 0, p'' = [0, ., .1]; p(hub) = .1
    row = SPECHUB(p, Siblings((1, 0), q, Hub(2)))
    assert row.tolist() == pytest.approx([0.5, 0.5 * 0.5, 0.5 * 0.5])


def test_where_the_top_token_is_certain() -> None:
    """q(a) = 1: one draw, and the paper's Q(a, x) divides by zero."""
    p, q = f64(0.2, 0.5, 0.3), f64(0, 1, 0)
    assert list(outcomes(Hub(2), q)) == [((1,), 1.0)]
    for rule in (HUB, SPECHUB):
        assert rule(p, Siblings((1,), q, Hub(2))).tolist() == pytest.approx(p.tolist())
        assert float(acceptance(rule, Hub(2), p, q)) == pytest.approx(0.5)


def test_ties_go_to_the_lower_id() -> None:
    q = f64(0.2, 0.3, 0.3, 0.2)
    assert by_rank(q, (2, 1)) == [1, 2]
    assert by_rank(q, (0, 1, 3)) == [1, 0, 3]
    p = f64(0.4, 0.1, 0.2, 0.3)
    for rule, k in ((HUB, 2), (HUB, 3), (SPECHUB, 2)):
        assert exact.deviation(rule, Hub(k), p, q) < 1e-12


def test_each_rule_refuses_what_it_is_not_made_for() -> None:
    assert not SPECHUB.accepts(Hub(3))
    assert not SPECHUB.accepts(IID(2))
    assert not HUB.accepts(IID(2))
    assert HUB.accepts(Hub(9))


def test_hub_rejects_the_wrong_law() -> None:
    """SpecHub's rule on i.i.d. pairs is off: the law is not a formality."""
    p, q = f64(0.1, 0.6, 0.3), f64(0.5, 0.3, 0.2)
    emitted = sum(prob * SPECHUB(p, Siblings(d, q, Hub(2))) for d, prob in outcomes(IID(2), q) if d[0] != d[1])
    assert float((emitted / 0.62 - p).abs().max()) > 0.01


@settings(max_examples=150, deadline=None)
@given(data=st.data(), v=st.integers(2, 7), double=st.booleans())
def test_the_compiled_spechub_row_equals_the_plain_one(data: st.DataObject, v: int, double: bool) -> None:
    dtype = torch.float64 if double else torch.float32
    entry = st.one_of(st.just(0.0), st.floats(1e-30, 1.0), st.sampled_from([1.0, 0.5, 1e-8]))
    weights = st.lists(entry, min_size=v, max_size=v)
    p = torch.tensor(data.draw(weights.filter(any)), dtype=dtype)
    q = torch.tensor(data.draw(weights.filter(lambda w: sum(x > 0 for x in w) > 1)), dtype=dtype)
    p, q = p / p.sum(), q / q.sum()
    others = [x for x in torch.nonzero(q > 0)[:, 0].tolist() if x != int(q.argmax())]
    if not others:  # rounded away
        return
    draws = data.draw(st.permutations([int(q.argmax()), data.draw(st.sampled_from(others))]))
    hub = by_rank(q, tuple(draws))[0]
    before = p.clone(), q.clone()
    fast = spechub_row(p, q, tuple(draws), hub)
    assert torch.equal(before[0], p)
    assert torch.equal(before[1], q)
    slow = plain_spechub_row(p, q, tuple(draws), hub)
    assert torch.allclose(fast, slow, rtol=1e-6, atol=4 * torch.finfo(dtype).eps), (p, q, draws)


def test_mixed_dtypes_take_the_plain_row() -> None:
    p, q = f64(0.6, 0.1, 0.3), f64(0.4, 0.5, 0.1)
    row = SPECHUB(p.float(), Siblings((1, 0), q, Hub(2)))
    assert row.dtype == torch.float32
    assert row.tolist() == pytest.approx([0.5, 0.25, 0.25], abs=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_the_plain_spechub_row_is_lossless_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.verify.hub.loops_take", lambda *_: False)
    assert exact.measure(SPECHUB, Hub(2), PAIRS).exact
