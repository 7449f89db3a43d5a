"""Randomised drafting: exact for every rule that takes random counts, and equal to the paper's rule at one draft."""

import threading

import pytest
import torch
from torch import Tensor

import foretoken
import tiny
from engines import check_batch, check_greedy
from foretoken.audit import enumerate as exact
from foretoken.audit.decoding import Decoding
from foretoken.audit.enumerate import TOLERANCE
from foretoken.audit.table import TableLM, random_table
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Coins, outcomes
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.tree import Siblings
from foretoken.decode import DraftFailedWarning
from foretoken.draft.auto import AutoDrafter
from foretoken.draft.randomised import PendingSiblings, RandomisedDrafter, RandomisedSession
from foretoken.models.target import LMTarget
from foretoken.trees import static
from foretoken.trees.paths import PathTree
from foretoken.verify import VERIFIERS
from foretoken.verify.randomised import Randomised
from raising import raising
from tables import off_target
from thinning import one_in

PAIRS = exact.all_pairs(seed=0)


# One node.


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("a", [0.0, 0.3, 0.75, 1.0])
def test_transport_is_the_papers_rule_at_one_draft(a):
    law = Coins(a)(1)
    for p, q in PAIRS:
        for draws, _ in outcomes(law, q):
            record = Siblings(draws, q, law)
            paper, ours = VERIFIERS["randomised"](p, record), VERIFIERS["transport"](p, record)
            assert float((paper - ours).abs().max()) <= 1e-12


def test_coins_are_binomial():
    assert Coins(0.25)(2).counts == pytest.approx((0.5625, 0.375, 0.0625))
    assert Coins(1.0)(3) == IID(3)
    with pytest.raises(ForetokenError, match="must be in"):
        Coins(1.5)


class PlainWithoutDraft(Randomised):
    """The oversight that the paper warns of: without a draft the token comes from p, not from the residual."""

    def __call__(self, p: Tensor, siblings: Siblings) -> Tensor:
        return super().__call__(p, siblings) if siblings.draws else p


@pytest.mark.usefixtures("unchecked")
def test_sampling_from_p_where_no_draft_was_made_is_caught():
    assert exact.measure(PlainWithoutDraft(), Coins(0.5)(1), PAIRS).worst > 0.05
    case = randomised_decoding(PlainWithoutDraft(), static.chain(2), 0.5, 2)
    assert off_target(case)[0] > 0.01


# Whole decodings, enumerated through the real session, thread included.


def randomised_decoding(verifier, policy, a, v, **settings) -> Decoding:
    drafter = RandomisedDrafter(TableLM("drafter", random_table(v, 4)), policy, Coins(a), v)
    return Decoding(LMTarget(TableLM("target", random_table(v, 3))), drafter, verifier, **settings)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rule", "policy", "v", "a"),
    [
        *(("randomised", static.chain(d), v, 0.4) for d, v in [(1, 3), (3, 2)]),
        *(("transport", static.chain(d), v, 0.4) for d, v in [(1, 3), (3, 2)]),
        ("transport", static.kary(2, 2), 2, 0.4),
        ("transport", static.StaticTree((-1, 0, 0, 1)), 3, 0.4),
        ("transport-grouped", static.kary(3, 1), 2, 0.4),
        ("rrsw", static.StaticTree((-1, 0, 0, 1)), 2, 0.4),
        ("gbv", PathTree(0, 2, 2), 2, 0.4),
        ("randomised", static.chain(2), 3, 0.8),
        ("transport", static.kary(2, 2), 2, 0.8),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_whole_decodings_have_the_targets_law(rule, policy, v, a):
    """Beside the shapes that test_audit_exact has for every rule, by coins of probability 0.5."""
    case = randomised_decoding(VERIFIERS[rule], policy, a, v)
    worst, accepted = off_target(case)
    assert worst <= TOLERANCE
    assert accepted > 0.1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.6), Sampling(top_k=2), Sampling(repetition_penalty=1.5), Sampling(temperature=0.0)],
    ids=["temperature", "truncated", "penalised", "greedy"],
)
def test_settings_and_end_of_text(sampling):
    case = randomised_decoding(
        VERIFIERS["transport"], static.StaticTree((-1, 0, 0, 1)), 0.6, 3, sampling=sampling, eos_ids=frozenset({2})
    )
    assert off_target(case)[0] <= TOLERANCE


