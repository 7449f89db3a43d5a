"""`foretoken tune`: its predictions where they can be known, and the profile that it writes and `load` reads."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import foretoken
import tiny
from command import Command
from foretoken.audit.models import plain_logits
from foretoken.build import check_profile, with_recipe
from foretoken.cli import options
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Coins, outcomes
from foretoken.core.sampling import Sampling
from foretoken.decode import NoDrafter
from foretoken.draft.auto import AutoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.draft.randomised import RandomisedDrafter
from foretoken.draft.source import Source
from foretoken.heads.head import new_head
from foretoken.heads.lm import ready
from foretoken.measure.continuations import Continued, Runs, Workload
from foretoken.measure.teacher_forcing import written as written_by
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint, fingerprint_of_weights, host, versions
from foretoken.models.panels import HALVED, PanelLinear, pack
from foretoken.models.parts import parts
from foretoken.profile import FORMAT, Profile, read_profile
from foretoken.recipe import HEAD, NGRAM, PLAIN, PLAINLY, SAME, VOCABS, Recipe
from foretoken.tune import grid
from foretoken.tune.acceptance import (
    Forced,
    forced,
    of_one_draft,
    per_step,
    reach,
    tokens_per_step,
    tokens_watched,
    widths,
)
from foretoken.tune.costs import ForwardCosts, StepCosts
from foretoken.tune.grid import modelled
from foretoken.tune.run import RUN, Prediction, watched
from foretoken.vocab.slem import SLEMDrafter
from foretoken.vocab.source import TranslatedSource
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import vocabulary

# Acceptance.


def constant(alpha: float, length: int, depth: int) -> torch.Tensor:
    return torch.full((length,), alpha, dtype=torch.float64).unfold(0, depth, 1).cumprod(1)


def test_tokens_of_a_step_at_a_constant_acceptance():
    assert tokens_per_step([constant(0.7, 50, 3)]) == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    assert tokens_per_step([constant(0.0, 20, 3)] * 2) == pytest.approx(1)


def test_hard_places_see_more_steps_than_easy_ones():
    """40 tokens that are all accepted, then 40 that never are: 8 steps of 5, then 40 of 1."""
    alpha = torch.tensor([1.0] * 40 + [0.0] * 44, dtype=torch.float64)
    reached = alpha.unfold(0, 4, 1).cumprod(1)
    assert tokens_per_step([reached]) == pytest.approx((8 * 5 + 41) / (8 + 41))


def test_the_renewal_process_is_what_a_simulation_does():
    rng = np.random.default_rng(0)
    alpha = rng.uniform(0.2, 1, 300)
    reached = torch.tensor(alpha).unfold(0, 3, 1).cumprod(1)
    tokens = steps = 0
    for _ in range(500):
        t = 0
        while t < len(reached):
            accepted = 0
            while accepted < 3 and rng.random() < alpha[t + accepted]:
                accepted += 1
            t, tokens, steps = t + accepted + 1, tokens + accepted + 1, steps + 1
    assert tokens_per_step([reached]) == pytest.approx(tokens / steps, rel=0.01)  # 75,000 steps


V, LENGTH = 3, 4


def random_tables(seed: int) -> tuple[Callable, Callable]:
    """Next-token distributions after every prefix."""
    rng = np.random.default_rng(seed)
    tables: dict = {}

    def row(which: int, prefix: tuple[int, ...]) -> np.ndarray:
        return tables.setdefault((which, prefix), rng.dirichlet(np.full(V, 0.7)))

    return lambda prefix: row(0, prefix), lambda prefix: row(1, prefix)


def forced_text(p, q, text: tuple[int, ...]) -> Forced:
    rows = [torch.tensor(np.array([of(text[:i]) for i in range(len(text))])) for of in (p, q)]
    return Forced(list(text), *rows)


def accepted(p, q, rule: str, floor: float, coin: float) -> np.ndarray:
    """P(more than i drafts are accepted), over every draft of the drafter's."""
    want = np.zeros(LENGTH)
    for text in itertools.product(range(V), repeat=LENGTH):
        drafted, kept = 1.0, 1.0
        for i, x in enumerate(text):
            if drafted < floor:
                break
            q_x = coin * q(text[:i])[x]
            drafted *= q_x
            ratio = p(text[:i])[x] / q_x
            kept = min(1.0, kept * ratio) if rule == "block" else kept * min(1.0, ratio)
            want[i] += drafted * kept / V ** (LENGTH - 1 - i)
    return want


