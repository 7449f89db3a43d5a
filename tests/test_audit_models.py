"""The audit on models: it passes on good engines, and fails where something is broken on purpose."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from command import Command
from foretoken import audit
from foretoken.audit import decoding, models
from foretoken.audit.report import APPROXIMATE, FAILED, NONE, OK, WEAK, AuditReport, Check, Section
from foretoken.audit.wrong import EachAlone
from foretoken.cli import main as cli
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID
from foretoken.core.sampling import Sampling
from foretoken.engine import Engine
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows
from foretoken.models.target import LMTarget
from foretoken.names import settled
from foretoken.recipe import SAME, Recipe
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from leaks import leak
from models_zoo import tiny
from raising import raising
from tables import tiny_engine
from thinning import one_in

pytestmark = pytest.mark.usefixtures("unchecked")  # thousands of generations; test_engine checks the types


def quiet(line: str) -> None:
    del line


def outcomes_of(section: Section) -> list[str]:
    return [check.outcome for check in section.checks]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rules and shapes are enumerated by test_verify and test_audit_exact."""
    monkeypatch.setattr(decoding, "SHAPES", decoding.SHAPES[:2])
    names = ("rrs", "traversal", "block", "global-resolution")
    monkeypatch.setattr(audit, "VERIFIERS", {name: VERIFIERS[name] for name in names})


@pytest.mark.usefixtures("few")
def test_a_whole_audit() -> None:
    engine = tiny_engine()
    lines: list[str] = []
    report = audit.run(engine, temperature=0.5, samples=600, seed=0, progress=lines.append)
    assert report.passed, report.text()
    assert lines
    text = report.text()
    assert "PASSED" in text
    assert "p-value" in text
    assert max(map(len, text.splitlines())) < 220
    data = json.loads(json.dumps(report.json()))
    assert data["passed"] is True
    assert {"target", "drafter", "verifier", "tree", "seed", "dtype", "device"} <= data["subject"].keys()
    # The known-wrong rule is seen by all three kinds of test.
    wrong = [c for s in report.sections for c in s.checks if c.name == "known-wrong rule"]
    assert [c.outcome for c in wrong] == [OK] * 3
    assert [c.outcome for c in report.sections[0].checks] == [OK] * 3 + [APPROXIMATE, OK]


@pytest.mark.parametrize(("drafter", "outcomes"), one_in(2, [("ngram", [WEAK, WEAK]), ("none", [OK, OK])]))
def test_drafters_without_density(drafter: str, outcomes: list[str]) -> None:
    """Where a drafter drafts and nothing of it is accepted, the test says that it tested no drafting."""
    engine = tiny_engine(drafter=drafter, verifier="exact-match")
    section = models.sampled(engine, 0.5, 1500, 0, quiet)
    assert outcomes_of(section) == [*outcomes, NONE]
    untested = [drafter != "none" and check.numbers["accepted"] == 0 for check in section.checks[:-1]]
    assert untested == [outcome == WEAK for outcome in outcomes]
    assert untested == ["drafting was not tested" in check.detail for check in section.checks[:-1]]
    assert "does not apply" in section.checks[-1].detail
    assert outcomes_of(models.greedy(engine, 0)) == [OK, OK]


def test_a_drafter_of_whose_tokens_hardly_any_is_accepted_is_not_called_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its law could be wrong at every text: with 0.01 accepted of 3 tokens no test of so many samples sees it."""
    sample = models.sample
    monkeypatch.setattr(models, "sample", lambda *given: (sample(*given)[0], 0.01))
    section = models.sampled(tiny_engine(drafter="ngram", verifier="exact-match"), 0.5, 300, 0, quiet)
    assert outcomes_of(section)[:-1] == [WEAK] * (len(section.checks) - 1)
    assert all("drafting was not tested" in check.detail for check in section.checks[:-1])


def wide(engine: Engine) -> Engine:
    drafter = engine.drafter
    return replace(engine, drafter=replace(drafter, policy=static.kary(4, 2), law=IID), verifier=EachAlone())


@pytest.mark.usefixtures("few")
def test_a_wrong_rule_fails_every_test_it_can() -> None:
    engine = wide(tiny_engine())
    sections = [
        audit.one_node([EachAlone()], 0, quiet),
        audit.whole_decodings([EachAlone()], 0, quiet),
        models.sampled(engine, 0.5, 600, 0, quiet),
    ]
    assert all(FAILED in outcomes_of(section) for section in sections)
    report = AuditReport({}, tuple(sections))
    assert not report.passed
    assert "FAILED" in report.text().splitlines()[-1]
    assert FAILED not in outcomes_of(models.greedy(engine, 0))  # at temperature 0 no rule is asked


def test_a_wrong_rule_is_seen_where_drafter_and_target_agree() -> None:
    engine = tiny_engine(drafter=tiny("llama"))
    assert models.sampled(engine, 0.5, 400, 0, quiet).checks[-1].outcome == OK


def test_where_one_text_has_nearly_all_of_the_probability_little_can_be_seen() -> None:
    """The report says so rather than claim that the tests could tell."""
    section = models.sampled(tiny_engine(), 0.001, 400, 0, quiet)
    assert outcomes_of(section)[:2] == [WEAK] * 2
    report = AuditReport({}, (section,))
    assert report.passed
    assert "could not tell" in report.text()


def test_a_wrong_mask_fails_scores_and_greedy_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 sees node 2, its own continuation."""
    engine = tiny_engine(drafter=tiny("llama"), tree="chain:3")
    assert outcomes_of(models.tree_scores(engine, 0)) == [OK]
    assert outcomes_of(models.greedy(engine, 0)) == [OK, OK]
    leak(monkeypatch, 1, 2)
    assert outcomes_of(models.tree_scores(engine, 0)) == [FAILED]
    assert FAILED in outcomes_of(models.greedy(engine, 0))


