"""One sequence's plain step, and the scores of its tree, as one compiled call are the longer way, bit for bit."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import PreTrainedModel

import foretoken
from engines import demo_engine as load
from foretoken.cli.options import demo_folder
from foretoken.core.errors import ForetokenError, NotFiniteError
from foretoken.core.sampling import softmax
from foretoken.models import target
from foretoken.models.features import FINAL
from foretoken.models.fused_rows import FusedRows
from foretoken.models.panels import pack
from foretoken.models.rows import Rows
from foretoken.models.target import LMTargetSession
from models_zoo import tiny
from thinning import one_in

PROMPT = "def read(self, path):\n    with open("


def watched(monkeypatch: pytest.MonkeyPatch, roots: bool) -> list[bool]:
    """Grows with every tree of one sequence that is only a root, or is not, by whether one call scores it."""
    found, fused = [], LMTargetSession._fused

    def watch(self, sequence, tree):
        scores = fused(self, sequence, tree)
        if (tree.siblings[0] is None) == roots:
            found.append(scores is not None)
        return scores

    monkeypatch.setattr(LMTargetSession, "_fused", watch)
    return found


@pytest.fixture
def calls(monkeypatch) -> list[bool]:
    """Whether each plain step was taken in one call."""
    return watched(monkeypatch, roots=True)


@pytest.fixture
def trees(monkeypatch) -> list[bool]:
    """Whether each tree was scored in one call."""
    return watched(monkeypatch, roots=False)


def the_longer_way(monkeypatch) -> None:
    """Neither the target's nor the drafter's trees in one call."""
    monkeypatch.setattr(LMTargetSession, "_fused", lambda *_: None)
    monkeypatch.setattr("foretoken.models.causal_lm.FusedRows", Rows)


def check_same(engine, steps, monkeypatch, prompt=PROMPT, accepted=0, **options) -> list[int]:
    """The text, which is that of the longer way; each of some steps is taken in one call."""
    fast = engine.generate(prompt, **options)
    assert fast.stats.num_accepted >= accepted
    assert len(steps) > 3
    assert all(steps)
    the_longer_way(monkeypatch)
    slow = engine.generate(prompt, **options)
    assert (slow.token_ids, slow.stats.num_accepted) == (fast.token_ids, fast.stats.num_accepted)
    return slow.token_ids


@pytest.mark.parametrize(("temperature", "dtype"), one_in(3, product([0.0, 0.7, 1.0], ["float32", "bfloat16"])))
def test_the_text_is_the_same(temperature, dtype, calls, monkeypatch):
    engine = replace(load(dtype), eos_ids=frozenset())  # no text ends early
    options = {"max_new_tokens": 80, "temperature": temperature, "seed": 5}
    text = check_same(engine, calls, monkeypatch, **options)
    assert len(calls) == 80
    assert engine.generate([PROMPT, "import"], **options)[0].token_ids == text


@pytest.mark.parametrize(
    "option",
    [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"logit_bias": {7: -5.0}}],
    ids=lambda option: next(iter(option)),
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_more_than_a_temperature_goes_the_longer_way(option, temperature, calls):
    engine = load()
    engine.generate(PROMPT, max_new_tokens=3, temperature=temperature, seed=0, **option)
    truncates = option.keys() & {"top_k", "top_p", "min_p"}
    assert calls == [temperature == 0 and bool(truncates)] * 3  # the likeliest token is that of every truncation


def test_plain_steps_between_drafted_ones(calls):
    """As under method auto: what the target's cache holds is the same either way."""
    engine, options = load(drafter="ngram", tree="chain:3"), {"max_new_tokens": 80, "temperature": 0.0}
    drafted = engine.generate(PROMPT, **options)
    assert 0 < calls.count(True) == drafted.stats.num_plain
    assert drafted.stats.num_accepted > 0
    assert drafted.token_ids == load().generate(PROMPT, **options).token_ids


def sliding() -> PreTrainedModel:
    """A model whose tokens see the nine before them, with weights so large that what is hidden would matter."""
    model = tiny("mistral", random_weights=True, hidden_size=64, intermediate_size=64, head_dim=16)
    pack(model)
    return model


@pytest.mark.parametrize("length", [4, 8, 9, 10, 40])
def test_a_prompt_longer_than_a_sliding_window_is_the_same(length, calls, monkeypatch):
    engine = foretoken.load(sliding(), drafter="none")
    prompt, options = [i * 31 % 97 for i in range(length)], {"max_new_tokens": 12, "temperature": 0.0}
    check_same(engine, calls, monkeypatch, prompt, **options)
    assert len(calls) == 12


