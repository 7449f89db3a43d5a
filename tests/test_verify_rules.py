"""Rows that were worked out by hand, and what is particular to one rule."""

import math

import pytest

from foretoken.audit import enumerate as exact
from foretoken.core.laws import IID, Hub
from foretoken.core.tree import Siblings
from foretoken.verify import VERIFIERS
from foretoken.verify.acceptance import acceptance
from foretoken.verify.hub import by_rank
from foretoken.verify.kseq import first_pass, solve_rho
from rates import f64, optimum
from thinning import one_in

HUB, SPECHUB, KSEQ = VERIFIERS["hub"], VERIFIERS["spechub"], VERIFIERS["kseq"]
PAIR = f64(0.1, 0.6, 0.3), f64(0.5, 0.3, 0.2)  # of Sun et al. 2024 (SpecHub), Figures 4 and 5


def test_hub() -> None:
    """The hub is token 0, r = [0, .6, .4]; draw 2 passes with .3 / .4, and the residual is [.1, 0, 0]."""
    p, q = PAIR
    assert HUB(p, Siblings((0, 2), q, Hub(2))).tolist() == pytest.approx([0.25, 0, 0.75])
    assert HUB(p, Siblings((2, 0), q, Hub(2))).tolist() == pytest.approx([0.25, 0, 0.75])
    assert HUB(p, Siblings((1, 0), q, Hub(2))).tolist() == pytest.approx([0, 1, 0])


def test_spechub() -> None:
    """Through Algorithms 2 and 3: nothing is left to the residual.

    Q(1,0) = .3, Q(2,0) = .2, Q(0,1) = .3, Q(0,2) = .2; p' = [., .3, .1]; S = .1; R = 0.
    """
    p, q = PAIR
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


def test_spechub_where_the_rest_is_subnormal() -> None:
    """1 / 1e-312 is infinite."""
    p, q = f64(0.3, 0.7), f64(1, 1e-312)
    assert exact.deviation(SPECHUB, Hub(2), p, q) < 1e-12


def test_equal_hubs_are_those_of_lower_id() -> None:
    q = f64(0.2, 0.3, 0.3, 0.2)
    assert by_rank(q, (2, 1)) == [1, 2]
    assert by_rank(q, (0, 1, 3)) == [1, 0, 3]
    p = f64(0.4, 0.1, 0.2, 0.3)
    for rule, k in ((HUB, 2), (HUB, 3), (SPECHUB, 2)):
        assert exact.deviation(rule, Hub(k), p, q) < 1e-12


def test_hub_rules_refuse_what_they_are_not_made_for() -> None:
    assert not SPECHUB.accepts(Hub(3))
    assert not SPECHUB.accepts(IID(2))
    assert not HUB.accepts(IID(2))
    assert HUB.accepts(Hub(9))


def test_the_root_of_kseq() -> None:
    """p = [1, 0], q = [1/2, 1/2], k = 2: beta = 1/2 for rho <= 2, so 1 - 1/4 = rho / 2, rho = 3/2."""
    p, q = f64(1, 0), f64(0.5, 0.5)
    assert float(solve_rho(p, q, 2)) == pytest.approx(1.5, abs=1e-12)
    assert KSEQ(p, Siblings((1, 0), q, IID(2))).tolist() == pytest.approx([1, 0])
    assert float(acceptance(KSEQ, IID(2), p, q)) == pytest.approx(0.75)


def test_the_row_of_kseq() -> None:
    """p = [1/4, 3/4], q = [3/4, 1/4], k = 2: beta = 1/4 + 1 / (4 rho), and rho beta = 1 - (1 - beta)^2 at rho*."""
    p, q = f64(0.25, 0.75), f64(0.75, 0.25)
    rho = float(solve_rho(p, q, 2))
    beta = 0.25 + 0.25 / rho
    assert rho * beta == pytest.approx(1 - (1 - beta) ** 2, abs=1e-12)
    a = 0.25 / (rho * 0.75)  # token 1 always passes
    assert KSEQ(p, Siblings((0, 1), q, IID(2))).tolist() == pytest.approx([a, 1 - a])
    assert KSEQ(p, Siblings((0, 0), q, IID(2))).tolist() == pytest.approx([1 - (1 - a) ** 2, (1 - a) ** 2])


def test_kseq_where_beta_is_zero_and_one() -> None:
    assert first_pass(f64(0, 1e-300, 1), 3).tolist() == pytest.approx([3, 3, 1])
    assert solve_rho(f64(1, 0), f64(0, 1), 3) == 3  # disjoint: nothing passes whatever rho
    assert solve_rho(f64(0.5, 0.5), f64(0.5, 0.5), 3) == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("k", one_in(3, [1, 2, 3, 4]))
def test_kseq_accepts_within_its_bound(k: int) -> None:
    for p, q in exact.all_pairs(seed=3, most=4, num_random=2):
        found, best = float(acceptance(KSEQ, IID(k), p, q)), optimum(IID(k), p, q / q.sum())
        assert (1 - 1 / math.e) * best - 1e-9 <= found <= best + 1e-9
