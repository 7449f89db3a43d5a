"""The measurements behind a profile, in order: the workload's text, forwards, acceptance, overheads, the few best."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretoken.build import plain, usual_rule, with_recipe
from foretoken.core.errors import ForetokenError
from foretoken.decode import NoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.engine import Engine
from foretoken.measure.continuations import Runs, Workload, continued
from foretoken.measure.harness import Progress
from foretoken.measure.report import Report
from foretoken.measure.results import Journal
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint, host, versions
from foretoken.profile import Profile
from foretoken.recipe import PLAIN, PLAINLY, Recipe
from foretoken.tune.acceptance import (
    forced,
    has_distribution,
    of_one_draft,
    per_step,
    reach,
    tokens_per_step,
    tokens_watched,
    widths,
)
from foretoken.tune.costs import NODES, ForwardCosts, StepCosts, forward_costs, kind_of, most_nodes
from foretoken.tune.grid import DEPTHS, able, families, modelled, probes
from foretoken.tune.watch import Watched, watched
from foretoken.vocab.tli import IntersectionLM

PROBE_PROMPTS = 3
MEASURED = ("tokens a step", "tokens/s", "x plain")
MODEL, RUN = "model", "short run"


@dataclass(frozen=True)
class Step:
    """What is expected of a step: tokens, and nodes at depth 1, 2, .."""

    tokens: float
    widths: Sequence[float]


@dataclass(frozen=True)
class Known:
    """What is expected of steps, and the acceptance of one draft by vocab."""

    steps: dict[Recipe, Step]
    drafts: dict[str | None, float]


@dataclass(frozen=True)
class Prediction:
    """tokens, seconds: of a step. by: MODEL or RUN."""

    configuration: Recipe
    tokens: float
    seconds: float
    by: str = MODEL

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def tune(
    engine: Engine,
    workload: Workload,
    best: int,
    rounds: int,
    vocabs: list[str],
    journal: Journal,
    report: Report,
    progress: Progress,
) -> Profile:
    """Fill the report; the profile of what was measured best. vocabs: those to try of a drafter that has another
    vocabulary, none otherwise."""
    if isinstance(engine.drafter, NoDrafter):
        raise ForetokenError("There is no drafter to tune: name one with --drafter.")
    vocabs = able(engine, vocabs)
    vocab = "tli" if "tli" in vocabs else None
    speaking = engine if vocab is None else with_recipe(engine, Recipe("chain:1", vocab=vocab))  # the target's tokens
    texts = written_texts(engine, workload, journal, progress)
    configurations = modelled(speaking, vocab, workload.temperature) if vocab or not vocabs else []
    costs = _step_costs(speaking, workload, journal, progress)
    few = replace(workload, prompts=workload.prompts[:PROBE_PROMPTS])

    def run_few(some: Sequence[Recipe]) -> dict[Recipe, Runs]:
        return _measure(engine, few, some, 1, journal, progress)

    probed = run_few([PLAINLY, *probes(configurations)])
    seen = watched(families(engine, vocabs, workload.temperature), run_few, probed[PLAINLY].seconds_per_step)
    progress("predicting")
    known = _known(speaking, workload, texts, configurations, probed, seen)
    strings = [(kind_of(c), [1.0] * len(most_nodes(c)), x.seconds) for c, x in seen.items() if _is_chain(c)]
    timed = [(kind_of(c), known.steps[c].widths, runs.seconds_per_step) for c, runs in probed.items()]
    costs = costs.calibrated(timed + strings)
    predictions = [Prediction(c, x.tokens, costs.step(kind_of(c), x.widths)) for c, x in known.steps.items()]
    predictions += [Prediction(c, x.tokens, x.seconds, RUN) for c, x in seen.items()]
    predictions.sort(key=lambda x: -x.tokens_per_s)
    ranked = [x.configuration for x in predictions if x.configuration != PLAINLY]
    measured = _measure(engine, workload, [PLAINLY, *ranked[:best]], rounds, journal, progress)
    winner = max(measured, key=lambda c: measured[c].tokens_per_s)
    forwards = _tables(report, costs, predictions, measured, winner)
    vocab = (ranked[0] if winner == PLAINLY else winner).vocab
    spoken = engine if vocab is None else with_recipe(engine, Recipe("chain:1", vocab=vocab))
    rule = usual_rule(Recipe("chain:1"), vocab or engine.kind)
    return Profile(
        target=fingerprint(engine.target.lm),
        drafter=spoken.fingerprint,
        host=host(engine.target.lm),
        tree=winner.tree,
        verifier=winner.verifier or "",
        vocab=vocab,
        draft_probability=winner.draft_probability,
        plain_s=costs.step(PLAIN, []),
        extra=_extra(costs, kind_of(Recipe("chain:1", rule, vocab))),
        acceptance=known.drafts[vocab],
        versions=versions(),
        settings=dict(report.header),
        forwards=forwards,
        configurations=report.tables[-1].json()["rows"],
    )


def _known(
    engine: Engine,
    workload: Workload,
    texts: Sequence[list[int]],
    configurations: Sequence[Recipe],
    probed: Mapping[Recipe, Runs],
    seen: Mapping[Recipe, Watched],
) -> Known:
    """By teacher forcing; for a drafter without a distribution from the runs, the deepest chain's last among them."""
    steps, drafts = {PLAINLY: Step(1.0, [])}, {c.vocab: x.tokens - 1 for c, x in seen.items() if c.tree == "chain:1"}
    if has_distribution(engine):
        forced_steps, drafts[configurations[0].vocab] = _forced_steps(engine, workload, texts, configurations)
        steps |= forced_steps
    elif configurations:
        deepest = [run.tokens for run in list(probed.values())[-1].runs]
        steps |= {
            c: Step(tokens_watched(deepest, len(most_nodes(c))), [1.0] * len(most_nodes(c))) for c in configurations
        }
        drafts[None] = steps[configurations[0]].tokens - 1
    return Known(steps, drafts)


