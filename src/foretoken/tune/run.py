"""The measurements behind a profile, in order: the workload's text, forwards, acceptance, overheads, the few best."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretoken.build import with_recipe
from foretoken.core.errors import ForetokenError
from foretoken.decode import NoDrafter
from foretoken.engine import Engine
from foretoken.measure.continuations import Runs, Workload, continued
from foretoken.measure.harness import Progress
from foretoken.measure.report import Report
from foretoken.measure.results import Journal
from foretoken.measure.teacher_forcing import written
from foretoken.models.identity import fingerprint, host, versions
from foretoken.names import usual_rule
from foretoken.profile import Profile
from foretoken.recipe import PLAIN, PLAINLY, Recipe
from foretoken.tune.acceptance import (
    drafting_model,
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
from foretoken.vocab.tli import IntersectionLM

PROBE_PROMPTS = 3
FALLS = 0.95  # of a family's best tokens/s: below it larger members are not run
MEASURED = ("tokens per step", "tokens/s", "x plain")
MODEL, RUN = "model", "short run"


@dataclass(frozen=True)
class Step:
    """What is expected of a step: tokens, and nodes at depth 1, 2, .."""

    tokens: float
    widths: Sequence[float]


@dataclass(frozen=True)
class Prediction:
    """tokens, seconds: of a step. by: MODEL or RUN."""

    recipe: Recipe
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
    steps, drafts = _steps(speaking, workload, texts, configurations, probed)
    chains = [x for x in seen if x.recipe.tree.startswith("chain:")]
    drafts |= {x.recipe.vocab: x.tokens - 1 for x in chains if x.recipe.tree == "chain:1"}
    strings = [(kind_of(x.recipe), [1.0] * len(most_nodes(x.recipe)), x.seconds) for x in chains]
    timed = [(kind_of(c), steps[c].widths, runs.seconds_per_step) for c, runs in probed.items()]
    costs = costs.calibrated(timed + strings)
    predictions = [Prediction(c, x.tokens, costs.step(kind_of(c), x.widths)) for c, x in steps.items()]
    predictions = sorted(predictions + seen, key=lambda x: -x.tokens_per_s)
    ranked = [x.recipe for x in predictions if x.recipe != PLAINLY]
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
        acceptance=drafts[vocab],
        versions=versions(),
        settings=dict(report.header),
        forwards=forwards,
        configurations=report.tables[-1].json()["rows"],
    )


def watched(
    families: Sequence[Sequence[Recipe]],
    run: Callable[[Sequence[Recipe]], Mapping[Recipe, Runs]],
    plain_s: float,
) -> list[Prediction]:
    """Short runs of what no simple model predicts: of each family from its smallest member on, as long as it gets
    faster, or nearly.

    families: by growing size; members of equal place run side by side, with plain decoding.
    plain_s: seconds of a plain step, on whose scale all times are put.
    """
    found: list[Prediction] = []
    best: dict[int, float] = {}
    alive = list(range(len(families)))
    place = 0
    while alive := [i for i in alive if place < len(families[i])]:
        members = {i: families[i][place] for i in alive}
        runs = run([PLAINLY, *members.values()])
        scale = plain_s / runs[PLAINLY].seconds_per_step
        seen = {
            i: Prediction(c, runs[c].tokens_per_step, scale * runs[c].seconds_per_step, RUN) for i, c in members.items()
        }
        best |= {i: max(best.get(i, 0.0), x.tokens_per_s) for i, x in seen.items()}
        alive = [i for i, x in seen.items() if x.tokens_per_s >= FALLS * best[i]]
        found += seen.values()
        place += 1
    return found


def _steps(
    engine: Engine,
    workload: Workload,
    texts: Sequence[list[int]],
    configurations: Sequence[Recipe],
    probed: Mapping[Recipe, Runs],
) -> tuple[dict[Recipe, Step], dict[str | None, float]]:
    """(what is expected of steps, the acceptance of one draft by vocab): by teacher forcing; for a drafter without a
    distribution from the runs, the deepest chain's last among them."""
    steps, drafts = {PLAINLY: Step(1.0, [])}, {}
    if has_distribution(engine):
        forced_steps, drafts[configurations[0].vocab] = _forced_steps(engine, workload, texts, configurations)
        steps |= forced_steps
    elif configurations:
        deepest = [run.tokens for run in list(probed.values())[-1].runs]
        for c in configurations:
            depth = len(most_nodes(c))
            steps[c] = Step(tokens_watched(deepest, depth), [1.0] * depth)
        drafts[None] = steps[configurations[0]].tokens - 1
    return steps, drafts


def written_texts(engine: Engine, workload: Workload, journal: Journal, progress: Progress) -> list[list[int]]:
    """The target's own continuations of the prompts."""

    def write(i: int) -> list[int]:
        progress(f"the target continues prompt {i + 1}/{len(workload.prompts)}")
        prompt, seed = workload.prompts[i], workload.seed + i
        return written(engine, [prompt], workload.max_new_tokens, workload.temperature, seed)[0]

    return [journal.once(f"text {i + 1}", lambda i=i: write(i)) for i in range(len(workload.prompts))]


def _step_costs(engine: Engine, workload: Workload, journal: Journal, progress: Progress) -> StepCosts:
    lms = {"target": engine.target.lm}
    if has_distribution(engine):
        lm = drafting_model(engine)
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
            *("tree", "verifier", "vocab", "a", "predicted by", "tokens per step", "ms a step", "tokens/s"),
            *(f"measured {name}" for name in MEASURED),
        ],
        digits=2,
    )
    plain = measured[PLAINLY].tokens_per_s
    for x in predictions:
        c, runs = x.recipe, measured.get(x.recipe)
        ran = (None,) * 3 if runs is None else (runs.tokens_per_step, runs.tokens_per_s, runs.tokens_per_s / plain)
        named = c.tree, c.verifier or "", c.vocab, c.draft_probability
        table.add(*named, x.by, x.tokens, 1000 * x.seconds, x.tokens_per_s, *ran)
    first = predictions[0].recipe
    share = measured[first].tokens_per_s / measured[winner].tokens_per_s
    table.notes.append(
        f"Predicted by: {MODEL}, tokens by teacher forcing (or a deep chain, cut), time by forwards and overheads; "
        f"{RUN}, both on up to {PROBE_PROMPTS} prompts, beside plain decoding."
    )
    table.notes.append(f"Best measured: {winner.name}. The best predicted, {first.name}, reaches {share:.0%} of it.")
    return rows