# Real models.


def load(models, **options):
    target, drafter = models
    return foretoken.load(target, drafter=drafter, tokenizer=tiny.tokenizer(), **options)


PROMPTS = ["def main():\n", "é", "x = [1, 2, 3, 4, 5, 6]\n" * 3]


@pytest.mark.parametrize("tree", ["chain:3", "kary:2x2"])
def test_greedy_text_is_the_plain_text(models, tree):
    results = check_greedy(load(models, tree=tree, draft_probability=0.5), PROMPTS, 30)
    assert sum(r.stats.num_accepted for r in results) > 0


@pytest.mark.parametrize(
    ("tree", "prompts", "probability"),
    one_in(3, [(tree, *case) for tree in ("chain:3", "kary:2x2") for case in [(3, 0.6), (2, 0.1)]]),
)
def test_the_text_depends_on_the_seed_alone_not_on_the_batch(models, tree, prompts, probability):
    """With 0.1 most trees of the batch are a root alone, which still has the record of a law that drew nothing."""
    results = check_batch(load(models, tree=tree, draft_probability=probability), PROMPTS[:prompts], 24)
    assert sum(r.stats.num_accepted for r in results) > 0


def test_without_a_draft_the_drafter_runs_beside_the_target(models, monkeypatch):
    """q of the root is computed in another thread, and the tree is proposed before it is there."""
    may_go, threads = threading.Event(), []
    scored = RandomisedSession._weights_after

    def slow(self, *args):
        threads.append(threading.get_ident())
        assert may_go.wait(10)
        return scored(self, *args)

    monkeypatch.setattr(RandomisedSession, "_weights_after", slow)
    session = load(models, tree="chain:2", draft_probability=0.0).drafter.open(1, 40)
    session.join()
    from foretoken.core.sequence import Sequence

    seq = Sequence([5, 6, 7], Sampling(), seeded(0), 10)
    (tree,) = session.propose([seq])
    record = tree.siblings[0]
    assert isinstance(record, PendingSiblings)
    assert record.draws == ()
    may_go.set()
    assert record.q is not None
    assert float(record.q.sum()) == pytest.approx(1, abs=1e-5)
    assert threads
    assert threads[0] != threading.get_ident()
    session.observe([seq], [tree], [(0,)])


def test_with_more_threads_they_take_turns(models, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("foretoken.models.panels.use_threads", lambda: None)
    monkeypatch.setattr("foretoken.kernel.threads.use_threads", lambda most: None)
    monkeypatch.setattr("foretoken.draft.randomised.ThreadPoolExecutor", lambda *_: pytest.fail("a thread was started"))
    result = load(models, draft_probability=0.3, tree="chain:2").generate("x", max_new_tokens=8, seed=0)
    assert len(result.token_ids) == 8


def test_a_drafter_that_fails_in_its_thread_costs_speed_only(models, monkeypatch):
    engine = load(models, tree="chain:2", draft_probability=0.0)
    monkeypatch.setattr(RandomisedSession, "_weights_after", raising(RuntimeError("broken")))
    with pytest.warns(DraftFailedWarning, match="broken"):
        result = engine.generate("x", max_new_tokens=12, seed=0)
    assert len(result.token_ids) == 12


def test_under_the_controller(models):
    engine = load(models, tree="chain:3", draft_probability=0.7, method="auto")
    assert isinstance(engine.drafter, AutoDrafter)
    check_greedy(engine, PROMPTS, 30)
    # Which tokens are drawn above temperature 0 depends on what the clock said, so that a text may end early.
    results = engine.generate(PROMPTS, max_new_tokens=30, seed=0)
    assert all(len(r.token_ids) == 30 or r.finish_reason == "stop" for r in results)
