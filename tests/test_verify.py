"""Every verifier, for every law it accepts, emits exactly p: by enumeration of all draws, at 1e-12."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.audit import enumerate as exact
from foretoken.audit.wrong import EachAlone
from foretoken.core.laws import IID, Hub, Law, Opaque, WithoutReplacement, outcomes
from foretoken.core.tree import Siblings
from foretoken.core.verifier import Verifier
from foretoken.verify import VERIFIERS
from foretoken.verify.published.plan import Solver
from foretoken.verify.rejection import plain_row, recursive_row

PAIRS = exact.all_pairs(seed=0)
FAMILIES = exact.FAMILIES
RANDOM_COUNTS = [IID(len(c) - 1, c) for c in [(0.3, 0.7), (0.2, 0.5, 0.3), (0.1, 0.0, 0.6, 0.3)]]
ACCEPTED = [(rule, law) for rule in VERIFIERS.values() for law in exact.laws_of(rule)]


def pairs_for(rule: Verifier) -> list[exact.Pair]:
    """Fewer where each takes milliseconds; those up to 3 tokens include all adversarial ones."""
    return exact.all_pairs(seed=0, most=3) if isinstance(rule, Solver) else PAIRS


def normal(*logits: float) -> Tensor:
    return torch.softmax(torch.tensor(logits, dtype=torch.float64), 0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("rule", "law"), ACCEPTED, ids=lambda x: x.name if isinstance(x, Verifier) else str(x))
def test_every_rule_is_lossless_for_every_law_it_accepts(rule: Verifier, law: Law) -> None:
    measured = exact.measure(rule, law, pairs_for(rule))
    assert measured.exact, measured


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("rule", "law"), [pair for pair in ACCEPTED if pair[0].name in ("rrs", "rrsw")], ids=str)
def test_the_plain_row_is_lossless_too(rule: Verifier, law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.verify.rejection.loops_take", lambda *_: False)
    pairs = exact.all_pairs(seed=2, most=4, num_random=2)
    assert exact.measure(rule, law, pairs).exact


@pytest.mark.parametrize("rule", VERIFIERS.values(), ids=VERIFIERS)
def test_the_registry_keeps_the_contract(rule: Verifier) -> None:
    assert isinstance(rule, Verifier)
    assert VERIFIERS[rule.name] is rule
    assert rule.laws
    assert all(rule.accepts(family(1)) for family in rule.laws)


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("rrs", WithoutReplacement(2)),
        ("rrs", Hub(2)),
        ("rrsw", Hub(2)),
        ("kseq", WithoutReplacement(2)),
        ("kseq", Hub(2)),
        ("hub", IID(2)),
        ("hub", WithoutReplacement(2)),
        ("spechub", WithoutReplacement(2)),
    ],
    ids=str,
)
def test_pairs_that_are_not_accepted_would_be_lossy(name: str, law: Law) -> None:
    """`accepts` is not merely careful. (SpecHub on Hub(3) would waste the third draw, no more.)"""
    p, q = normal(1.5, 0, 0.5, 1), normal(1, 0.8, -1, 0.3)
    assert not VERIFIERS[name].accepts(law)
    assert exact.total_variation(VERIFIERS[name], law, p, q) > 0.01


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", [IID, WithoutReplacement, Hub])
@pytest.mark.parametrize("k", [2, 3])
def test_the_known_wrong_rule_fails_the_same_check(family: type[IID], k: int) -> None:
    assert not exact.measure(EachAlone(), family(k), PAIRS).exact


def test_the_known_wrong_rule_is_off_by_a_quarter() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.9, 0.0, 0.1]).double()
    worst = max(exact.total_variation(EachAlone(), IID(2), *pair) for pair in [(p, q), *PAIRS])
    assert worst > 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "law"), ACCEPTED, ids=lambda x: x.name if isinstance(x, Verifier) else str(x))
def test_rows_are_distributions_of_p_dtype(rule: Verifier, law: Law, dtype: torch.dtype) -> None:
    """Also where p == q up to float32 rounding, so that the residual is zero or noise; and fewer draws than k."""
    row_of = exact.remembering(rule)
    eps = torch.finfo(dtype).eps
    pairs = exact.all_pairs(seed=1, most=3, num_random=2)
    for p, q in pairs[::5] if isinstance(rule, Solver) else pairs:
        p, q = p.to(dtype), q.to(dtype)
        for near in (q, p, p * (1 + eps)):
            record = {} if isinstance(law, Opaque) else {d: near for d, _ in outcomes(law, near)}
            for draws in [(), *record]:
                row = row_of(p, Siblings(draws, None if isinstance(law, Opaque) else near, law))
                assert row.dtype == dtype
                assert row.shape == p.shape
                assert float(row.min()) >= 0
                assert float(row.sum()) == pytest.approx(1, abs=8 * eps)


def test_one_draw_is_leviathans_rule() -> None:
    p, q = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([0.5, 0.1, 0.4]).double()
    row = VERIFIERS["standard"](p, Siblings((0,), q, IID(1)))
    assert row.tolist() == pytest.approx([0.4, 0.6, 0.0])  # accepted with 0.2 / 0.5; residual all on token 1
    for name in ("rrs", "rrsw"):
        assert torch.allclose(VERIFIERS[name](p, Siblings((0,), q, IID(1))), row)


def test_the_papers_example() -> None:
    """Paper 000, Figures 4 and 5: p = [.1 .6 .3], q = [.5 .3 .2], k = 2: RRSw rejects both drafts with 0.06."""
    p, q = torch.tensor([0.1, 0.6, 0.3]).double(), torch.tensor([0.5, 0.3, 0.2]).double()
    law = WithoutReplacement(2)
    rejected = 0.0
    for draws, prob in outcomes(law, q):
        row = VERIFIERS["rrsw"](p, Siblings(draws, q, law))
        rejected += prob * float(row.sum() - row[list(draws)].sum())
    assert rejected == pytest.approx(0.06, abs=0.005)


@pytest.mark.parametrize("name", ["standard", "rrs", "rrsw"])
def test_extremes(name: str) -> None:
    rule = VERIFIERS[name]
    one, other = torch.eye(3, dtype=torch.float64)[0], torch.eye(3, dtype=torch.float64)[2]
    assert torch.equal(rule(one, Siblings((2,), other, IID(1))), one)  # disjoint supports: the draft never passes
    assert torch.equal(rule(one, Siblings((0,), one, IID(1))), one)
    q = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.equal(rule(q, Siblings((0,), q, IID(1))), torch.tensor([1.0, 0.0]).double())  # p == q: always passes
    assert torch.equal(rule(torch.ones(1), Siblings((0,), torch.ones(1), IID(1))), torch.ones(1))  # V = 1


def test_a_draw_that_q_cannot_make_changes_nothing() -> None:
    p, q = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.5, 0.5])
    for draws in [(0,), (0, 1), (0, 2)]:
        assert VERIFIERS["rrsw"](p, Siblings(draws, q, WithoutReplacement(2))).tolist() == [0.0, 1.0, 0.0]


def test_subnormal_leftovers_stay_finite() -> None:
    """After the first draw nothing but 1e-320 of q is left, less than 1 / the largest double."""
    q = torch.tensor([1.0, 1e-320, 2e-320], dtype=torch.float64)
    p = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    for row in (plain_row(p, q, (0, 2, 1), True), recursive_row(p, q, (0, 2, 1), True)):
        assert row.tolist() == pytest.approx([0.5, 0.2, 0.3])


def weights(v: int) -> st.SearchStrategy[list[float]]:
    entry = st.one_of(st.just(0.0), st.floats(1e-30, 1.0), st.sampled_from([1.0, 0.5, 1e-8]))
    return st.lists(entry, min_size=v, max_size=v).filter(any)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), v=st.integers(1, 7), double=st.booleans(), without_replacement=st.booleans())
def test_the_compiled_row_equals_the_plain_one(
    data: st.DataObject, v: int, double: bool, without_replacement: bool
) -> None:
    dtype = torch.float64 if double else torch.float32
    p = torch.tensor(data.draw(weights(v)), dtype=dtype)
    q = torch.tensor(data.draw(weights(v)), dtype=dtype)
    p, q = p / p.sum(), q / q.sum()
    support = torch.nonzero(q > 0)[:, 0].tolist()
    draws = tuple(data.draw(st.lists(st.sampled_from(support), max_size=3)))
    before = p.clone(), q.clone()
    fast = recursive_row(p, q, draws, without_replacement)
    assert torch.equal(before[0], p)
    assert torch.equal(before[1], q)
    slow = plain_row(p, q, draws, without_replacement)
    # Where p == q up to rounding the residual is noise, reached with as little; its direction is free.
    assert torch.allclose(fast, slow, rtol=1e-6, atol=4 * torch.finfo(dtype).eps), (p, q, draws)


@pytest.mark.parametrize("without_replacement", [False, True])
def test_the_compiled_row_equals_the_plain_one_at_full_size(without_replacement: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    for sharpness in (0.5, 3.0, 8.0):
        p = torch.softmax(sharpness * torch.randn(5000, generator=rng), 0)
        q = torch.softmax(sharpness * torch.randn(5000, generator=rng), 0)
        law = WithoutReplacement(4) if without_replacement else IID(4)
        draws = tuple(law.draw(q[None], torch.rand(1, 4, generator=rng, dtype=torch.float64))[0].tolist())
        assert torch.allclose(
            recursive_row(p, q, draws, without_replacement),
            plain_row(p, q, draws, without_replacement),
            rtol=1e-5,
            atol=1e-9,
        )


def test_views_and_mixed_dtypes() -> None:
    """p may be a row of a batch, a column stride, or of another dtype than q."""
    p = torch.softmax(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), 0)
    q = torch.softmax(torch.arange(4.0), 0)
    column = p[:, 2]
    want = plain_row(column.clone(), q, (3, 1), True)
    assert torch.allclose(recursive_row(column, q, (3, 1), True), want)
    assert torch.allclose(recursive_row(column[None][0], q, (3, 1), True), want)
    assert torch.allclose(recursive_row(column, q.double(), (3, 1), True), want)


def test_the_input_is_left_alone() -> None:
    p, q = normal(0, 1, 2), normal(2, 1, 0)
    before = p.clone(), q.clone()
    VERIFIERS["rrsw"](p, Siblings((0, 1), q, WithoutReplacement(2)))
    plain_row(p, q, (0, 1), True)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rule", "law"),
    [(rule, law) for rule in VERIFIERS.values() for law in RANDOM_COUNTS if rule.accepts(law)],
    ids=lambda x: x.name if isinstance(x, Verifier) else str(x.counts),
)
def test_a_random_number_of_draws_is_lossless_too(rule: Verifier, law: IID) -> None:
    assert exact.measure(rule, law, PAIRS).exact