@pytest.mark.parametrize(
    ("rule", "floor", "coin"),
    [("rrsw", 0.0, 1.0), ("block", 0.0, 1.0), ("rrsw", 0.3, 1.0), ("block", 0.3, 1.0), ("randomised", 0.0, 0.4)],
)
@pytest.mark.parametrize("seed", range(3))
def test_reach_averaged_over_texts_is_what_the_rule_accepts(rule, floor, coin, seed):
    """Over every text of the target's, by its probability: the same as over every draft of the drafter's. After drafts
    of which the drafter thinks less than the floor there is none; a coin takes its share of q."""
    p, q = random_tables(seed)
    end, tossed = (f"@{floor}" if floor else ""), (None if coin == 1 else coin)
    chain = Recipe(f"chain:{LENGTH}{end}", rule, draft_probability=tossed)
    mean = np.zeros(LENGTH)
    for text in itertools.product(range(V), repeat=LENGTH):
        prob = np.prod([p(text[:i])[x] for i, x in enumerate(text)])
        mean += prob * reach(forced_text(p, q, text), chain, 1.0).numpy()[0]
    want = accepted(p, q, rule, floor, coin)
    assert mean == pytest.approx(want, abs=1e-12)
    assert (want < accepted(p, q, rule, 0.0, 1.0) - 1e-3).any() == (floor > 0 or coin < 1)
    if tossed:
        drafts = widths(forced_text(p, q, (0,) * LENGTH), chain, 1.0)
        assert drafts.tolist() == [pytest.approx([0.4, 0.16, 0.064, 0.0256])]


def test_how_often_a_chain_goes_on():
    """By its own draws, of a drafter that writes the same after any text: 64,000 of them, 4 standard errors."""
    row = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    text = Forced([0] * 4002, row.expand(4002, 3), row.expand(4002, 3))
    found = widths(text, Recipe("chain:3@0.3", "block"), 1.0).mean(0)
    want = torch.tensor([1.0, 0.9, 0.36], dtype=torch.float64)  # 0.6 0.6 is 0.36; 0.6 0.3 and 0.3 0.6 are below 0.3
    error = 4 * (want * (1 - want) / 64_000).sqrt()
    assert ((found - want).abs() <= error).all(), found
    assert widths(text, Recipe("chain:3@0.3", "block"), 0.0)[0].tolist() == [1, 1, 1], "the likeliest ones"
    assert widths(text, Recipe("chain:3@0.5", "block"), 0.0)[0].tolist() == [1, 1, 0]


def test_at_temperature_0_a_draft_is_accepted_where_the_likeliest_tokens_agree():
    p = torch.eye(4, dtype=torch.float64)
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 4, dtype=torch.float64)
    text = Forced([0, 1, 2, 3], p, q)
    assert of_one_draft(text, 0.0).tolist() == [1, 0, 0, 0]
    assert reach(text, Recipe("kary:2x2", "transport"), 0.0).tolist() == [[1, 1], [1, 0], [0, 0]]


def test_repeated_draws_share_a_node():
    """Two i.i.d. draws at every node of two levels, enumerated for a drafter that writes the same after any text."""
    q = torch.tensor([0.8, 0.15, 0.05], dtype=torch.float64)
    children = [(set(draws), prob) for draws, prob in outcomes(IID(2), q)]
    level = [sum(prob * len(drawn) for drawn, prob in children)]
    level.append(sum(prob * len(drawn) * level[0] for drawn, prob in children))
    text = Forced([0, 1, 2], torch.eye(3, dtype=torch.float64), q.expand(3, 3))
    assert level[1] < 2.1, "not 4"
    for rule, t, want in (("transport", 1.0, level), ("hub", 1.0, [2, 4]), ("transport", 0.0, [2, 4])):
        found = widths(text, Recipe("kary:2x2", rule), t)
        assert found.tolist() == [pytest.approx(want, abs=1e-12)] * 2
    assert widths(text, Recipe("chain:2", "block"), 1.0).tolist() == [[1, 1]] * 2