def test_greedy_texts_are_not_ended_by_a_token_and_count_what_was_accepted() -> None:
    """Else texts that end at their first token are equal, and nothing was drafted."""
    engine = tiny_engine(drafter=tiny("llama"), tree="chain:3")
    section = models.greedy(replace(engine, eos_ids=frozenset(range(engine.target.vocab_size))), 0)
    assert outcomes_of(section) == [OK, OK]
    assert all(check.numbers["accepted"] > models.GREEDY_TOKENS for check in section.checks)
    section = models.greedy(tiny_engine(), 0)  # two models of which neither guesses the other's tokens
    assert outcomes_of(section) == [WEAK, WEAK]
    assert all(check.numbers["accepted"] == 0 for check in section.checks)
    assert all("drafting was not tested" in check.detail for check in section.checks)


@pytest.mark.parametrize("dtype", one_in(2, [torch.float32, torch.bfloat16]))
def test_scores_that_are_no_numbers_fail(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one node in the middle of each tree."""
    target = LMTarget(CausalLM(torch.nn.Module.to(tiny("llama", random_weights=True), dtype)))
    engine, rows = replace(tiny_engine(), target=target), type(target.lm.open(1, 8))
    whole = rows.score

    def score(self: Rows, tokens: list, parents: list) -> list[torch.Tensor]:
        scores = [logits.clone() for logits in whole(self, tokens, parents)]
        for logits in scores:
            logits[2] = float("nan")
        return scores

    monkeypatch.setattr(rows, "score", score)
    assert outcomes_of(models.tree_scores(engine, 0)) == [FAILED]


@pytest.mark.parametrize("dtype", one_in(2, [torch.bfloat16, torch.float16]))
def test_more_rounding_than_usual_is_no_fault_and_hides_none(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits tree and path of a real model differ by more than any share of its logits, but not by what a wrong
    mask changes. Of this small model they differ by more than a thousandth."""
    target = LMTarget(CausalLM(torch.nn.Module.to(tiny("llama", random_weights=True), dtype)))
    engine = replace(tiny_engine(), target=target)
    assert outcomes_of(models.tree_scores(engine, 0)) == [OK]
    monkeypatch.setitem(models.ROUNDING, dtype, 1e-3)
    assert outcomes_of(models.tree_scores(engine, 0)) == [OK]
    monkeypatch.setattr(models, "PATH", {False: 0.0})
    assert outcomes_of(models.tree_scores(engine, 0)) == [FAILED]  # nothing else let it pass
    monkeypatch.undo()
    monkeypatch.setitem(models.ROUNDING, dtype, 1e-3)
    leak(monkeypatch, 1, 2)
    assert outcomes_of(models.tree_scores(engine, 0)) == [FAILED]


def test_a_float_tie_is_told_from_an_error() -> None:
    engine = tiny_engine()
    prompt = [1, 2, 3]
    logits = models.last_logits(engine.target, [prompt])[0]
    best, second = logits.topk(2).indices.tolist()
    tie, what = models._parting(engine.target, prompt, [best], [second])
    assert not tie
    assert "token 0" in what
    assert models._parting(engine.target, prompt, [best], [best, 1]) == (
        False,
        "one text ends at token 1, the other goes on",
    )
    with torch.no_grad():  # make the two rows of the head equal: now it is a tie
        head = engine.target.lm.model.get_output_embeddings().weight
        saved = head[second].clone()
        head[second] = head[best] * (1 + 1e-7)
        assert models._parting(engine.target, prompt, [best], [second])[0]
        head[second] = saved


def test_a_drafter_that_fails_fails_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.draft.lm import LMDraftSession

    def every_rule(rules: list, *_: object) -> Section:
        assert rules == list(VERIFIERS.values())
        return Section("", "", (Check("", OK, ""),))

    monkeypatch.setattr(audit, "one_node", every_rule)
    monkeypatch.setattr(audit, "whole_decodings", every_rule)
    monkeypatch.setattr(LMDraftSession, "propose", raising(RuntimeError("broken on purpose")))
    report = audit.run(tiny_engine(), temperature=1.0, samples=200, seed=0, progress=quiet)
    assert not report.passed
    assert "broken on purpose" in report.text()


def test_samples_follow_their_seeds_and_not_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    arguments = (engine.target, engine.drafter, engine.verifier, [1, 2, 3], Sampling(temperature=0.5), 20, 5)
    many, accepted = models.sample(*arguments)
    monkeypatch.setattr(models, "BATCH", 3)
    few, _ = models.sample(*arguments)
    assert sorted(many) == sorted(few)
    assert accepted > 0
    assert {len(ids) for ids in many} == {models.NUM_TOKENS}


def tree_of(run: Command, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """The tree that `foretoken audit` loads an engine with."""
    found: list[str] = []

    def load(**named: Any) -> Engine:
        found.append(named["tree"])
        raise ForetokenError("enough")

    monkeypatch.setattr(cli.audit, "load_engine", load)
    run.refused("enough", "audit", *options)
    return found[0]


@pytest.mark.parametrize("name", [name for name in VERIFIERS if name != "string-rejection"])  # it goes with a vocab
def test_the_default_tree_is_one_that_the_rule_takes(name: str, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_of(run, monkeypatch, "--verifier", name)
    policy, rule, law = settled(Recipe(tree=tree, verifier=name), SAME)
    assert rule.accepts(law(policy.max_draws))
    assert (tree == "chain:3") == (name in ("standard", "block", "randomised"))


def test_the_default_tree_branches_unless_the_options_name_what_does_not(
    run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tree(*options: str) -> str:
        return tree_of(run, monkeypatch, *options)

    assert tree() == tree("--vocab", "tli") == tree("--draft-probability", "0.5") == "kary:2x3"
    assert (
        tree("--vocab", "slrs")
        == tree("--vocab", "union")
        == tree("--verifier", "pairwise", "--law", "iid")
        == tree("--law", "hub")
        == "chain:3"
    )
    assert tree("--law", "without-replacement") == tree("--verifier", "exact-match", "--law", "opaque") == "kary:2x3"
    assert tree("--law", "opaque") == "dynamic:14"
    for option in ("--drafter", "ngram"), ("--drafter", "auto"), ("--vocab", "slem"):
        assert tree("--law", "opaque", *option) == "kary:2x3"
    assert tree("--verifier", "block", "--drafter", "auto") == "chain:3"
    assert tree("--verifier", "traversal", "--law", "opaque") == "kary:2x3"  # none goes with it
    assert tree("--verifier", "block", "--tree", "chain:5") == "chain:5"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tree", "kary:2x3", "--verifier", "block"], "makes 2 draws at a node: choose a tree that does not"),
        (["--tree", "chain:3", "--law", "opaque"], "block is not lossless for law opaque with 1 draws"),
        (["--tree", "kary:2x3", "--law", "hub"], "traversal is not lossless for law hub with 2 draws"),
        (
            ["--tree", "kary:2x3", "--draft-probability", "0.5", "--verifier", "standard"],
            "not lossless for law iid with 2 draws",
        ),
        (["--drafter", "ngram", "--verifier", "standard"], "standard is not lossless for law opaque"),
        (["--drafter", "suffix+self", "--tree", "kary:2x3", "--verifier", "hub", "--law", "iid"], "drafter self makes"),
        (["--verifier", "global-resolution"], "only approximately lossless"),
        (["--drafter", "auto", "--tree", "kary:2x3", "--verifier", "block"], "block decides over a whole path"),
        (["--drafter", "auto", "--law", "opaque", "--tree", "chain:3", "--verifier", "standard"], "drafter auto makes"),
        (
            ["--drafter", "auto", "--law", "iid", "--tree", "dynamic:9"],
            "needs verifier exact-match with law opaque, not exact-match with",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_models_are_loaded(
    options: list[str], reason: str, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.build.load_model", raising(AssertionError("a model is loaded")))
    run.refused(reason, "audit", *options)
