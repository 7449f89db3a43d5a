"""What tune expects a step to bring: against enumeration, simulation and the engine's own steps."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import foretoken
import tiny
from foretoken.audit.models import plain_logits
from foretoken.build import with_recipe
from foretoken.core.laws import IID, outcomes
from foretoken.core.sampling import Sampling
from foretoken.draft.lm import LMDrafter
from foretoken.measure.teacher_forcing import written as written_by
from foretoken.recipe import Recipe
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