def test_what_a_step_has_is_a_mean_over_the_steps_of_the_text():
    """A place of 40 nodes that every other step starts at, another of 10."""
    reached = torch.tensor([[1.0], [0.0], [0.0], [1.0], [1.0], [0.0]], dtype=torch.float64)
    nodes = torch.tensor([[40.0], [99.0], [10.0], [40.0], [99.0], [10.0]], dtype=torch.float64)
    assert per_step([reached], [nodes]).tolist() == [25.0]


def test_steps_of_a_deep_chain_cut_shorter():
    assert tokens_watched([(5, 1, 3, 2)], 2) == pytest.approx((3 + 1 + 3) / 3)


@pytest.fixture(scope="module")
def models():
    target = tiny.llama(0)
    return target, tiny.perturbed(target, 0.15, seed=1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_forced_distributions_are_those_of_plain_forwards(models, temperature):
    engine = foretoken.load(models[0], drafter=models[1], tokenizer=tiny.tokenizer())
    prompt, ids = [5, 6, 7], [9, 8, 11, 200, 3]
    text = forced(engine, prompt, ids, temperature)
    assert isinstance(engine.drafter, LMDrafter)
    for rows, lm, t in ((text.p, engine.target.lm, temperature), (text.q, engine.drafter.lm, temperature or 1.0)):
        logits = plain_logits(replace(engine.target, lm=lm), [prompt + ids])[0]
        want = Sampling(temperature=t)(logits[len(prompt) - 1 : -1].double())
        assert torch.allclose(rows, want, atol=1e-5)


PROMPTS = [[5, 6, 7]] * 4


@pytest.fixture(scope="module")
def target_texts(models) -> list[Forced]:
    engine = foretoken.load(models[0], drafter=models[1], tokenizer=tiny.tokenizer())
    texts = written_by(engine, PROMPTS, 200, 0.7, 0)
    return [forced(engine, prompt, ids, 0.7) for prompt, ids in zip(PROMPTS, texts, strict=True)]


@pytest.mark.parametrize(
    "configuration",
    [
        Recipe("chain:6@0.3", "block"),
        Recipe("chain:3", "randomised", draft_probability=0.6),
        Recipe("kary:2x2", "transport"),
    ],
    ids=lambda c: c.name,
)
def test_steps_of_the_engine_have_the_tokens_and_nodes_expected(models, target_texts, configuration, unchecked):
    """Within a tenth: some 300 steps say the mean of either to about 4%, the texts forced being others."""
    engine = foretoken.load(models[0], drafter=models[1], tokenizer=tiny.tokenizer())
    reached = [reach(text, configuration, 0.7) for text in target_texts]
    nodes = [widths(text, configuration, 0.7) for text in target_texts]
    endless = replace(with_recipe(engine, configuration), eos_ids=frozenset())
    runs = endless.generate(PROMPTS, max_new_tokens=200, temperature=0.7, seed=9)
    steps = sum(r.stats.num_target_forwards for r in runs)
    assert tokens_per_step(reached) == pytest.approx(sum(r.stats.num_tokens for r in runs) / steps, rel=0.1)
    assert per_step(reached, nodes).sum() == pytest.approx(sum(r.stats.num_drafted for r in runs) / steps, rel=0.1)


# Costs.


def test_forward_costs_are_lines_between_measurements():
    costs = ForwardCosts([1, 5], [100, 200], [[1.0, 2.0], [3.0, 6.0]])
    assert costs.at(3, 100) == pytest.approx(1.5)
    assert costs.at(9, 100) == pytest.approx(3.0)
    assert costs.at(1, 150) == pytest.approx(2.0)
    assert costs.at(3, 300) == pytest.approx(1.5 + 2 * 3.0)
    assert ForwardCosts([1, 5], [100], [[1.0, 2.0]]).at(3, 900) == pytest.approx(1.5)


def test_overheads_are_found_again():
    target, drafter = (ForwardCosts([1, 15], [10], [[x, 2 * x]]) for x in (10.0, 2.0))
    true = StepCosts(target, drafter, 10, 0.5, {"chain": ([1, 4, 12], [0.3, 0.9, -0.2]), "kary": ([1, 3], [0.7, 1.5])})
    probes = [
        (PLAIN, []),
        *(("chain", [1.0] * depth) for depth in (12, 1, 4)),
        *(("kary", [1.9, 3.5, 6.2][:depth]) for depth in (1, 3)),
    ]
    found = StepCosts(target, drafter, 10).calibrated([(*probe, true.step(*probe)) for probe in probes])
    assert found.plain == pytest.approx(0.5)
    for probe in [*probes, ("chain", [1.0, 1.0]), ("kary", [1.8, 3.1])]:
        assert found.step(*probe) == pytest.approx(true.step(*probe))
    maybe = [0.5, 0.25, 0.25]  # one level in all
    assert true.step("chain", maybe) == pytest.approx(target.at(2, 10) + 1.0 * 2.0 + 0.5 + 0.3)
    assert true.step("chain", [1.0, 1.0]) == pytest.approx(target.at(3, 10) + 2 * 2.0 + 0.5 + 0.5)
    assert true.step(*probes[-1]) == pytest.approx(
        target.at(12.6, 10) + 2.0 + drafter.at(1.9, 10) + drafter.at(3.5, 10) + 0.5 + 1.5
    )


# Short runs.


def test_a_family_grows_as_long_as_it_gets_faster_and_times_are_on_one_scale():
    grown, shrunk = ([Recipe(f"{kind}:{n}", "exact-match") for n in (4, 8, 16, 32)] for kind in ("dynamic", "budget"))
    speed = dict(zip(grown + shrunk, [2.0, 3.0, 2.9, 1.0, 3.0, 2.0, 9.0, 9.0], strict=True))
    asked = []

    def run(chosen):
        """Plain decoding takes 5 seconds a step, twice as long as when it was measured: all does."""
        asked.append(chosen[1:])
        return {
            c: Runs((Continued((1,), 5.0),)) if c == PLAINLY else Runs((Continued((6, 6), 24 / speed[c]),))
            for c in chosen
        }

    found = watched([grown, shrunk], run, 2.5)
    assert asked == [[grown[0], shrunk[0]], [grown[1], shrunk[1]], [grown[2]], [grown[3]]]
    assert set(found) == {Prediction(c, 6.0, 6 / speed[c], RUN) for c in (*grown, *shrunk[:2])}


# The profile.


def written(models, path: Path, tree: str, **changed) -> str:
    one, other = (CausalLM(model) for model in models)
    rule = "" if tree == PLAIN else "transport"
    profile = Profile(
        *(fingerprint(one), fingerprint(other), host(one), tree, rule, None, None, 0.01, (0.0, 0.2, 0.1), 0.8),
        *(versions(), {}, [], []),
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
    assert isinstance(auto, AutoDrafter)
    assert len(auto.experience.extra) == 3, "the profile's tree, cut where it pays"
    assert auto.clock is None
    assert auto.experience.acceptance == pytest.approx(0.8)
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
    assert isinstance(drafting, AutoDrafter)
    assert not drafting.experience.costs, "what a text teaches is forgotten"


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ((None, None), "auto"),
        ((3, None), "fixed"),
        ((3, "p.json"), "auto"),
        ((None, None, "chain:2"), "fixed"),
        ((None, "p.json", None, "rrsw"), "fixed"),
    ],
)
def test_generate_is_auto_unless_a_seed_or_a_shape_is_asked_for(given, method):
    assert options.method_for(*given) == method


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
    assert (auto.tree, auto.verifier.name) == ("auto, at most chain:12", "block"), "whose costs the profile has"
    assert foretoken.load(target, drafter=drafter, profile=coins, tree="chain:1").verifier.name == "block"


