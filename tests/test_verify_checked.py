"""`foretoken.verifier(name)`: the same rows, and one clear sentence for whatever cannot have been meant."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import foretoken
from foretoken.audit import enumerate as exact
from foretoken.build import with_recipe
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law, Opaque, WithoutReplacement, outcomes
from foretoken.core.tree import Siblings
from foretoken.core.verifier import Approximate, HasAcceptance, Verifier
from foretoken.core.walk import PathVerifier
from foretoken.draft.lookup import LookupDrafter
from foretoken.names import check_pair
from foretoken.recipe import Recipe
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.verify.checked import checked
from foretoken.verify.published.plan import Solver
from tables import tiny_engine
from thinning import one_in

P = torch.tensor([0.1, 0.6, 0.3, 0.0], dtype=torch.float64)
Q = torch.tensor([0.5, 0.3, 0.0, 0.2], dtype=torch.float64)
RANDOM = IID(2, (0.2, 0.0, 0.8))
LAWS: list[Law] = [*(family(k) for family in exact.FAMILIES for k in (1, 2, 3)), RANDOM]


def record(draws: tuple[int, ...], law: Law, q: Tensor = Q) -> Siblings:
    return Siblings(draws, None if isinstance(law, Opaque) else q, law)


@pytest.mark.parametrize("name", VERIFIERS)
def test_it_is_the_same_rule(name: str) -> None:
    rule, plain = foretoken.verifier(name), VERIFIERS[name]
    assert (rule.name, rule.laws) == (plain.name, plain.laws)
    for kind in (Verifier, Solver, Approximate, PathVerifier, HasAcceptance):
        assert isinstance(rule, kind) == isinstance(plain, kind)
    for law in LAWS:
        if rule.accepts(law):
            given = [(1, 3, 0)[: law.k]] if isinstance(law, Opaque) else [draws for draws, _ in outcomes(law, Q)]
            for draws in given[:3]:
                assert torch.equal(rule(P, record(draws, law)), plain(P, record(draws, law)))


@pytest.mark.parametrize("name", VERIFIERS)
def test_every_law_that_a_rule_does_not_take_is_refused(name: str) -> None:
    rule = foretoken.verifier(name)
    refused = [law for law in LAWS if not VERIFIERS[name].accepts(law)]
    assert bool(refused) == (name != "exact-match")
    for law in refused:
        with pytest.raises(ForetokenError, match=f"{name} is not lossless for law {law.name} with {law.k} draws"):
            rule(P, record((1, 3, 0)[: law.k], law))


ROWS = {
    "a sum below 1": (torch.tensor([0.5, 0.3, 0.1, 0.0]), "is no distribution .*sum 0.9"),
    "a negative entry": (torch.tensor([0.9, 0.3, -0.2, 0.0]), r"is no distribution \(least -0.2"),
    "not a number": (torch.tensor([0.5, float("nan"), 0.5, 0.0]), "is no distribution"),
    "infinite": (torch.tensor([float("inf"), 0.0, 0.0, 0.0]), "is no distribution"),
    "all zero": (torch.zeros(4), "is no distribution"),
    "two rows": (torch.full((2, 4), 0.25), r"must be one row.*\(2, 4\)"),
    "no row": (torch.tensor(1.0), "must be one row"),
    "no token": (torch.zeros(0), "must be one row"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", ROWS)
def test_rows_that_are_no_distributions(case: str) -> None:
    bad, words = ROWS[case]
    for rule in map(foretoken.verifier, ("rrs", "exact-match")):
        with pytest.raises(ForetokenError, match=f"^p {words}"):
            rule(bad, Siblings((0,), Q, IID(1)))
        with pytest.raises(ForetokenError, match=f"^q {words}"):
            rule(P, Siblings((0,), bad, IID(1)))


def test_rows_over_two_vocabularies() -> None:
    with pytest.raises(ForetokenError, match="p has 4 tokens and q 2"):
        foretoken.verifier("rrs")(P, Siblings((0,), torch.tensor([0.5, 0.5]), IID(1)))


DRAWS = {
    "outside": ("rrs", IID(2), (0, 4), "Draw 4 is outside the vocabulary: token ids are 0 to 3"),
    "negative": ("rrs", IID(1), (-1,), "Draw -1 is outside"),
    "q is 0 there": ("rrsw", WithoutReplacement(2), (1, 2), "Draw 2 cannot come from q"),
    "outside, opaque": ("exact-match", Opaque(2), (9,), "Draw 9 is outside"),
    "too few": ("transport", IID(3), (0, 1), "iid with 3 draws never makes the draws"),
    "too many": ("transport", RANDOM, (0, 1, 0), "never makes"),
    "a count of probability 0": ("transport", RANDOM, (0,), "never makes"),
    "repeated": ("rrsw", WithoutReplacement(2), (1, 1), "never makes"),
    "more than the support": ("rrsw", WithoutReplacement(4), (0, 1, 3, 1), "never makes .* q of 3 tokens"),
    "too few of the support": ("rrsw", WithoutReplacement(4), (0, 1), "never makes"),
    "no hub": ("hub", Hub(2), (1, 3), "hub with 2 draws never makes"),
    "wrong order": ("spechub", Hub(2), (1, 3), "never makes"),
}


@pytest.mark.parametrize("case", DRAWS)
def test_draws_that_cannot_have_been_made(case: str) -> None:
    name, law, draws, words = DRAWS[case]
    with pytest.raises(ForetokenError, match=words):
        foretoken.verifier(name)(P, record(draws, law))


def test_more_draws_than_the_support_are_what_there_is() -> None:
    for name, law in (("rrsw", WithoutReplacement(4)), ("hub", Hub(5))):
        draws = [draws for draws, _ in outcomes(law, Q)]
        assert {len(drawn) for drawn in draws} == {3}
        assert exact.deviation(foretoken.verifier(name), law, P, Q) < exact.TOLERANCE


def test_many_improbable_draws_are_no_error() -> None:
    """Their probability, 1e-400, is 0 as a number."""
    q = torch.tensor([1e-10, 1 - 1e-10], dtype=torch.float64)
    row = foretoken.verifier("rrs")(q, Siblings((0,) * 40, q, IID(40)))
    assert row.tolist() == [1, 0]
    q = torch.tensor([1e-20] * 20 + [1.0], dtype=torch.float64)  # 17 times in a row not the likeliest token
    row = foretoken.verifier("rrsw")(q, Siblings(tuple(range(17)), q, WithoutReplacement(17)))
    assert float(row.sum()) == pytest.approx(1)


def test_a_law_too_large_to_enumerate_names_its_limit() -> None:
    q = torch.full((600,), 1 / 600, dtype=torch.float64)
    with pytest.raises(ForetokenError, match=r"too large.*below 1000000"):
        next(iter(outcomes(IID(3), q)))


@pytest.mark.parametrize("tree", one_in(2, ["kary:2x2", "kary:3x1", "chain:3"]))
def test_what_the_engine_hands_to_rules_passes(tree: str) -> None:
    """Real q, draws and laws of every family, at temperatures where supports run out."""
    base = tiny_engine()
    for law in ("iid", "without_replacement", "hub", "opaque"):
        for rule in VERIFIERS.values():
            if isinstance(rule, Solver | PathVerifier) or not rule.accepts(foretoken.law(law, 3)):
                continue
            engine = with_recipe(base, Recipe(tree, rule.name, law=law))
            options = {"max_new_tokens": 8, "temperature": 0.9, "top_k": 2, "seed": 3}
            want = engine.generate([3, 1, 4], **options).token_ids
            assert replace(engine, verifier=checked(rule)).generate([3, 1, 4], **options).token_ids == want


def test_a_law_with_a_random_number_of_draws_by_name() -> None:
    assert foretoken.law("iid", 2, counts=[0.2, 0.0, 0.8]) == RANDOM
    with pytest.raises(ForetokenError, match="hub takes no counts"):
        foretoken.law("hub", 1, counts=(0.5, 0.5))
    with pytest.raises(ForetokenError, match="counts"):
        foretoken.law("iid", 2, counts=(0.5, 0.5))


def test_a_law_that_no_verifier_takes_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = VERIFIERS["standard"]
    monkeypatch.setattr("foretoken.names.VERIFIERS", {rule.name: rule})
    drafter = LookupDrafter(static.kary(2, 1))
    with pytest.raises(ForetokenError, match=r"which drafter ngram makes: no verifier is, so choose another tree or"):
        check_pair(drafter, rule)
