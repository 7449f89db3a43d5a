"""A lone sequence's budget tree in one compiled call is the tree that grows level by level, node for node."""

from dataclasses import replace

import pytest
import torch

import foretoken
from foretoken.audit import models
from foretoken.cli.options import demo_folder
from foretoken.core.laws import Hub
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree
from foretoken.decode import DraftFailedWarning
from foretoken.draft import fused
from foretoken.draft.fused import FusedTree
from foretoken.models.target import LMTarget
from foretoken.trees import budget, budget_alone

PROMPT = "def read(self, path):\n    with open("


def load(n: int = 12, dtype: str = "float32", **options) -> foretoken.Engine:
    options = {"verifier": "block-transport"} | options
    folder = demo_folder()
    drafter = str(folder / "drafter")
    return foretoken.load(
        str(folder / "target"), drafter=drafter, tree=f"budget:{n}", device="cpu", dtype=dtype, **options
    )


@pytest.fixture
def alone(answers) -> list[bool]:
    """Whether each tree asked for was grown in one call."""
    return answers(FusedTree, "grow")


def trees(engine: foretoken.Engine, sampling: Sampling, steps: int = 6) -> list[TokenTree]:
    """What is proposed for a text that goes on along the first path."""
    seq = Sequence(list(range(40, 60)), sampling, seeded(1), 60)
    session, found = engine.drafter.open(1, 400), []
    session.join()
    for kept in range(steps):
        (tree,) = session.propose([seq])
        path = [0]
        while len(path) <= kept and path[-1] in tree.parents:
            path.append(tree.parents.index(path[-1]))
        seq.commit(tree, tuple(path), 7)
        session.observe([seq], [tree], [tuple(path)])
        found.append(tree)
    return found


def hubs(tree: TokenTree) -> bool:
    return any(isinstance(s.law, Hub) for s in tree.siblings if s is not None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [4, 12, 32])
@pytest.mark.parametrize(
    ("verifier", "temperature"),
    [("block-transport", 0.3), ("block-transport", 0.8), ("transport", 0.6), ("transport", 1.0), ("transport", 1.6)],
)
def test_the_trees_are_the_same(verifier, temperature, n, dtype, alone, monkeypatch):
    engine, sampling = load(n, dtype, verifier=verifier), Sampling(temperature)
    compiled = trees(engine, sampling)
    assert alone == [not hubs(tree) for tree in compiled]
    assert sum(alone) >= 5
    if temperature >= 1 and n > 4:
        assert any(len(set(s.draws)) > 1 for tree in compiled for s in tree.siblings if s is not None)
    monkeypatch.setattr(FusedTree, "grow", lambda *_: None)
    assert_same(compiled, trees(engine, sampling))


def assert_same(found: list[TokenTree], expected: list[TokenTree]) -> None:
    for tree, plain in zip(found, expected, strict=True):
        assert (tree.tokens, tree.parents) == (plain.tokens, plain.parents)
        for a, b in zip(tree.siblings, plain.siblings, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.draws, a.law) == (b.draws, b.law)
                assert torch.equal(a.q, b.q)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_where_the_cap_on_draws_binds(n, alone, monkeypatch):
    """A policy that thinks badly of a drafter that is nearly sure draws all that it may."""
    engine, sampling = load(n), Sampling(0.7)
    policy = replace(engine.drafter.policy, mismatch=3.0)
    engine = replace(engine, drafter=replace(engine.drafter, policy=policy))
    compiled = trees(engine, sampling, 12)
    assert sum(alone) >= 8
    assert max(sum(s.law.k for s in tree.siblings if s is not None) for tree in compiled) == budget.CAP * n
    monkeypatch.setattr(FusedTree, "grow", lambda *_: None)
    assert_same(compiled, trees(engine, sampling, 12))


@pytest.mark.parametrize("verifier", ["block-transport", "transport", "kseq"])
@pytest.mark.parametrize("seed", range(3))
def test_the_text_is_the_same(seed, verifier, alone, monkeypatch):
    engine = load(16, verifier=verifier)
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": seed}
    compiled = engine.generate(PROMPT, **options)
    assert sum(alone) > 3
    monkeypatch.setattr(FusedTree, "grow", lambda *_: None)
    assert engine.generate(PROMPT, **options).token_ids == compiled.token_ids
    assert engine.generate([PROMPT, "import"], **options)[0].token_ids == compiled.token_ids


def test_hub_draws_are_made_level_by_level(alone, monkeypatch):
    for module in (budget, budget_alone):
        monkeypatch.setattr(module, "HUB_SHARE", 0.3)
    engine = load(24, verifier="transport")
    eager = replace(engine.drafter.policy, mismatch=0.5)  # thinks so badly of the drafter that it branches
    engine = replace(engine, drafter=replace(engine.drafter, policy=eager))
    found = trees(engine, Sampling(1.0))
    assert {True, False} == set(alone)
    for whole, tree in zip(alone, found, strict=True):
        assert whole != hubs(tree)
    monkeypatch.setattr(FusedTree, "grow", lambda *_: None)
    assert [tree.tokens for tree in trees(engine, Sampling(1.0))] == [tree.tokens for tree in found]


def test_too_few_uniforms_are_noticed(alone, monkeypatch):
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 0}
    expected = load(16).generate(PROMPT, **options).token_ids
    alone.clear()
    monkeypatch.setattr(fused, "UNIFORMS", 0.17)
    assert load(16).generate(PROMPT, **options).token_ids == expected
    assert {True, False} == set(alone)


@pytest.mark.parametrize(
    "option", [{"top_k": 5}, {"repetition_penalty": 1.1}, {"temperature": 0.0}], ids=lambda option: next(iter(option))
)
def test_other_samplings_go_level_by_level(option, alone):
    load().generate(PROMPT, max_new_tokens=12, seed=0, **option)
    assert alone
    assert not any(alone)


def test_other_laws_go_level_by_level(alone):
    load(law="without_replacement", verifier="rrsw").generate(PROMPT, max_new_tokens=8, seed=0)
    assert alone
    assert not any(alone)


def test_it_ends_with_the_text(alone):
    result = load(32).generate(PROMPT, max_new_tokens=2, seed=0)
    assert len(result.token_ids) == 2
    assert alone[0]
    (tree,) = trees(load(32), Sampling(1.0), 1)
    assert max(tree.depths) > 1
    seq = Sequence(list(range(40, 60)), Sampling(1.0), seeded(1), 60, max_depth=1)
    session = load(32).drafter.open(1, 400)
    session.join()
    (cut,) = session.propose([seq])
    assert max(cut.depths) == 1


def test_logits_that_are_not_finite_are_noticed(alone):
    engine = load()
    broken = replace(engine)
    broken.drafter.lm.kernel.head.norm[:] = torch.nan
    with pytest.warns(DraftFailedWarning, match="NaN or infinite logits"):
        result = broken.generate(PROMPT, max_new_tokens=6, temperature=1.0, seed=0)
    assert result.stats.num_drafted == 0
    assert not any(alone)


def test_the_audit_samples_trees_that_are_grown_alone(alone):
    engine = load(8)
    assert isinstance(engine.target, LMTarget)
    models.sample(engine.target, engine.drafter, engine.verifier, [5, 6, 7], Sampling(1.0), 40, 0)
    assert sum(alone) >= 5  # each of the 40 // ALONE has at least one tree
