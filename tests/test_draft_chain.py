"""Chains drafted in one compiled call are those drafted level by level, bit for bit."""

import os
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foretoken
from engines import demo_engine
from foretoken import build
from foretoken.cli.options import demo_folder
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree
from foretoken.decode import DraftFailedWarning
from foretoken.draft.heads import HeadDrafter, HeadDraftSession
from foretoken.heads import lm as heads_lm
from foretoken.heads.checkpoint import save_head
from foretoken.heads.eagle import Eagle
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.lm import ready
from foretoken.heads.serial import SerialRows
from foretoken.kernel import chain
from foretoken.models import static
from foretoken.models.fused_rows import FusedRows
from foretoken.models.load import load_frozen, load_model
from foretoken.models.parts import parts
from foretoken.models.static import StaticForward
from recording import Replayed
from thinning import one_in
from watching import calls_of

PROMPT = "def read(self, path):\n    with open("
REPEATED = [7, 200, 7, 41, 7, 300, 42] * 6


# Heads of random weights are told to be useless after so many drafts, in whichever test that is.
pytestmark = pytest.mark.filterwarnings("ignore::foretoken.heads.lm.UselessHeadWarning")
# EAGLE-3 heads of random weights, one of them with a vocabulary and flags of its own, beside the trained models.
EAGLE3 = {"eagle3": (None, False), "eagle3-trimmed": (500, True)}
ROWS = {
    "drafter": FusedRows,
    "heads/eagle": SerialRows,
    "heads/gumiho": SerialRows,
    **dict.fromkeys(EAGLE3, SerialRows),
}
FOLDER = Path(os.environ["FORETOKEN_HOME"])  # which is deleted when the process ends


load_once = cache(load_model)


@cache
def folder_of(name: str) -> Path:
    if name not in EAGLE3:
        return demo_folder() / name
    target = parts(load_frozen(str(demo_folder() / "target"), torch.device("cpu"), torch.float32))
    torch.manual_seed(5)
    size, flag = EAGLE3[name]
    tokens = None if size is None else torch.randperm(target.vocab_size)[:size].sort().values
    head = Eagle3(target, replace(target.shape, width=2 * target.hidden), tokens, (), flag, flag)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 1.5 / parameter.shape[-1] ** 0.5)
    save_head(head, FOLDER / name)
    return FOLDER / name


@pytest.fixture(params=ROWS)
def name(request) -> str:
    return request.param


def load(name: str, dtype: str | None = None, **recipe) -> foretoken.Engine:
    return demo_engine(dtype, str(folder_of(name)), **recipe)


@pytest.fixture
def engine(name) -> foretoken.Engine:
    return load(name, tree="chain:6")


@pytest.fixture
def calls(name, monkeypatch) -> list[int]:
    """The levels of each compiled call."""
    levels, draft = [], ROWS[name].draft_chain

    def counted(self, row, tokens, draws, *args):
        levels.append(len(draws.u))
        return draft(self, row, tokens, draws, *args)

    monkeypatch.setattr(ROWS[name], "draft_chain", counted)
    return levels


def level_by_level(name: str, monkeypatch) -> None:
    monkeypatch.setattr(ROWS[name], "drafts_chains", lambda *_: False)


def trees(
    engine: foretoken.Engine, sampling: Sampling, ids: Seq[int] = range(40, 60), keeps: Seq[int] = range(4),
    floors: tuple[float, ...] | None = None,
) -> list[TokenTree]:  # fmt: skip
    """What is proposed for a text that goes on with so many of the draft tokens of each step."""
    seq = Sequence(list(ids), sampling, seeded(1), 40)
    seq.floors = floors
    session, found = engine.drafter.open(1, 200), []
    session.join()
    width = 192 * len(engine.drafter.feature_layers) if isinstance(engine.drafter, HeadDrafter) else 0
    states = torch.randn(60, width, generator=torch.Generator().manual_seed(2))  # as if they were the target's
    states = states.to(engine.target.lm.dtype)
    for kept in keeps:
        if isinstance(session, HeadDraftSession):
            session.learn([states[: len(seq.ids) - 1]])
        (tree,) = session.propose([seq])
        path = tuple(range(min(kept, len(tree) - 1) + 1))
        seq.commit(tree, path, 7)
        session.observe([seq], [tree], [path])
        found.append(tree)
    return found