def test_a_profile_of_the_last_format_is_read(models, tmp_path):
    path = Path(written(models, tmp_path / "p.json", "kary:2x2"))
    now = json.loads(path.read_text())
    then = {name: value for name, value in now.items() if name not in ("vocab", "draft_probability")}
    path.write_text(json.dumps({**then, "format": 2}))
    assert read_profile(str(path)) == Profile(**{**now, "extra": tuple(now["extra"])})
    path.write_text(json.dumps({**then, "format": 1}))
    with pytest.raises(ForetokenError, match=r"of another version of foretoken: run foretoken tune again\.$"):
        read_profile(str(path))


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
                check_profile(profile, path, target, now)
            else:
                with pytest.raises(ForetokenError, match=r"^Profile .* was made for another drafter: [^.]*\.$"):
                    check_profile(profile, path, target, now)
    assert len(set(prints)) == len(prints)


def test_a_command_takes_no_more_threads_than_its_profile_was_made_with(models, tmp_path, monkeypatch):
    profile = written(models, tmp_path / "p.json", "chain:2")
    torch.set_num_threads(2)
    options.spare_threads_as(read_profile(profile))
    assert torch.get_num_threads() == 2, "asked for by OMP_NUM_THREADS"
    monkeypatch.delenv("OMP_NUM_THREADS")
    options.spare_threads_as(read_profile(profile))
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("extra", 5),
        ("extra", [1, 2]),
        ("extra", [1, 2, "3"]),
        ("host", 0),
        ("host", {"threads": 1}),
        ("tree", None),
        ("vocab", 1),
        ("draft_probability", 1.5),
        ("draft_probability", "half"),
        ("plain_s", "fast"),
        ("plain_s", 0),
        ("plain_s", True),
        ("acceptance", float("nan")),
        ("versions", []),
        ("settings", 1),
        ("forwards", {}),
        ("configurations", [1]),
    ],
)
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
        (json.dumps({"format": 1}), "of another version"),
        (json.dumps({"format": 2}), "of another version"),
        (None, "Cannot read profile"),
    ],
)
def test_what_is_no_profile_is_refused(content, says, tmp_path):
    if content is not None:
        (tmp_path / "p.json").write_text(content)
    with pytest.raises(ForetokenError, match=says):
        read_profile(str(tmp_path / "p.json"))