def _is_chain(c: Recipe) -> bool:
    return c.tree.startswith("chain:")


def written_texts(engine: Engine, workload: Workload, journal: Journal, progress: Progress) -> list[list[int]]:
    """The target's own continuations of the prompts."""

    def write(i: int) -> list[int]:
        progress(f"the target continues prompt {i + 1}/{len(workload.prompts)}")
        return workload.run(plain(engine), i, workload.seed + i)[1]

    return [journal.once(f"text {i + 1}", lambda i=i: write(i)) for i in range(len(workload.prompts))]


def _step_costs(engine: Engine, workload: Workload, journal: Journal, progress: Progress) -> StepCosts:
    lms = {"target": engine.target.lm}
    if has_distribution(engine):
        assert isinstance(engine.drafter, LMDrafter)
        lm = engine.drafter.lm
        assert isinstance(lm, CausalLM)
        lms["drafter"] = lm.lm if isinstance(lm, IntersectionLM) else lm
    times = journal.once("forwards", lambda: forward_costs(lms, workload.now, progress))
    typical = sum(map(len, workload.prompts)) / len(workload.prompts) + workload.max_new_tokens / 2
    drafter = ForwardCosts(**times["drafter"]) if "drafter" in times else None
    return StepCosts(ForwardCosts(**times["target"]), drafter, typical)


def _measure(
    engine: Engine, workload: Workload, chosen: Sequence[Recipe], rounds: int, journal: Journal,
    progress: Progress,
) -> dict[Recipe, Runs]:  # fmt: skip
    """Plain decoding is among the chosen. With coins the drafter has a thread of its own, whose time the wall alone
    tells: plain decoding's by both clocks puts it on the scale of the others."""

    def side_by_side(some: Sequence[Recipe], on: Workload) -> dict[Recipe, Runs]:
        engines = {c.name: with_recipe(engine, c) for c in some}
        found = continued(engines, on, rounds, progress, journal)
        return {c: found[c.name] for c in some}

    tossed = [c for c in chosen if c.draft_probability is not None]
    found = side_by_side([c for c in chosen if c not in tossed], workload)
    if tossed:
        by_wall = side_by_side([PLAINLY, *tossed], replace(workload, now=time.perf_counter))
        scale = found[PLAINLY].seconds_per_step / by_wall[PLAINLY].seconds_per_step
        found |= {c: by_wall[c].scaled(scale) for c in tossed}
    return found