RULES = ({"law": "iid", "verifier": "rrs"}, {"law": "without_replacement", "verifier": "rrsw"})
WAYS = ((0.0, RULES[0]), *((1.0, rule) for rule in RULES))  # at temperature 0 drafts depend on no rule
SAMPLED = [
    *((Sampling(t), {"tree": tree, **rule}) for t, rule in WAYS for tree in ("chain:6", "chain:6@0.3")),
    *((Sampling(t), {"tree": "chain:6", "dtype": "bfloat16"}) for t in (0.0, 0.8)),
    *((Sampling(0.7, *cut), {"tree": "chain:6"}) for cut in ((0, 0.8), (5,), (9, 0.9, 0.05))),  # top-k, top-p, min-p
    (Sampling(0.0, 3), {"tree": "chain:6"}),
]


@pytest.mark.parametrize(("sampling", "options"), one_in(3, SAMPLED))
def test_the_trees_are_the_same(name, sampling, options, calls, monkeypatch):
    engine = load(name, **options)
    compiled = trees(engine, sampling)
    assert calls == [6, 6, 6, 6]
    level_by_level(name, monkeypatch)
    assert "@" not in options["tree"] or any(1 < len(drawn) < 7 for drawn in compiled)
    check_same(compiled, trees(engine, sampling), sampling.temperature)
    assert len(calls) == 4


FLOORS = (0.0, 0.05, 0.1, 0.1, 0.2)
FLOORED = [
    *((Sampling(t), {"tree": "chain:6", **rule}) for t, rule in WAYS),
    *((Sampling(0.7, *cut), {"tree": "chain:6", "verifier": "exact-match"}) for cut in ((), (5,))),
    (Sampling(0.9), {"tree": "chain:6@0.15", "verifier": "exact-match"}),
]


@pytest.mark.parametrize(("sampling", "options"), one_in(2, FLOORED))
def test_the_trees_end_at_the_same_floors(name, sampling, options, calls, monkeypatch):
    engine = load(name, **options)
    compiled = trees(engine, sampling, floors=FLOORS)
    assert calls == [5, 5, 5, 5]
    level_by_level(name, monkeypatch)
    others = trees(engine, sampling, floors=FLOORS)
    check_same(compiled, others, 0.0 if "exact-match" in options.values() else sampling.temperature)
    for tree, plain in zip(compiled, others, strict=True):
        assert tree.sure == pytest.approx(plain.sure, rel=1e-5)
        assert all(tree.sure[depth] >= FLOORS[depth] for depth in range(1, len(tree) - 1))
    assert name in EAGLE3 or len({len(tree) for tree in compiled}) > 1  # those of random weights are never sure
    assert len(calls) == 4


@pytest.fixture(params=["heads/eagle", "eagle3", "eagle3-trimmed"])
def recorded(request, recording: None, monkeypatch) -> str:
    """The name of a head whose forwards are recorded."""

    def on_gpu(head: Eagle | Eagle3) -> StaticForward:
        forward = head.forward_of(request.param)
        forward.on_gpu = forward.compiling = True
        return forward

    monkeypatch.setattr(build, "load_model", load_once)
    monkeypatch.setattr(static, "LEAST_SLOTS", 8)  # so that the slots grow
    monkeypatch.setattr(heads_lm, "eagle_kernel", on_gpu)
    return request.param


def loaded(name: str, dtype: str = "float32", **recipe) -> foretoken.Engine:
    target = str(demo_folder() / "target")
    return foretoken.load(target, drafter=str(folder_of(name)), dtype=dtype, device="cpu", **recipe)


def test_recorded_levels_find_room(recorded, monkeypatch):
    """Texts of every length, so that the slots grow before a chain and for its sake alone."""
    engine = loaded(recorded, tree="chain:6")
    given = [(engine, Sampling(0.0), range(40, 40 + n), (6,)) for n in range(2, 19)]
    drawn = [trees(*each) for each in given]
    level_by_level(recorded, monkeypatch)
    for tree, each in zip(drawn, given, strict=True):
        check_same(tree, trees(*each), 0.0)