def test_a_fingerprint_is_the_models_own_and_the_same_every_time(models):
    target, drafter = models
    assert fingerprint(CausalLM(target)) == fingerprint(CausalLM(tiny.llama(0)))
    assert fingerprint(CausalLM(target)) != fingerprint(CausalLM(drafter))


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


def test_a_workload_that_measures_nothing_is_refused():
    with pytest.raises(ForetokenError, match="below 16 tokens"):
        Workload([[1]], 4, 1.0, float)
    with pytest.raises(ForetokenError, match="no prompts"):
        Workload([], 40, 1.0, float)


# The command.

SMALL = ["--prompts", 1, "--max-new-tokens", 20, "--json"]


@pytest.fixture
def run(run: Command, monkeypatch, unchecked) -> Command:
    monkeypatch.setattr("foretoken.tune.costs.ROUNDS", 1)
    monkeypatch.setattr("foretoken.tune.costs.NODES", (1, 3, 15))
    monkeypatch.setattr("foretoken.tune.grid.NODES_RUN", (4, 8))
    monkeypatch.setattr("foretoken.tune.grid.DRAFTS_RUN", (1, 4))
    monkeypatch.setattr("foretoken.tune.grid.num_cores", lambda: 1)
    return run


def test_tune_writes_a_profile_that_generate_and_bench_take(run, tmp_path):
    code, out, err = run("tune", *SMALL, "--best", 2)
    assert code == 0, err
    assert "profile written to foretoken-profile.json" in err
    assert [path.name for path in tmp_path.iterdir()] == ["foretoken-profile.json"]
    forwards, overheads, configurations = json.loads(out)["tables"]
    assert {(row["model"], row["context"]) for row in forwards["rows"]} >= {("target", 128), ("drafter", 128)}
    assert Counter(row["tree"] for row in overheads["rows"]) == {
        "plain": 1,
        "chain block": 3,
        **dict.fromkeys(("chain rrsw", "kary transport", "kary hub"), 2),
    }
    rows = {(row["tree"], row["verifier"]): row for row in configurations["rows"]}
    speeds = [row["tokens/s"] for row in configurations["rows"]]
    assert speeds == sorted(speeds, reverse=True)
    assert rows["chain:5", "block"]["tokens per step"] >= rows["chain:5", "rrsw"]["tokens per step"] - 0.2
    assert sum(row["measured tokens/s"] is not None for row in rows.values()) == 3
    assert rows[PLAIN, ""]["measured x plain"] == 1
    profile = read_profile("foretoken-profile.json")
    best = max((r for r in rows.values() if r["measured tokens/s"]), key=lambda r: r["measured tokens/s"])
    assert (profile.tree, profile.verifier) == (best["tree"], best["verifier"])
    assert 0 < profile.acceptance <= 1
    by = {(row["tree"].partition(":")[0], row["predicted by"]) for row in rows.values()}
    assert by == {
        *((kind, "model") for kind in (PLAIN, "chain", "kary")),
        ("dynamic", "short run"),
        ("budget", "short run"),
    }
    full, cut = (rows[tree, "block"] for tree in ("chain:12", "chain:12@0.4"))
    assert cut["tokens per step"] < full["tokens per step"]
    assert cut["ms a step"] < full["ms a step"]
    profiled = ("generate", "ab", "--profile", "foretoken-profile.json", "--json", "--max-new-tokens", 4)
    code, out, err = run(*profiled, "--method", "fixed")
    assert code == 0, err
    assert json.loads(out)["tree"] == profile.tree
    code, out, err = run(*profiled, "--seed", 1)
    assert code == 0, err
    assert json.loads(out)["tree"].startswith("auto, at most")
    arguments = ("--rounds", 1, "--prompts", 1, "--max-new-tokens", 4, "--temperature", 1, "--json")
    code, out, err = run("bench", "--profile", "foretoken-profile.json", *arguments)
    assert code == 0, err
    wanted = {"chain:5", "kary:2x2"} if profile.tree == PLAIN else {profile.tree}
    assert {row["method"] for row in json.loads(out)["rows"] if row["system"] == "foretoken"} == {PLAIN} | wanted
    code, _, err = run("bench", "--profile", "foretoken-profile.json", "--drafter", "ngram", *arguments)
    assert (code, "made for another drafter" in err) == (2, True)


