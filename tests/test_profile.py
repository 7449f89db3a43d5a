"""The profile that tune writes: what load makes of it, and which one is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import foretoken
import tiny
from foretoken.cli import options
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Coins
from foretoken.decode import NoDrafter
from foretoken.draft.randomised import RandomisedDrafter
from foretoken.draft.source import Source
from foretoken.heads.head import new_head
from foretoken.heads.lm import ready
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint, fingerprint_of_weights, host, versions
from foretoken.models.panels import HALVED, PanelLinear, pack
from foretoken.models.parts import parts
from foretoken.profile import FORMAT, Profile, read_profile
from foretoken.recipe import HEAD, NGRAM, PLAIN, SAME, VOCABS
from foretoken.vocab.slem import SLEMDrafter
from foretoken.vocab.source import TranslatedSource
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import vocabulary


def written(models, path: Path, tree: str, **changed) -> str:
    one, other = (CausalLM(model) for model in models)
    rule = "" if tree == PLAIN else "transport"
    profile = Profile(
        *(fingerprint(one), fingerprint(other), host(one), tree, rule, None, None, (0.0, 0.2, 0.1), 0.8),
        *(versions(), {}, []),
    )
    replace(profile, **changed).write(str(path))
    return str(path)


def test_load_takes_what_the_profile_found(models, tmp_path):
    target, drafter = models
    profile = written(models, tmp_path / "p.json", "kary:2x2")
    engine = foretoken.load(target, drafter=drafter, profile=profile)
    assert (engine.tree, engine.verifier.name) == ("kary:2x2", "transport")
    named = foretoken.load(target, drafter=drafter, profile=profile, tree="chain:2")
    assert (named.tree, named.verifier.name) == ("chain:2", "block")
    auto = foretoken.load(target, drafter=drafter, profile=profile, method="auto").drafter
    assert len(auto.experience.extra) == 3, "the profile's tree, cut where it pays"
    assert auto.clock is None
    assert auto.experience.drafts.mean == pytest.approx(0.8)
    assert auto.experience.costs_of(1).steps(2) == pytest.approx(2.0)
    plain = foretoken.load(target, drafter=drafter, profile=written(models, tmp_path / "q.json", PLAIN))
    assert (plain.drafter, plain.tree) == (NoDrafter(), PLAIN)


def test_with_a_profiles_costs_a_seed_fixes_the_text_of_method_auto(models, tmp_path):
    target, drafter = models
    profile = written(models, tmp_path / "p.json", "chain:2", extra=(0.05, 0.1, 0.02))
    prompts = [[5, 6, 7], [9, 10, 11, 12]]

    def texts(engine):
        results = engine.generate(prompts, max_new_tokens=60, seed=3)
        return [(r.token_ids, r.stats.num_drafted) for r in results]

    engines = [foretoken.load(target, drafter=drafter, profile=profile, method="auto") for _ in range(2)]
    first = texts(engines[0])
    assert first == texts(engines[0]) == texts(engines[1]), "neither time nor earlier texts decide"
    assert all(drafted > 0 for _, drafted in first)
    drafting = engines[0].drafter
    assert not drafting.experience.costs, "what a text teaches is forgotten"


@pytest.mark.parametrize(
    ("seed", "given", "method"),
    [
        (None, {}, "auto"),
        (3, {}, "fixed"),
        (3, {"profile": "p.json"}, "auto"),
        (None, {"tree": "chain:2"}, "fixed"),
        (None, {"profile": "p.json", "verifier": "rrsw"}, "fixed"),
        (3, {"method": "auto"}, "auto"),
    ],
)
def test_generate_is_auto_unless_a_seed_or_a_shape_is_asked_for(seed, given, method):
    assert options.EngineOptions(**given).named(seed)["method"] == method


def test_a_profile_tells_how_to_spell_and_whether_to_toss_coins(models, tmp_path):
    target, drafter = models
    tokenizers = {"tokenizer": tiny.tokenizer(), "drafter_tokenizer": tiny.tokenizer()}
    slem = foretoken.load(target, drafter=drafter, vocab="slem", **tokenizers)
    prints = {"verifier": "exact-match", "vocab": "slem", "drafter": slem.fingerprint}
    profile = written(models, tmp_path / "p.json", "chain:3", **prints)
    for vocab in (None, "auto", "slem"):
        engine = foretoken.load(target, drafter=drafter, profile=profile, vocab=vocab, **tokenizers)
        assert isinstance(engine.drafter, SLEMDrafter)
        assert (engine.tree, engine.verifier.name) == ("chain:3", "exact-match")
    with pytest.raises(ForetokenError, match="made for another drafter"):
        foretoken.load(target, drafter=drafter, profile=profile, vocab="tli", **tokenizers)
    coins = written(models, tmp_path / "q.json", "chain:2", verifier="randomised", draft_probability=0.3)
    engine = foretoken.load(target, drafter=drafter, profile=coins)
    assert isinstance(engine.drafter, RandomisedDrafter)
    assert (engine.drafter.law, engine.verifier.name) == (Coins(0.3), "randomised")
    auto = foretoken.load(target, drafter=drafter, profile=coins, method="auto")
    assert (auto.tree, auto.verifier.name) == ("auto, at most chain:20", "block"), "whose costs the profile has"
    assert foretoken.load(target, drafter=drafter, profile=coins, tree="chain:1").verifier.name == "block"


@pytest.mark.parametrize(
    ("changed", "given", "says"),
    [
        ({}, {"drafter": 3}, "made for another drafter: run foretoken tune for this pair"),
        ({}, {"target": 3}, "made for another target"),
        ({"processor": "Z80"}, {}, r"made with processor Z80, and here it is .*: run foretoken tune here"),
        ({"threads": "2"}, {}, "made with 2 threads, not 1: set OMP_NUM_THREADS=2, or run"),
        (None, {}, "of another version"),
    ],
)
def test_a_profile_of_other_models_or_another_machine_is_refused(models, tmp_path, changed, given, says):
    """given: seeds of other models."""
    machine = host(CausalLM(models[0]))
    assert machine["threads"] == "1"
    there = {"planet": "Mars"} if changed is None else machine | changed
    profile = written(models, tmp_path / "p.json", "chain:2", host=there)
    target, drafter = (tiny.llama(given[name]) if name in given else model
                       for name, model in zip(("target", "drafter"), models, strict=True))  # fmt: skip
    with pytest.raises(ForetokenError, match=says):
        foretoken.load(target, drafter=drafter, profile=profile)


def sources(models) -> dict[str, Source]:
    lm, v = CausalLM(models[1]), vocabulary(tiny.tokenizer())
    found = {kind: TranslatedSource(kind, 257, lm, Translation(v, v)) for kind in VOCABS}
    target = parts(CausalLM(models[0]))
    for seed in range(2):
        torch.manual_seed(seed)
        found[f"head {seed}"] = Source(HEAD, 257, ready(new_head("eagle", target), "h"))
    found["medusa"] = Source(HEAD, 257, ready(new_head("medusa", target), "m"))
    return found | {NGRAM: Source(NGRAM, 257, None), SAME: Source(SAME, 257, lm)}


def test_a_profile_of_one_source_of_drafts_is_refused_by_every_other(models, tmp_path):
    target = CausalLM(models[0])
    prints = [source.fingerprint(source.kind) for source in sources(models).values()]
    for made_for in prints:
        path = written(models, tmp_path / "p.json", "chain:2", drafter=made_for)
        profile = read_profile(path)
        for now in prints:
            if now == made_for:
                profile.check(path, target, now)
            else:
                with pytest.raises(ForetokenError, match=r"^Profile .* was made for another drafter: [^.]*\.$"):
                    profile.check(path, target, now)
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(("tree", "verifier"), [("budget:8", "block-transport"), ("chain:3", "string-rejection")])
def test_a_profile_whose_tree_or_rule_another_drafter_cannot_have_is_named(models, tmp_path, tree, verifier):
    path = written(models, tmp_path / "p.json", tree, verifier=verifier)
    for drafter in ("ngram", "auto"):
        with pytest.raises(
            ForetokenError, match=r"^Profile .* was made for another drafter: run foretoken tune for this"
        ):
            foretoken.load(models[0], drafter=drafter, profile=path, method="fixed")


def test_a_command_takes_no_more_threads_than_its_profile_was_made_with(models, tmp_path, monkeypatch):
    profile = written(models, tmp_path / "p.json", "chain:2")
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    options.spare_threads_as(read_profile(profile))
    assert torch.get_num_threads() == 2, "asked for by OMP_NUM_THREADS"
    monkeypatch.delenv("OMP_NUM_THREADS")
    options.spare_threads_as(read_profile(profile))
    assert torch.get_num_threads() == 1


WRONG = {
    "extra": [5, [1, 2], [1, 2, "3"]],
    "host": [0, {"threads": 1}],
    "tree": [None],
    "vocab": [1, "foo"],
    "acceptance": [-3, float("nan")],
    "draft_probability": [1.5, "half"],
    "versions": [[]],
    "settings": [1],
    "configurations": [[1]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_profile_with_a_wrong_type_is_refused_in_a_sentence(models, tmp_path, name, value):
    path = Path(written(models, tmp_path / "p.json", "chain:2"))
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(ForetokenError, match=rf"is damaged, its {name} cannot be: run foretoken tune again\.$"):
        read_profile(str(path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1]", "is not a profile"),
        ("{", "is not a profile"),
        ('{"a": 1}', "is not a profile"),
        (json.dumps({"format": FORMAT + 1}), "of another version"),
        (json.dumps({"format": FORMAT}), "of another version"),
        (None, "Cannot read profile"),
    ],
)
def test_what_is_no_profile_is_refused(content, says, tmp_path):
    if content is not None:
        (tmp_path / "p.json").write_text(content)
    with pytest.raises(ForetokenError, match=says):
        read_profile(str(tmp_path / "p.json"))


@pytest.mark.parametrize("rounded", [True, False])
def test_the_fingerprint_of_a_packed_model_sees_every_projection(models, rounded):
    """rounded: to bfloat16, whose panels are halved."""
    found = set()
    for changed in ("none", "layers.1.self_attn.q_proj", "layers.1.mlp.down_proj"):
        model = tiny.perturbed(models[0], 0.0, seed=0)
        for name, weight in model.named_parameters():
            if changed in name:
                weight.data += 0.5
            if rounded:
                weight.data = weight.data.bfloat16().float()
        pack(model)
        lm = CausalLM(model)
        assert any(isinstance(m, PanelLinear) and (m.form == HALVED) == rounded for m in model.modules())
        found.add(fingerprint(lm))
    assert len(found) == 3


def test_a_fingerprint_sees_shapes():
    flat = [nn.ParameterList([torch.zeros(shape)]) for shape in ((2, 3), (3, 2))]
    assert len({fingerprint_of_weights(module, "") for module in flat}) == 2
