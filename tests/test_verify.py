"""Every verifier, for every law it accepts, emits exactly p; and compiled rows are the plain ones."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plain_kseq
from benchmarks.exactly import enumerated
from foretoken.audit import enumerate as exact
from foretoken.audit.wrong import EachAlone
from foretoken.core.laws import IID, Hub, Law, Opaque, WithoutReplacement
from foretoken.core.tree import Siblings
from foretoken.core.verifier import Verifier
from foretoken.verify import VERIFIERS, rejection
from foretoken.verify.exact_transport import Transport, TransportGrouped
from foretoken.verify.published.plan import Solver
from rates import f64, random_pair
from tables import enumerated_once
from thinning import one_in

PAIRS = exact.all_pairs(seed=0)
COUNTS = [
    *((0.3, 0.7), (0.7, 0.3), (1.0, 0.0), (0.2, 0.5, 0.3), (0.1, 0.0, 0.6, 0.3), (0.1, 0.2, 0.3, 0.2, 0.2)),
    (0.0, 0.0, 0.7, 0.3),  # as budgeted drafting has them
]
RANDOM = [IID(len(c) - 1, c) for c in COUNTS]
ACCEPTED = [(rule, law) for rule in VERIFIERS.values() for law in exact.laws_of(rule)]
MORE = [(rule, law) for rule in VERIFIERS.values() for law in (IID(0), IID(4), *RANDOM) if rule.accepts(law)]
COMPILED = ("standard", "rrs", "rrsw")


def name(x: object) -> str:
    return x.name if isinstance(x, Verifier) else str(x)


def pairs_for(rule: Verifier, law: Law) -> list[exact.Pair]:
    """Fewer where draws are many or rows take milliseconds; those up to 3 tokens include all adversarial ones."""
    pairs = exact.all_pairs(seed=0, most=3) if isinstance(rule, Solver) or law.k > 3 else PAIRS
    if isinstance(rule, Transport | TransportGrouped):
        rng = torch.Generator().manual_seed(law.k)
        sizes = (2, 3, 4, 5)[: 6 - law.k]
        pairs = pairs + [random_pair(rng, v, sharpness) for v in sizes for sharpness in (0.3, 1.0, 3.0, 10.0)]
    return pairs


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws of a law are enumerated once for all rules."""
    monkeypatch.setattr(exact, "outcomes", enumerated_once)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("rule", "law"), [*ACCEPTED, *one_in(4, MORE)], ids=name)
def test_every_rule_is_lossless_for_every_law_it_accepts(rule: Verifier, law: Law) -> None:
    measured = exact.measure(rule, law, pairs_for(rule, law))
    assert measured.exact, measured


@pytest.fixture
def without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "loops_take", lambda *_: False)


@pytest.mark.usefixtures("unchecked", "without_loops")
@pytest.mark.parametrize(("rule", "law"), one_in(2, [pair for pair in ACCEPTED if pair[0].name in COMPILED]), ids=name)
def test_the_plain_row_is_lossless_too(rule: Verifier, law: Law) -> None:
    assert exact.measure(rule, law, exact.all_pairs(seed=2, most=4, num_random=2)).exact


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
    p, q = (torch.softmax(f64(*logits), 0) for logits in ((1.5, 0, 0.5, 1), (1, 0.8, -1, 0.3)))
    assert not VERIFIERS[name].accepts(law)
    assert enumerated(VERIFIERS[name], law, p, q).total_variation(p) > 0.01


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", [IID, WithoutReplacement, Hub])
@pytest.mark.parametrize("k", [2, 3])
def test_the_known_wrong_rule_fails_the_same_check(family: type[IID], k: int) -> None:
    assert not exact.measure(EachAlone(), family(k), PAIRS).exact


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("law", [IID(2, (0.2, 0.0, 0.8)), Opaque(2)])
def test_rows_that_are_no_numbers_are_not_exact(law: Law) -> None:
    """`max` would pass over a NaN that does not come first, and the first row here is p."""
    assert not exact.measure(lambda p, siblings: p * float("nan") if siblings.draws else p, law, PAIRS).exact


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rule", "law", "dtype"),
    one_in(11, [(*pair, dtype) for pair in ACCEPTED for dtype in (torch.float32, torch.float64)]),
    ids=name,
)
def test_rows_are_distributions_of_p_dtype(rule: Verifier, law: Law, dtype: torch.dtype) -> None:
    """Also where p == q up to float32 rounding, so that the residual is zero or noise; and fewer draws than k."""
    row_of = exact.remembering(rule)
    eps = torch.finfo(dtype).eps
    pairs = exact.all_pairs(seed=1, most=3, num_random=2)
    pairs = [(p.to(dtype), q.to(dtype)) for p, q in (pairs[::5] if isinstance(rule, Solver) else pairs)]
    near = {(p.numpy().tobytes(), of.numpy().tobytes()): (p, of) for p, q in pairs for of in (q, p, p * (1 + eps))}
    for p, of in near.values():
        opaque = isinstance(law, Opaque)
        made = [()] if opaque else [(), *(draws for draws, _ in enumerated_once(law, of))]
        rows = [row_of(p, Siblings(draws, None if opaque else of, law)) for draws in made]
        assert {(row.dtype, row.shape) for row in rows} == {(dtype, p.shape)}
        all_rows = torch.stack(rows)
        assert float(all_rows.min()) >= 0
        assert float((all_rows.sum(1) - 1).abs().max()) <= 8 * eps