def test_an_interrupted_tune_goes_on(run, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("foretoken.tune.run.forward_costs", interrupted)
        code, _, err = run("tune", *SMALL, "--temperature", 0)
    assert code == 130
    assert "goes on from here" in err
    assert not (tmp_path / "foretoken-profile.json").exists()
    code, out, err = run("tune", *SMALL, "--temperature", 0)
    assert code == 0, err
    assert "going on after 1 measurements" in err
    assert "replaced" not in err
    assert {row["verifier"] for row in json.loads(out)["tables"][-1]["rows"]} == {
        *("", "block", "transport", "exact-match")
    }


@pytest.mark.parametrize("other", [("--compile", "off"), "drafter", "processor"])
def test_measurements_of_something_else_are_replaced_and_it_is_said(run, demo, monkeypatch, other):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("foretoken.tune.run.forward_costs", interrupted)
    assert run("tune", *SMALL)[0] == 130
    again = ()
    if other == "drafter":
        folder = demo.parent / "other"
        tiny.save(tiny.llama(8), folder)
        monkeypatch.setattr("foretoken.cli.options.resolve_models", lambda *_: (str(demo / "target"), str(folder)))
    elif other == "processor":
        monkeypatch.setattr("foretoken.models.identity.cpu_name", lambda: "Z80")
    else:
        again = other
    monkeypatch.setattr("foretoken.tune.run._measure", interrupted)
    code, _, err = run("tune", *SMALL, *again)
    assert code == 130
    assert "foretoken-profile.json.part is of other settings, models or versions: it is replaced" in err
    assert "going on" not in err


def test_tune_watches_a_drafter_without_a_distribution(run):
    (code, out, err) = run("tune", *SMALL, "--drafter", "ngram", "--best", 1)
    assert code == 0, err
    rows = json.loads(out)["tables"][-1]["rows"]
    tokens = [row["tokens per step"] for row in sorted(rows, key=lambda row: int(row["tree"][6:] or 0))]
    assert tokens == sorted(tokens), "a deeper chain cannot bring less"
    assert read_profile("foretoken-profile.json").drafter == "ngram"


def test_tune_tosses_coins_where_drafter_and_target_have_a_core_each(run, monkeypatch):
    monkeypatch.setattr("foretoken.tune.grid.num_cores", lambda: 2)
    monkeypatch.setattr(
        "foretoken.tune.run.modelled", lambda *arguments: [c for c in modelled(*arguments) if chosen(c)]
    )

    def chosen(c: Recipe) -> bool:
        return c.draft_probability is not None or c.name in ("chain:1 block", "chain:4 block")

    code, out, err = run("tune", *SMALL, "--best", 64)  # all: which of them are best is the machine's affair
    assert code == 0, err
    rows = [row for row in json.loads(out)["tables"][-1]["rows"] if row["a"] is not None]
    assert {(row["tree"], row["a"]) for row in rows} == set(grid.TOSSED)
    assert all(row["measured tokens/s"] > 0 for row in rows)


@pytest.fixture
def strangers(demo: Path) -> Path:
    """A drafter with another vocabulary, whose best guess is often right."""
    folder = demo.parent / "stranger"
    if not folder.exists():
        tiny.save(tiny.llama(0, vocab=259), folder, extra=("ab", "de"))
    return folder


def test_tune_tries_every_way_to_draft_with_another_vocabulary(run, strangers):
    foreign = ("--drafter", strangers, "--vocab", "auto")
    code, out, err = run("tune", *SMALL, "--best", 2, *foreign)
    assert code == 0, err
    rows = json.loads(out)["tables"][-1]["rows"]
    assert {(row["vocab"], row["predicted by"]) for row in rows} == {
        (None, "model"),
        *(("tli", by) for by in ("model", "short run")),
        *((vocab, "short run") for vocab in ("slem", "slrs", "union")),
    }
    profile = read_profile("foretoken-profile.json")
    best = max((r for r in rows if r["measured tokens/s"]), key=lambda r: r["measured tokens/s"])
    assert (profile.tree, profile.verifier) == (best["tree"], best["verifier"])
    assert profile.vocab in ("tli", "slem", "slrs", "union")
    way, weights = profile.drafter.split(" ", 1)
    assert way == profile.vocab
    arguments = ("--drafter", strangers, "--profile", "foretoken-profile.json", "--json", "--max-new-tokens", 4)
    bench = ("bench", "--rounds", 1, "--prompts", 1)
    for command in (("generate", "ab", "--method", "fixed"), ("generate", "ab"), bench):
        code, out, err = run(*command, *arguments)
        assert code == 0, err
    for vocab in ("tli", "slem", "slrs", "union"):  # had plain decoding been the best
        plainly = replace(profile, tree=PLAIN, verifier="", vocab=vocab, drafter=f"{vocab} {weights}")
        plainly.write("foretoken-profile.json")
        code, out, err = run(*bench, *arguments)
        assert code == 0, (vocab, err)
    code, out, err = run("tune", *SMALL, "--best", 1, "--drafter", strangers, "--vocab", "slem", "--temperature", 0)
    assert code == 0, err
    assert {row["vocab"] for row in json.loads(out)["tables"][-1]["rows"]} == {None, "slem"}


def test_ways_that_need_common_tokens_are_left_out_where_there_are_none(models):
    engine = foretoken.load(
        models[0], drafter=models[1], vocab="slem", tokenizer=tiny.tokenizer(), drafter_tokenizer=tiny.tokenizer()
    )
    assert isinstance(engine.drafter, SLEMDrafter)
    assert grid.able(engine, ["tli", "slem", "union"]) == ["tli", "slem", "union"]
    engine.drafter.translation.__dict__["pairs"] = {}
    assert grid.able(engine, ["tli", "slem", "union"]) == ["slem"]
    assert grid.able(engine, []) == []


@pytest.mark.parametrize("name", ["nowhere/p.json", "."])
def test_a_profile_that_cannot_be_written_is_refused_before_anything_is_loaded(run, monkeypatch, name):
    monkeypatch.setattr("foretoken.cli.options.load_engine", None)
    code, out, err = run("tune", *SMALL, "--out", name)
    assert (code, out, err.startswith(f"foretoken: Cannot write {name}: ")) == (2, "", True), err


def test_tune_takes_a_workload_file_and_refuses_what_it_cannot_do(run, tmp_path):
    (tmp_path / "w.jsonl").write_text('{"prompt": "ab"}\n')
    code, _, err = run("tune", *SMALL, "--prompts", 2, "--workload", "w.jsonl")
    assert (code, "it has 1" in err) == (2, True)
    for arguments, says in (
        (("--drafter", "none"), "no drafter to tune"),
        (("--best", 0), "best is 0"),
        (("--max-new-tokens", 4), "below 16 tokens"),
        (("--max-new-tokens", 4000), "do not fit the context"),
    ):
        code, _, err = run("tune", *SMALL, *arguments)
        assert (code, says in err) == (2, True), err