def test_recorded_levels_go_on_plainly_after_a_wrong_one(recorded, monkeypatch):
    """A forward that is found wrong when it is recorded in the middle of a chain is not used again."""
    with monkeypatch.context() as patch:
        level_by_level(recorded, patch)
        want = trees(loaded(recorded, tree="chain:6"), Sampling(0.0))
    engine = loaded(recorded, tree="chain:6")
    given = Replayed.__call__

    def wrong(self, inputs):
        out = given(self, inputs)
        return tuple(x + 100 * torch.randn_like(x) for x in out) if inputs[0].shape[-1] == 1 else out

    monkeypatch.setattr(Replayed, "__call__", wrong)
    with pytest.warns(UserWarning, match="its logits are wrong") as told:
        check_same(trees(engine, Sampling(0.0)), want, 0.0)
    assert len(told) == 1


WITH_FLOORS = [*((*case, None) for case in SAMPLED), *((*case, FLOORS) for case in FLOORED)]


@pytest.mark.parametrize(("sampling", "options", "floors"), one_in(3, WITH_FLOORS))
def test_recorded_levels_are_those_drafted_one_by_one(recorded, sampling, options, floors, monkeypatch):
    calls = calls_of(monkeypatch, SerialRows, "_recorded")
    engine = loaded(recorded, **options)
    drawn = trees(engine, sampling, floors=floors)
    assert len(calls) == 4
    level_by_level(recorded, monkeypatch)
    others = trees(engine, sampling, floors=floors)
    assert len(calls) == 4
    check_same(drawn, others, 0.0 if "exact-match" in options.values() else sampling.temperature)
    for tree, plain in zip(drawn, others, strict=True):
        assert (tree.sure is None) == (plain.sure is None) == (floors is None)
        assert tree.sure is None or tree.sure == pytest.approx(plain.sure, rel=1e-5)


def check_same(compiled: list[TokenTree], others: list[TokenTree], temperature: float) -> None:
    """The same tokens and, above temperature 0, the same q, bit for bit."""
    for tree, plain in zip(compiled, others, strict=True):
        assert (tree.tokens, tree.parents) == (plain.tokens, plain.parents)
        for a, b in zip(tree.siblings, plain.siblings, strict=True):
            if a is None or b is None:
                assert a is b
                continue
            assert (a.draws, a.law) == (b.draws, b.law)
            assert (a.q is None) == (b.q is None) == (temperature == 0)
            assert a.q is None or b.q is None or torch.equal(a.q, b.q)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_guesses_save_forwards_and_change_no_bit(temperature, dtype, monkeypatch):
    """On a text that repeats itself, also behind a whole chain, whose last token was not read yet."""
    engine, sampling, done, real = load("drafter", dtype, tree="chain:9"), Sampling(temperature), [], chain.draft_chain

    def counted(*given):
        done.append((*real(*given), len(given[1].tokens)))
        return done[-1][:2]

    monkeypatch.setattr(chain, "draft_chain", counted)
    given = engine, sampling, REPEATED, (9, 0, 9, 2, 9, 1)
    compiled = trees(*given)
    levels, forwards, unread = zip(*done, strict=True)
    assert sum(forwards) < sum(levels)
    assert unread[1] == 2
    level_by_level("drafter", monkeypatch)
    check_same(compiled, trees(*given), temperature)
    assert len(done) == 6


def longest_match(text: list[int], count: int) -> list[int]:
    """What follows the latest of the longest earlier matches of a text's end, which at most COMPARED tokens make."""
    for n in range(min(chain.COMPARED, len(text)), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                ahead = list(text)
                for i in range(count):
                    ahead.append(ahead[end + i])
                return ahead[len(text) :]
    return []


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 6))
def test_what_is_looked_up_follows_the_longest_match(text, count):
    guesses = np.full(count, -1)
    found = chain.look_up(np.array([*text, 7, 7]), len(text), guesses)  # the last two are not known yet
    assert (guesses.tolist() if found else []) == longest_match(text, count)


@pytest.mark.parametrize("options", [{}, {"logit_bias": {7: 1.0}}, {"repetition_penalty": 1.1}])
def test_other_samplings_go_level_by_level(engine, calls, options):
    engine.generate(PROMPT, max_new_tokens=8, seed=0, **options)
    assert bool(calls) == (not options)


@pytest.mark.parametrize("name", ["drafter"], indirect=True)
def test_a_batch_and_a_wider_tree_go_level_by_level(name, engine, calls):
    session = engine.drafter.open(2, 40)
    sequences = [Sequence([40, 41], Sampling(), seeded(i), 20) for i in range(2)]
    for _ in sequences:
        session.join()
    assert [len(tree) for tree in session.propose(sequences)] == [7, 7]
    load(name, tree="kary:2x3").generate(PROMPT, max_new_tokens=8, seed=0)
    assert all(levels == 1 for levels in calls)  # a plain step of the target's, where one token is left to write