def _forced_steps(
    engine: Engine, workload: Workload, texts: Sequence[list[int]], configurations: Sequence[Recipe]
) -> tuple[dict[Recipe, Step], float]:
    """(steps, acceptance of one draft); one text's distributions at a time, since they are large."""
    t = workload.temperature
    places: dict[Recipe, list[tuple[Any, Any]]] = {c: [] for c in configurations}
    one: list[float] = []
    for prompt, ids in zip(workload.prompts, texts, strict=True):
        text = forced(engine, prompt, ids, t)
        one += of_one_draft(text, t).tolist()
        for c in configurations:
            places[c].append((reach(text, c, t), widths(text, c, t)))
    found = {}
    for c, rows in places.items():
        reached, nodes = zip(*rows, strict=True)
        found[c] = Step(tokens_per_step(reached), per_step(reached, nodes).tolist())
    return found, sum(one) / len(one)


def _extra(costs: StepCosts, kind: str) -> tuple[float, float, float]:
    """What a step of a chain takes beyond a plain one, in plain steps: once, a level, a node; the nearest line."""
    plain = costs.step(PLAIN, [])
    slope, once = np.polyfit(DEPTHS, [costs.step(kind, [1.0] * d) / plain - 1 for d in DEPTHS], 1)
    node = np.polyfit(NODES, [costs.target.at(n, costs.context) / plain for n in NODES], 1)[0]
    node = min(max(node, 0.0), slope)
    return max(0.0, float(once)), float(slope - node), float(node)


def _tables(
    report: Report, costs: StepCosts, predictions: Sequence[Prediction], measured: dict[Recipe, Runs],
    winner: Recipe,
) -> list[dict[str, Any]]:  # fmt: skip
    rows = costs.target.rows("target") + (costs.drafter.rows("drafter") if costs.drafter else [])
    table = report.table("Milliseconds of a forward, by nodes", list(rows[0]), digits=2)
    for row in rows:
        table.add(*row.values())
    table = report.table("Milliseconds of a step beyond its forwards", ["tree", "depth", "ms"], digits=2)
    table.add("plain", 0, 1000 * costs.plain)
    for kind, (depths, seconds) in costs.rest.items():
        for depth, rest in zip(depths, seconds, strict=True):
            table.add(kind, depth, 1000 * rest)
    table = report.table(
        "Configurations, the best predicted first",
        [
            *("tree", "verifier", "vocab", "a", "predicted by", "tokens a step", "ms a step", "tokens/s"),
            *(f"measured {name}" for name in MEASURED),
        ],
        digits=2,
    )
    plain = measured[PLAINLY].tokens_per_s
    for x in predictions:
        c, runs = x.configuration, measured.get(x.configuration)
        ran = (None,) * 3 if runs is None else (runs.tokens_per_step, runs.tokens_per_s, runs.tokens_per_s / plain)
        named = c.tree, c.verifier or "", c.vocab, c.draft_probability
        table.add(*named, x.by, x.tokens, 1000 * x.seconds, x.tokens_per_s, *ran)
    first = predictions[0].configuration
    share = measured[first].tokens_per_s / measured[winner].tokens_per_s
    table.notes.append(
        f"Predicted by: {MODEL}, tokens by teacher forcing (or a deep chain, cut), time by forwards and overheads; "
        f"{RUN}, both on up to {PROBE_PROMPTS} prompts, beside plain decoding."
    )
    table.notes.append(f"Best measured: {winner.name}. The best predicted, {first.name}, reaches {share:.0%} of it.")
    return rows
