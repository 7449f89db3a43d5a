"""The counterexamples of docs/theory.md: what its remarks and conditions say is not true in general."""

import pytest
import torch

from benchmarks.exactly import enumerated
from benchmarks.objective import accepted, throughput
from foretoken.audit.wrong import EachAlone
from foretoken.core.laws import IID, WithoutReplacement
from foretoken.core.tree import Siblings
from foretoken.names import law, verifier
from foretoken.verify import VERIFIERS
from foretoken.verify.acceptance import acceptance, alpha_star
from foretoken.verify.rejection import RRS
from rates import f64


@pytest.mark.usefixtures("unchecked")
def test_rrs_on_draws_without_replacement_can_be_nearly_as_wrong_as_any_rule() -> None:
    p, q = f64(0, 0.995, 0.005), f64(0.998, 0, 0.002)
    assert enumerated(RRS(), WithoutReplacement(2), p, q).total_variation(p) == pytest.approx(0.995, abs=5e-4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("k", "b", "off"), [(2, 0.5, 0.25), (6, 0.7, 0.58), (9, 0.75, 0.67)])
def test_a_rule_that_tests_each_draft_alone_is_off_by_b_minus_b_to_the_k(k: int, b: float, off: float) -> None:
    p = f64(1 - b, b)
    worst = enumerated(EachAlone(), IID(k), p, f64(1, 0)).total_variation(p)
    assert worst == pytest.approx(b - b**k)
    assert worst == pytest.approx(off, abs=0.01)


def test_at_temperature_0_the_likeliest_draft_is_not_always_the_best() -> None:
    p, q = f64(0, 0, 1), f64(0.4, 0.35, 0.25)
    assert float(acceptance("standard", law("iid", 1), p, q)) == pytest.approx(0.25)
    drawn = int(q.argmax())
    assert float(verifier("exact-match")(p, Siblings((drawn,), None, law("opaque", 1)))[drawn]) == 0


def test_kseq_falls_short_of_1_minus_1_over_e_for_a_random_number_of_draws() -> None:
    p, q, sometimes = f64(0.1, 0.9), f64(1, 0), law("iid", counts=[0.9, 0.1])
    assert float(acceptance("kseq", sometimes, p, q)) == pytest.approx(0.01)
    assert float(alpha_star(sometimes, p, q)) == pytest.approx(0.1)


def test_ties_count_in_the_condition_for_a_coin() -> None:
    """p = q: s = 0 < 0.75 if tokens with p = q are left out, and still a = 1 is best; with them s = 1 says so."""
    p = f64(0.5, 0.3, 0.2)
    cost = 0.6
    a = torch.linspace(0, 1, 101, dtype=torch.float64)
    rates = throughput(a, accepted(p[None], p[None], a), cost)
    assert int(rates.argmax()) == 100
    bound = cost * (1 + 1) / (1 + cost)
    assert float(p[p > p].sum()) < bound <= float(p[p >= p].sum())


def test_spechub_beats_what_its_theorems_3_and_4_say_it_beats() -> None:
    """Sun et al. 2024, SpecHub: recursive rejection where q(a) / (1 - q(a)) > 1 - sum min(p, q), a the likeliest token
    of q, and the optimum for two independent draws where q(a) > 1/2."""
    rng = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(2 * torch.randn(2000, 5, generator=rng, dtype=torch.float64), 1) for _ in range(2))
    hub, independent = acceptance("spechub", law("hub", 2), p, q), law("iid", 2)
    top, alpha = q.amax(1), torch.minimum(p, q).sum(1)
    third, fourth = top / (1 - top) > 1 - alpha, top > 0.5
    assert third.sum() > 100
    assert fourth.sum() > 100
    assert bool((hub >= acceptance("rrs", independent, p, q) - 1e-12)[third].all())
    assert bool((hub >= alpha_star(independent, p, q) - 1e-12)[fourth].all())


@pytest.mark.parametrize("name", ["spechub", "rrsw"])
def test_a_first_draft_is_accepted_at_most_with_the_sum_of_minima(name: str) -> None:
    """So Table 3 of Sun et al. 2024, SpecHub, where SpecHub's first draft is accepted more often than RRSw's at T = .3
    and .6, cannot be a mean over the same contexts: the first draft has law q, and RRSw attains the bound."""
    rng = torch.Generator().manual_seed(0)
    two, below = VERIFIERS[name].laws[0](2), []
    for _ in range(200):
        p, q = torch.softmax(2 * torch.randn(2, 4, generator=rng, dtype=torch.float64), 1)
        first = float(enumerated(VERIFIERS[name], two, p, q).by_draw[0])
        below.append(float(torch.minimum(p, q).sum()) - first)
    assert min(below) > -1e-12
    assert (max(below) < 1e-12) == (name == "rrsw")