@pytest.mark.parametrize("name", ["drafter", "heads/eagle"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_without_finite_logits_is_given_up(name, temperature):
    if name == "drafter":
        engine = foretoken.load(str(demo_folder() / "target"), drafter=str(demo_folder() / "drafter"), tree="chain:6")
        engine.drafter.lm.backend.head.norm[:] = torch.nan
    else:
        engine = load(name, tree="chain:6")
        head = deepcopy(engine.drafter.lm.head)
        torch.nn.init.constant_(head.layers[0].post_attention_layernorm.weight, float("nan"))
        engine = replace(engine, drafter=replace(engine.drafter, lm=ready(head, "broken")))
    with pytest.warns(DraftFailedWarning, match="NaN or infinite logits"):
        result = engine.generate(PROMPT, max_new_tokens=6, temperature=temperature, seed=0)
    assert result.stats.num_drafted == 0


@pytest.mark.parametrize("name", ["drafter"], indirect=True)
def test_a_sequence_with_logits_of_its_own_goes_level_by_level(engine, calls):
    class Shaped(Sequence):
        shapes_logits = True

    session = engine.drafter.open(1, 40)
    session.join()
    (tree,) = session.propose([Shaped([40, 41], Sampling(), seeded(1), 20)])
    assert len(tree) == 7
    assert not calls


HEAD_TREES = {
    "kary": {"tree": "kary:2x3", "verifier": "rrsw"},
    "budget": {"tree": "budget:12", "verifier": "block-transport"},
    "dynamic": {"tree": "dynamic:9", "law": "opaque", "verifier": "exact-match"},
}


@pytest.mark.parametrize(
    ("which", "name", "temperature"), one_in(5, product(HEAD_TREES, EAGLE3, [0.0, 0.8])), indirect=["name"]
)
def test_trees_of_heads_are_the_same_in_a_batch(name, which, temperature, calls, monkeypatch):
    """Level by level through the kernel, not the torch modules."""
    monkeypatch.setattr(Eagle3, "step", lambda *_: pytest.fail("the torch module"))
    engine = load(name, **HEAD_TREES[which])
    options = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    alone = engine.generate(PROMPT, **options)
    assert alone.stats.num_drafted > 3 * alone.stats.num_target_forwards
    assert not calls
    assert engine.generate([PROMPT, "import"], **options)[0].token_ids == alone.token_ids
    if temperature == 0:
        plain = foretoken.load(str(demo_folder() / "target"), drafter="none", device="cpu")
        assert alone.token_ids == plain.generate(PROMPT, **options).token_ids


@pytest.mark.parametrize("tree", ["chain:4", "kary:2x2"])
@pytest.mark.parametrize("option", [{}, {"top_p": 0.9}, {"repetition_penalty": 1.3}], ids=str)
def test_the_q_of_a_trimmed_vocabulary_is_zero_elsewhere(tree, option):
    """And it is the one that the head's scores over the target's vocabulary give."""
    engine = load("eagle3-trimmed", tree=tree, verifier="rrsw")
    columns = engine.drafter.lm.head.columns
    sampling, states = Sampling(0.8, **option), torch.randn(60, 576, generator=torch.Generator().manual_seed(2))
    seq = Sequence(list(range(40, 60)), sampling, seeded(1), 40)
    session = engine.drafter.open(1, 60)
    session.join()
    session.learn([states[:19]])
    (drafted,) = session.propose([seq])
    rows = engine.drafter.lm.open(1, 60)
    rows.join()
    rows.learn([states[:19]])
    scores = [rows.score([seq.ids[1:]], [range(-1, 18)])[0][-1]]
    for token, parent in zip(drafted.tokens[1:], drafted.parents[1:], strict=True):  # each on its parent's state
        scores.append(rows.score([[token]], [[18 + parent]])[0][0])
    for node, record in enumerate(drafted.siblings):
        if record is None:
            continue
        assert set(record.q.nonzero().flatten().tolist()) <= set(columns.tolist())
        assert set(record.draws) <= set(columns.tolist())
        prefix = seq.ids + [drafted.tokens[i] for i in drafted.path_to(node)[1:]]
        (wanted,) = sampling(scores[node][None], [prefix], 20)
        torch.testing.assert_close(record.q, wanted, rtol=1e-5, atol=1e-7)