def test_one_draw_is_the_standard_rule_by_whatever_name() -> None:
    rng = torch.Generator().manual_seed(0)
    pair = f64(0.2, 0.5, 0.3), f64(0.5, 0.1, 0.4)
    row = VERIFIERS["standard"](pair[0], Siblings((0,), pair[1], IID(1)))
    assert row.tolist() == pytest.approx([0.4, 0.6, 0.0])  # accepted with 0.2 / 0.5; residual all on token 1
    for rule in VERIFIERS.values():
        if rule.name.startswith(("standard", "exact-match", "string", "global")):
            continue
        close = 1e-7 if isinstance(rule, Solver) else 1e-12
        for p, q in [pair] + [random_pair(rng, 6, 2.0) for _ in range(0 if isinstance(rule, Solver) else 20)]:
            for x in torch.nonzero(q)[:, 0].tolist():
                siblings = Siblings((x,), q, rule.laws[0](1))
                row, want = rule(p, siblings), VERIFIERS["standard"](p, siblings)
                assert torch.allclose(row, want, rtol=0, atol=close), rule.name


def test_a_draw_that_q_cannot_make_changes_nothing() -> None:
    p, q = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.5, 0.5])
    for draws in [(0,), (0, 1), (0, 2)]:
        assert VERIFIERS["rrsw"](p, Siblings(draws, q, WithoutReplacement(2))).tolist() == [0.0, 1.0, 0.0]


def weights(v: int) -> st.SearchStrategy[list[float]]:
    entry = st.one_of(st.just(0.0), st.floats(1e-30, 1.0), st.sampled_from([1.0, 0.5, 1e-8, 1e-300]))
    return st.lists(entry, min_size=v, max_size=v).filter(lambda weights: max(weights) > 1e-3)


@pytest.mark.parametrize("name", one_in(2, [*COMPILED, "hub", "spechub", "transport", "transport-grouped", "pairwise"]))
@settings(max_examples=100, deadline=None)
@given(data=st.data(), v=st.integers(1, 5))
def test_numbers_of_any_size_leave_a_rule_lossless(name: str, data: st.DataObject, v: int) -> None:
    rule = VERIFIERS[name]
    p = torch.tensor(data.draw(weights(v)), dtype=torch.float64)
    digits = st.lists(st.integers(-2, 2), min_size=v, max_size=v)  # of the last place, by which q differs from p
    near = digits.map(lambda found: p * (1 + 1.1e-16 * torch.tensor(found, dtype=torch.float64)))
    q = data.draw(st.one_of(weights(v).map(lambda row: torch.tensor(row, dtype=torch.float64)), near))
    p, q = p / p.sum(), q / q.sum()
    law = data.draw(st.sampled_from([law for law in (*exact.laws_of(rule), IID(0), *RANDOM) if rule.accepts(law)]))
    before = p.clone(), q.clone()
    assert exact.deviation(rule, law, p, q) <= exact.TOLERANCE, (law, p, q)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])


# Compiled rows against plain ones.

RECURSIVE = rejection.recursive_row, rejection.plain_row
ROWS = {
    "rrs": tuple(partial(row, without_replacement=False) for row in RECURSIVE),
    "rrsw": tuple(partial(row, without_replacement=True) for row in RECURSIVE),
    "kseq": (lambda p, q, draws: VERIFIERS["kseq"](p, Siblings(draws, q, IID(len(draws)))), plain_kseq.row),
}


@pytest.mark.parametrize(
    ("name", "law"),
    [("rrs", IID(4)), ("rrsw", WithoutReplacement(4)), *(("kseq", IID(k)) for k in (2, 8, 64))],
    ids=str,
)
def test_the_compiled_row_equals_the_plain_one_at_full_size(name: str, law: Law) -> None:
    rng = torch.Generator().manual_seed(0)
    for sharpness in (0.5, 3.0, 8.0):
        p, q = (torch.softmax(sharpness * torch.randn(5000, generator=rng), 0) for _ in range(2))
        draws = tuple(law.draw(q[None], torch.rand(1, law.k, generator=rng, dtype=torch.float64))[0].tolist())
        fast, slow = (row(p, q, draws) for row in ROWS[name])
        assert torch.allclose(fast, slow, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ROWS)
def test_views_and_mixed_dtypes(name: str) -> None:
    """p may be a row of a batch, a column stride, or of another dtype than q."""
    p = torch.softmax(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), 0)
    q, draws = torch.softmax(torch.arange(4.0), 0), (3, 1)
    column = p[:, 2]
    row, plain = ROWS[name]
    want = plain(column.clone(), q, draws)
    for p, other in ((column, q), (column[None][0], q), (column, q.double())):
        found = row(p, other, draws)
        assert found.dtype == torch.float32
        assert torch.allclose(found, want, atol=1e-6)


def test_subnormal_leftovers_stay_finite() -> None:
    """After the first draw nothing but 1e-320 of q is left, less than 1 / the largest double."""
    p, q = f64(0.5, 0.2, 0.3), f64(1.0, 1e-320, 2e-320)
    for row in ROWS["rrsw"]:
        assert row(p, q, (0, 2, 1)).tolist() == pytest.approx([0.5, 0.2, 0.3])
