"""K-SEQ: the root, the acceptance, the bound, and the compiled row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.audit import enumerate as exact
from foretoken.core.laws import IID
from foretoken.core.tree import Siblings
from foretoken.verify import VERIFIERS
from foretoken.verify.acceptance import acceptance
from foretoken.verify.kseq import first_pass, kseq_row, plain_row, solve_rho
from rates import enumerated, optimum

KSEQ = VERIFIERS["kseq"]
PAIRS = exact.all_pairs(seed=3, most=4, num_random=2)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_root_by_hand() -> None:
    """p = [1, 0], q = [1/2, 1/2], k = 2: beta = 1/2 for rho <= 2, so 1 - 1/4 = rho / 2, rho = 3/2."""
    p, q = f64(1, 0), f64(0.5, 0.5)
    assert float(solve_rho(p, q, 2)) == pytest.approx(1.5, abs=1e-12)
    assert KSEQ(p, Siblings((1, 0), q, IID(2))).tolist() == pytest.approx([1, 0])
    assert float(acceptance(KSEQ, IID(2), p, q)) == pytest.approx(0.75)


def test_the_row_by_hand() -> None:
    """p = [1/4, 3/4], q = [3/4, 1/4], k = 2: beta = 1/4 + 1 / (4 rho), and rho beta = 1 - (1 - beta)^2 at rho*."""
    p, q = f64(0.25, 0.75), f64(0.75, 0.25)
    rho = float(solve_rho(p, q, 2))
    beta = 0.25 + 0.25 / rho
    assert rho * beta == pytest.approx(1 - (1 - beta) ** 2, abs=1e-12)
    a = 0.25 / (rho * 0.75)  # token 1 always passes
    assert KSEQ(p, Siblings((0, 1), q, IID(2))).tolist() == pytest.approx([a, 1 - a])
    assert KSEQ(p, Siblings((0, 0), q, IID(2))).tolist() == pytest.approx([1 - (1 - a) ** 2, (1 - a) ** 2])


def test_one_draw_is_the_standard_rule() -> None:
    p, q = f64(0.2, 0.5, 0.3), f64(0.5, 0.1, 0.4)
    record = Siblings((0,), q, IID(1))
    assert KSEQ(p, record).tolist() == pytest.approx(VERIFIERS["standard"](p, record).tolist())


def test_beta_zero_and_one() -> None:
    assert first_pass(f64(0, 1e-300, 1), 3).tolist() == pytest.approx([3, 3, 1])
    assert solve_rho(f64(1, 0), f64(0, 1), 3) == 3  # disjoint: nothing passes whatever rho
    assert solve_rho(f64(0.5, 0.5), f64(0.5, 0.5), 3) == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_acceptance_is_its_formula_and_within_its_bound(k: int) -> None:
    for p, q in PAIRS:
        found = enumerated(KSEQ, IID(k), p, q)
        assert found == pytest.approx(float(acceptance(KSEQ, IID(k), p, q)), abs=1e-9)
        best = optimum(IID(k), p, q / q.sum())
        assert (1 - 1 / math.e) * best - 1e-9 <= found <= best + 1e-9


@settings(max_examples=150, deadline=None)
@given(data=st.data(), v=st.integers(1, 7), double=st.booleans(), k=st.integers(0, 16))
def test_the_compiled_row_equals_the_plain_one(data: st.DataObject, v: int, double: bool, k: int) -> None:
    dtype = torch.float64 if double else torch.float32
    entry = st.one_of(st.just(0.0), st.floats(1e-30, 1.0), st.sampled_from([1.0, 0.5, 1e-8]))
    weights = st.lists(entry, min_size=v, max_size=v).filter(any)
    p, q = (torch.tensor(data.draw(weights), dtype=dtype) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    support = torch.nonzero(q > 0)[:, 0].tolist()
    draws = tuple(data.draw(st.lists(st.sampled_from(support), min_size=k, max_size=k)))
    before = p.clone(), q.clone()
    fast = kseq_row(p, q, draws)
    assert torch.equal(before[0], p)
    assert torch.equal(before[1], q)
    slow = plain_row(p, q, draws)
    # Near p == q the root is flat: (1 - beta)^k is rounding, and rho itself is known to eps ** (1 / k) only. What is
    # left of it is about apart^k, which must stand out from eps by the 1e-6 that is asked for. Else what a draw passes
    # with, min(1, p / rho q), is known as well as rho.
    apart = float((p - q).abs().max())
    flat = apart <= 1e-3 or apart**k <= 1e-9
    # An entry that is 0 exactly, p - c p / rho, is a difference of numbers up to 1 after a dozen roundings, 16 eps, and
    # is divided by the mass of the residual, (1 - beta)^k.
    left = 1 - float(KSEQ.acceptance(p[None].double(), q[None].double(), IID(k))) if k else 1.0
    atol = 16 * torch.finfo(dtype).eps / max(left, 1e-9)
    if flat:
        atol = max(atol, torch.finfo(torch.float64).eps ** (1 / max(k, 1)))
    assert torch.allclose(fast, slow, rtol=1.0 if flat else 1e-6, atol=atol), (p, q, draws)


def test_the_compiled_row_where_the_root_is_flat() -> None:
    """What hypothesis found another time: eight draws, p and q a hundredth apart, 1e-16 of mass left over."""
    p, q = f64(31, 32, 31) / 94, f64(31, 32, 32) / 95
    draws = (0, 1, *(0,) * 6)
    fast = kseq_row(p, q, draws)
    torch.testing.assert_close(fast, plain_row(p, q, draws), rtol=0, atol=torch.finfo(torch.float64).eps ** (1 / 8))


def test_the_compiled_row_where_little_is_left() -> None:
    """What hypothesis once found: an entry that is 0 exactly, of a residual of mass 0.01."""
    p, q = f64(0, 0, 0, 0.5, 0.5), f64(0, 0, 8, 4, 5) / 17
    draws = (2,) * 6
    fast = kseq_row(p, q, draws)
    torch.testing.assert_close(fast, plain_row(p, q, draws), rtol=0, atol=1e-13)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("k", [2, 3])
def test_the_plain_row_is_lossless_too(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.verify.kseq.loops_take", lambda *_: False)
    assert exact.measure(KSEQ, IID(k), PAIRS).exact


@pytest.mark.parametrize("k", [2, 8, 64])
def test_full_size(k: int) -> None:
    rng = torch.Generator().manual_seed(0)
    for sharpness in (0.5, 3.0, 8.0):
        p, q = (torch.softmax(sharpness * torch.randn(5000, generator=rng), 0) for _ in range(2))
        draws = tuple(IID(k).draw(q[None], torch.rand(1, k, generator=rng, dtype=torch.float64))[0].tolist())
        fast = kseq_row(p, q, draws)
        assert torch.allclose(fast, plain_row(p, q, draws), rtol=1e-5, atol=1e-9)