def test_hidden_states_are_kept_in_a_plain_step(calls):
    engine = load(drafter=str(demo_folder() / "heads" / "eagle"), tree="chain:2")
    result = engine.generate(PROMPT, max_new_tokens=1, temperature=0.0)
    assert calls == [True]
    assert result.token_ids == load().generate(PROMPT, max_new_tokens=1, temperature=0.0).token_ids


@pytest.mark.parametrize(
    ("temperature", "drafting"),
    one_in(3, product([0.0, 1.0], [{"drafter": "none"}, {"drafter": "ngram", "tree": "chain:3"}])),
)
def test_logits_that_are_not_finite_name_the_model(temperature, drafting):
    engine = foretoken.load(str(demo_folder() / "target"), dtype="float32", **drafting)
    kernel = engine.target.lm.backend
    kernel.head.norm[:] = torch.nan
    with pytest.raises(NotFiniteError, match="target gave NaN or infinite logits: check its weights"):
        engine.generate("a b c d " * 8, max_new_tokens=4, temperature=temperature, seed=0)


TREES = {
    "block": {"tree": "chain:5", "verifier": "block"},
    "rrsw": {"tree": "chain:3", "verifier": "rrsw"},
    "ends early": {"tree": "chain:8@0.3"},
    "coins": {"tree": "chain:4", "verifier": "transport", "draft_probability": 0.6},
    "opaque": {"tree": "chain:4", "law": "opaque", "verifier": "exact-match"},
    "kary": {"tree": "kary:2x3", "verifier": "rrsw"},
    "budget": {"tree": "budget:12", "verifier": "block-transport"},
    "dynamic": {"tree": "dynamic:9", "law": "opaque", "verifier": "exact-match"},
}


# The kernel depends on the dtype, the scores on the temperature: each tree has both of each, in one of two pairings, of
# which one half is fast.
PAIRED = [
    [("float32", 0.8), ("bfloat16", 0.0)],
    [("bfloat16", 0.8), ("float32", 0.0)],
    [("float32", 0.0), ("bfloat16", 0.8)],
]


@pytest.mark.parametrize(
    ("which", "dtype", "temperature"),
    one_in(4, [(which, *pair) for i, which in enumerate(TREES) for pair in PAIRED[i % 3]]),
)
def test_the_text_of_a_tree_is_the_same(which, temperature, dtype, trees, monkeypatch):
    engine = load(dtype, str(demo_folder() / "drafter"), **TREES[which])
    options = {"max_new_tokens": 60, "temperature": temperature, "seed": 2}
    text = check_same(engine, trees, monkeypatch, accepted=1, **options)
    assert engine.generate([PROMPT, "import"], **options)[0].token_ids == text


@pytest.mark.parametrize("which", ["kary", "budget", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_level_is_drafted_in_one_call(which, temperature, monkeypatch):
    engine, levels = load("float32", str(demo_folder() / "drafter"), **TREES[which]), []
    score = FusedRows.score_tree

    def counted(self, *args):
        if self._lm is engine.drafter.lm:
            levels.append(args)
        return score(self, *args)

    monkeypatch.setattr(FusedRows, "score_tree", counted)
    monkeypatch.setattr(Rows, "score", lambda *_: pytest.fail("the longer way"))
    result = engine.generate(PROMPT, max_new_tokens=40, temperature=temperature, seed=2)
    assert len(levels) > 2 * (result.stats.num_target_forwards - result.stats.num_plain)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 14])
