"""foretoken.acceptance: the closed forms are what enumeration of the draws gives; alpha_star is never beaten."""

from dataclasses import dataclass
from itertools import chain, groupby
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import foretoken
from benchmarks import exactly
from foretoken.audit import enumerate as exact
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law, Opaque, WithoutReplacement
from foretoken.core.verifier import Approximate, HasAcceptance, Verifier
from foretoken.verify import VERIFIERS
from foretoken.verify.published.plan import Solver
from rates import optimum
from tables import enumerated_once
from thinning import one_in

PAIRS = exact.all_pairs(seed=3, most=4, num_random=2)
RANDOM = [IID(1, (0.3, 0.7)), IID(2, (0.2, 0.5, 0.3)), IID(3, (0.1, 0.0, 0.6, 0.3)), IID(2, (0.0, 0.0, 1.0))]
CASES = [
    (rule, law)
    for rule in VERIFIERS.values()
    for law in [*exact.laws_of(rule), IID(0), IID(4), Hub(4), *RANDOM]
    if isinstance(rule, HasAcceptance) and rule.accepts(law)
]
NAMES = ("randomised", "hub", "spechub", "transport", "ot-lp", "ot-maxflow", "ot-maxflow-optimised", "canonical")
OPTIMAL = [(name, law) for name in NAMES for law in VERIFIERS[name].laws]


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws of a law are enumerated once for all rules."""
    monkeypatch.setattr(exactly, "outcomes", enumerated_once)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("rule", "law"), one_in(5, CASES), ids=lambda x: x.name if isinstance(x, Verifier) else str(x))
def test_the_closed_form_is_what_enumeration_gives_and_at_most_alpha_star(rule: Verifier, law: Law) -> None:
    """Of the optimal rules it is alpha_star. Solvers, which take milliseconds, see a third of the largest pairs."""
    solves = isinstance(rule, Solver)
    slack = rule.tolerance if isinstance(rule, Approximate) else 1e-12
    pairs = [pair for i, pair in enumerate(PAIRS) if not solves or len(pair[0]) < 4 or i % 3 == 0]
    alike = [
        [torch.stack(rows) for rows in zip(*group, strict=True)] for _, group in groupby(pairs, lambda x: len(x[0]))
    ]
    rates = [foretoken.acceptance(rule.name, law, p, q).tolist() for p, q in alike]
    optima = [foretoken.alpha_star(law, p, q).tolist() for p, q in alike]
    for (p, q), found, best in zip(pairs, chain(*rates), chain(*optima), strict=True):
        whole = exactly.enumerated(rule, law, p, q).acceptance
        assert found <= whole + 1e-11, (p, q)
        assert whole <= best + slack, (p, q)
        # `pairwise` does not count the draws that come up after a rejected pick.
        assert found == pytest.approx(whole, abs=0.01 if rule.name == "pairwise" else 1e-11), (p, q)
        if (rule.name, type(law)) in OPTIMAL:
            assert found == pytest.approx(best, abs=1e-7 if solves else 1e-12), (p, q)


@pytest.mark.parametrize("name", ["rrs", "rrsw", "kseq", "hub", "transport", "transport-grouped", "pairwise"])
def test_rows_broadcast(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    p = torch.rand(3, 1, 7, generator=rng).softmax(-1)
    q = torch.rand(2, 7, generator=rng).softmax(-1)
    p[0], q[1] = torch.eye(7)[2], torch.tensor([0.5, 0, 0, 0.5, 0, 0, 0])
    law = VERIFIERS[name].laws[0](2 if name == "pairwise" else 3)
    for measure in (foretoken.alpha_star, lambda *pair: foretoken.acceptance(name, *pair)):
        got = measure(law, p, q)
        assert got.shape == (3, 2)
        assert got.dtype == torch.float64
        for i in range(3):
            for j in range(2):
                assert float(got[i, j]) == pytest.approx(float(measure(law, p[i, 0], q[j])))


BAD = {
    "sum": (torch.tensor([0.5, 0.4]), "sum 0.9"),
    "sign": (torch.tensor([1.5, -0.5]), "-0.5"),
    "nan": (torch.tensor([float("nan"), 1.0]), "no distribution"),
    "inf": (torch.tensor([float("inf"), 1.0]), "no distribution"),
    "vocabulary": (torch.tensor([1.0]), "vocabulary"),
    "scalar": (torch.tensor(1.0), "vocabulary"),
}


@pytest.mark.parametrize("case", BAD)
def test_rows_that_are_no_distributions_are_refused(case: str) -> None:
    bad, word = BAD[case]
    good = torch.tensor([0.5, 0.5])
    for p, q in ((bad, good), (good, bad)):
        with pytest.raises(ForetokenError, match=word):
            foretoken.acceptance("rrs", IID(1), p, q)
        with pytest.raises(ForetokenError, match=word):
            foretoken.alpha_star(IID(1), p, q)


def test_pairs_that_are_not_lossless_are_refused() -> None:
    p = torch.tensor([0.5, 0.5])
    with pytest.raises(ForetokenError, match="not lossless"):
        foretoken.acceptance("rrs", WithoutReplacement(2), p, p)
    with pytest.raises(ForetokenError, match="Unknown verifier"):
        foretoken.acceptance("best", IID(2), p, p)
    with pytest.raises(ForetokenError, match="do not broadcast"):
        foretoken.acceptance("rrs", IID(2), p.expand(3, 2), p.expand(2, 2))


@dataclass(frozen=True)
class Antithetic:
    """A law of a user's own: x from q, then the mirror image of x; where that is x, nothing."""

    k: int = 2
    name: ClassVar[str] = "antithetic"
    num_uniforms: ClassVar[int] = 1

    def draw(self, q: Tensor, u: Tensor) -> Tensor:
        raise NotImplementedError

    def prob(self, q: Tensor, draws: tuple[int, ...]) -> float:
        mirrored = [(x, len(q) - 1 - x) for x in draws[:1]]
        if not draws or draws != tuple(dict.fromkeys(mirrored[0])):
            return 0.0
        return float(q[draws[0]] / q.sum())


