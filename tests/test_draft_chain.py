"""Chains drafted in one compiled call are those drafted level by level, bit for bit."""

from dataclasses import replace

import pytest
import torch

import foretoken
from foretoken.cli.options import demo_folder
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree
from foretoken.decode import DraftFailedWarning
from foretoken.draft.heads import HeadDrafter, HeadDraftSession
from foretoken.heads.lm import ready
from foretoken.heads.serial import Eagle
from foretoken.heads.serial_rows import SerialRows
from foretoken.models.rows import Rows

PROMPT = "def read(self, path):\n    with open("


ROWS = {"drafter": Rows, "heads/eagle": SerialRows, "heads/gumiho": SerialRows}


@pytest.fixture(params=ROWS)
def name(request) -> str:
    return request.param


def load(name: str, **options) -> foretoken.Engine:
    folder = demo_folder()
    return foretoken.load(str(folder / "target"), drafter=str(folder / name), device="cpu", **options)


@pytest.fixture
def engine(name) -> foretoken.Engine:
    return load(name, tree="chain:6")


@pytest.fixture
def calls(name, monkeypatch) -> list[int]:
    """The levels of each compiled call."""
    levels, draft = [], ROWS[name].draft_chain

    def counted(self, row, tokens, u, temperature, floor=0.0):
        levels.append(len(u))
        return draft(self, row, tokens, u, temperature, floor)

    monkeypatch.setattr(ROWS[name], "draft_chain", counted)
    return levels


def level_by_level(name: str, monkeypatch) -> None:
    monkeypatch.setattr(ROWS[name], "drafts_chains", lambda *_: False)


def trees(engine: foretoken.Engine, sampling: Sampling, steps: int = 4) -> list[TokenTree]:
    """What is proposed for a text that goes on with whatever was drafted first."""
    ids = list(range(40, 60))
    seq = Sequence(ids, sampling, torch.Generator().manual_seed(1), 40)
    session, found = engine.drafter.open(1, 200), []
    session.join()
    states = torch.randn(60, 192, generator=torch.Generator().manual_seed(2))  # as if they were the target's
    for kept in range(steps):
        if isinstance(session, HeadDraftSession):
            session.learn([states[: len(seq.ids) - 1]])
        (tree,) = session.propose([seq])
        path = tuple(range(min(kept, len(tree) - 1) + 1))
        seq.commit(tree, path, 7)
        session.observe([seq], [tree], [path])
        found.append(tree)
    return found


@pytest.mark.parametrize("tree", ["chain:6", "chain:6@0.3"])
@pytest.mark.parametrize("law", ["iid", "without_replacement"])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_the_trees_are_the_same(name, law, temperature, tree, calls, monkeypatch):
    check_trees(name, temperature, tree, calls, monkeypatch, law=law, verifier="rrs" if law == "iid" else "rrsw")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_trees_are_the_same_in_bfloat16(name, temperature, calls, monkeypatch):
    check_trees(name, temperature, "chain:6", calls, monkeypatch, dtype="bfloat16")


def check_trees(name, temperature, tree, calls, monkeypatch, **options):
    engine, sampling = load(name, tree=tree, **options), Sampling(temperature)
    compiled = trees(engine, sampling)
    assert calls == [6, 6, 6, 6]
    level_by_level(name, monkeypatch)
    assert "@" not in tree or any(1 < len(drawn) < 7 for drawn in compiled)
    for tree, plain in zip(compiled, trees(engine, sampling), strict=True):
        assert (tree.tokens, tree.parents) == (plain.tokens, plain.parents)
        for a, b in zip(tree.siblings, plain.siblings, strict=True):
            if a is None or b is None:
                assert a is b
                continue
            assert (a.draws, a.law) == (b.draws, b.law)
            assert (a.q is None) == (b.q is None) == (temperature == 0)
            assert a.q is None or b.q is None or torch.equal(a.q, b.q)
    assert len(calls) == 4


@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 3}])
def test_the_text_is_the_same(name, sampling, engine, calls, monkeypatch):
    options = {"max_new_tokens": 60, "seed": 3, **sampling}
    compiled = engine.generate(PROMPT, **options)
    assert calls
    level_by_level(name, monkeypatch)
    assert engine.generate(PROMPT, **options).token_ids == compiled.token_ids


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.9}, {"repetition_penalty": 1.1}])
def test_other_samplings_go_level_by_level(engine, calls, options):
    engine.generate(PROMPT, max_new_tokens=8, seed=0, **options)
    assert not calls


@pytest.mark.parametrize("name", ["drafter"], indirect=True)
def test_a_batch_and_a_wider_tree_go_level_by_level(name, engine, calls):
    session = engine.drafter.open(2, 40)
    sequences = [Sequence([40, 41], Sampling(), torch.Generator().manual_seed(i), 20) for i in range(2)]
    for _ in sequences:
        session.join()
    assert [len(tree) for tree in session.propose(sequences)] == [7, 7]
    load(name, tree="kary:2x3").generate(PROMPT, max_new_tokens=8, seed=0)
    assert all(levels == 1 for levels in calls)  # a plain step of the target's, where one token is left to write


@pytest.mark.parametrize("name", ["drafter"], indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_without_finite_logits_is_given_up(engine, temperature):
    engine.drafter.lm.kernel.norm[:] = torch.nan
    with pytest.warns(DraftFailedWarning, match="NaN or infinite logits"):
        result = engine.generate(PROMPT, max_new_tokens=6, temperature=temperature, seed=0)
    assert result.stats.num_drafted == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_without_finite_logits_is_given_up(temperature):
    engine = load("heads/eagle", tree="chain:6")
    drafter = engine.drafter
    assert isinstance(drafter, HeadDrafter)
    head = drafter.lm.head
    assert isinstance(head, Eagle)
    torch.nn.init.constant_(head.layers[0].post_attention_layernorm.weight, float("nan"))
    broken = replace(engine, drafter=replace(drafter, lm=ready(head, "broken")))
    with pytest.warns(DraftFailedWarning, match="NaN or infinite logits"):
        result = broken.generate(PROMPT, max_new_tokens=6, temperature=temperature, seed=0)
    assert result.stats.num_drafted == 0


@pytest.mark.parametrize("name", ["drafter"], indirect=True)
def test_a_sequence_with_logits_of_its_own_goes_level_by_level(engine, calls):
    class Shaped(Sequence):
        shapes_logits = True

    session = engine.drafter.open(1, 40)
    session.join()
    (tree,) = session.propose([Shaped([40, 41], Sampling(), torch.Generator().manual_seed(1), 20)])
    assert len(tree) == 7
    assert not calls