@pytest.mark.parametrize("temperature", [0.0, 0.4])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_scores_of_a_tree(shape, length, temperature):
    lm = load("bfloat16").target.lm
    tokens, rows = [(17 * i + 3) % lm.vocab_size for i in range(length)], [lm.open(1, 64) for _ in range(2)]
    parents = [i - 1 if shape == "chain" else (i - 1) // 2 if i else -1 for i in range(length)]
    for each in rows:
        each.join()
        each.extend(0, range(100, 131))
    for path in (range((length + 1) // 2) if shape == "chain" else [0], [0]):  # then behind a part of what was scored
        for part in (slice(0, length // 2), slice(length // 2, length)):  # a tree that grows
            if not tokens[part]:
                continue
            (logits,) = rows[0].score([tokens[part]], [parents[part]])
            got = rows[1].score_tree(0, tokens[part], parents[part], temperature)
            assert torch.equal(got, softmax(logits, temperature) if temperature else logits)
        for each in rows:
            each.keep([path])


def test_what_cannot_be_scored_is_not_in_the_tree():
    lm = load().target.lm
    rows = lm.open(1, 8)
    rows.join()
    with pytest.raises(ForetokenError, match="8 slots, 0 of them taken"):
        rows.score_tree(0, [1] * 9, range(-1, 8), 1.0)
    with pytest.raises(ForetokenError, match="parents are earlier nodes"):
        rows.score_tree(0, [1, 2], [-1, 4], 1.0)
    with pytest.raises(IndexError, match="has no embedding"):
        rows.score_tree(0, [lm.vocab_size], [-1], 1.0)
    (expected,) = rows.score([[5]], [[-1]])
    rows.keep([[]])
    assert torch.equal(rows.score_tree(0, [5], [-1], 0.0), expected)


def test_of_many_nodes_only_those_looked_at_are_computed(trees, monkeypatch):
    engine = load(drafter=str(demo_folder() / "drafter"), **TREES["kary"])
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 1}
    expected = engine.generate(PROMPT, **options).token_ids
    assert all(trees)
    trees.clear()
    monkeypatch.setattr(target, "MOST_TEMPERED", 14 * 4096)
    assert engine.generate(PROMPT, **options).token_ids == expected
    assert False in trees
    trees.clear()
    load(drafter=str(demo_folder() / "drafter"), tree="chain:16").generate(PROMPT, **options)
    assert all(trees)


def test_other_samplings_are_scored_the_longer_way(trees):
    drafter = str(demo_folder() / "drafter")
    load(drafter=drafter, tree="chain:3").generate(PROMPT, max_new_tokens=6, seed=0, top_k=5)
    load(drafter=drafter, tree="kary:2x2").generate(PROMPT, max_new_tokens=6, seed=0, repetition_penalty=1.2)
    assert trees
    assert not any(trees)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", ["chain:3", "kary:2x2"])
def test_hidden_states_are_kept_while_a_tree_is_scored(tree, temperature, trees, monkeypatch):
    engine = load("bfloat16", str(demo_folder() / "heads" / "eagle"), tree=tree, verifier="rrsw")
    check_same(engine, trees, monkeypatch, accepted=1, max_new_tokens=40, temperature=temperature, seed=2)


def test_the_states_kept_by_either_way_are_the_same():
    lm, layers = load("bfloat16").target.lm, (3, FINAL, 16, 0)
    rows = [lm.open(1, 64, layers) for _ in range(2)]
    for each in rows:
        each.join()
        each.extend(0, range(100, 131))
    tokens, parents = [5, 6, 7, 8, 9], [-1, 0, 0, 1, 1]
    rows[0].score([tokens], [parents])
    rows[1].score_tree(0, tokens, parents, 1.0)
    for each in rows:
        each.keep([[0, 1, 4]])
    assert float(rows[0].features(0).float().std()) > 0
    assert torch.equal(rows[0].features(0), rows[1].features(0))


@pytest.mark.parametrize("tree", ["chain:2", "kary:2x2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_beyond_a_sliding_window_is_the_same(tree, temperature, trees, monkeypatch):
    model = sliding()
    engine = foretoken.load(model, drafter=model, tree=tree)
    options = {"max_new_tokens": 24, "temperature": temperature, "seed": 1}
    check_same(engine, trees, monkeypatch, [3, 34, 65], accepted=9, **options)


def test_a_draft_that_is_not_accepted_may_be_followed_by_nothing_finite(trees):
    """Rules that go node by node do not ask for what follows it."""
    target, drafter = (
        tiny("llama", random_weights=True, hidden_size=64, intermediate_size=72, head_dim=16, num_hidden_layers=2)
        for _ in range(2)
    )
    with torch.no_grad():
        embedding = target.model.embed_tokens.weight
        embedding[:, 0] = 0
        embedding[50, 0] = 9
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        target.lm_head.weight[7, 0] = 3e38  # which only a state behind token 50 meets
        drafter.model.embed_tokens.weight[:, 1] = 1
        drafter.model.norm.weight[:] = 1
        drafter.lm_head.weight[50] = 0
        drafter.lm_head.weight[50, 1] = 50  # it drafts that token, always
    pack(target)
    pack(drafter)
    engine = foretoken.load(target, drafter=drafter, tree="chain:2", verifier="rrsw")
    result = engine.generate([1, 2, 3], max_new_tokens=8, temperature=1.0, seed=1)
    assert len(result.token_ids) == 8
    assert 50 not in result.token_ids
    assert not all(trees)