ANY: list[Law] = [*RANDOM, Hub(4), *(f(k) for f in (IID, Hub, WithoutReplacement) for k in range(4)), IID(4)]


@pytest.mark.parametrize(("k", "n"), [(2, 300), (5, 200), (16, 50), (64, 10), (200, 3)])
def test_alpha_star_of_many_draws_without_replacement(k: int, n: int) -> None:
    """q uniform over v tokens, p over n of them: one of the n is drawn, or none of k is."""
    v = 1000
    p, q = torch.zeros(v, dtype=torch.float64), torch.full((v,), 1 / v, dtype=torch.float64)
    p[:n] = 1 / n
    none = np.prod([(v - n - i) / (v - i) for i in range(k)])
    assert float(foretoken.alpha_star(WithoutReplacement(k), p, q)) == pytest.approx(1 - none, abs=1e-12)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("law", [*ANY, Antithetic()], ids=str)
def test_alpha_star_is_the_minimum_over_all_sets(law: Law) -> None:
    """By enumeration of every set and every draw; the code scans suffixes, or solves a linear program."""
    close = 1e-9 if isinstance(law, Antithetic) else 1e-12  # HiGHS drops coefficients below that
    pairs = [(p, q) for p, q in PAIRS if not isinstance(law, Antithetic) or bool((q > 0).all())]
    assert len(pairs) > 10
    for p, q in pairs:
        assert float(foretoken.alpha_star(law, p, q)) == pytest.approx(optimum(law, p, q / q.sum()), abs=close), (p, q)


def test_alpha_star_of_opaque_children_is_their_share_of_p() -> None:
    p, scores = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([[3.0, -1.0, 2.0], [-torch.inf, 0.0, -torch.inf]])
    assert foretoken.alpha_star(Opaque(2), p, scores).tolist() == pytest.approx([0.5, 0.5])
    assert foretoken.alpha_star(Opaque(5), p, scores).tolist() == pytest.approx([1.0, 0.5])


def test_exact_match_without_replacement_at_full_size() -> None:
    """Three draws from 3000 tokens, against a mean over drawn ones: five standard errors."""
    logits = 2 * torch.randn(2, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = torch.softmax(logits, -1)
    law, num = WithoutReplacement(3), 20_000
    u = torch.rand(num, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = p[law.draw(q.expand(num, -1), u)].sum(1)
    found = float(foretoken.acceptance("exact-match", law, p, q))
    assert abs(found - float(seen.mean())) < 5 * float(seen.std()) / num**0.5


def test_draws_from_next_to_nothing_are_not_counted() -> None:
    """Where all but one token share 2e-312 of q, of two draws only the first counts, as for alpha*."""
    p, q = torch.tensor([[0.2, 0.5, 0.3], [1.0, 1e-312, 1e-312]], dtype=torch.float64)
    law = WithoutReplacement(2)
    assert float(foretoken.acceptance("exact-match", law, p, q)) == pytest.approx(0.2, abs=1e-11)
    assert float(foretoken.alpha_star(law, p, q)) == pytest.approx(0.2, abs=1e-11)


def test_rrsw_over_too_many_sequences_is_refused() -> None:
    p, q = torch.softmax(torch.randn(2, 500, generator=torch.Generator().manual_seed(0)), -1)
    assert 0 < float(foretoken.acceptance("rrsw", WithoutReplacement(3), p, q)) < 1
    with pytest.raises(ForetokenError, match="too long a sum"):
        foretoken.acceptance("rrsw", WithoutReplacement(5), p, q)
