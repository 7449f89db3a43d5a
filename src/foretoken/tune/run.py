"""The measurements behind a profile, in order: the workload's text, forwards, acceptance, overheads, the few best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretoken.bench.interleaved import Runs, Workload, interleaved
from foretoken.compare.table import Report
from foretoken.core.errors import ForetokenError
from foretoken.decode import NoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.drafters import fingerprint_of, plain, with_tree
from foretoken.engine import Engine
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint, host, versions
from foretoken.profile import PLAIN, Profile
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
from foretoken.tune.costs import NODES, PLAINLY, Configuration, ForwardCosts, StepCosts, forward_costs
from foretoken.tune.journal import Journal

Progress = Callable[[str], None]
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
BRANCHING = ("kary:2x1", "kary:2x2", "kary:2x3", "kary:3x2")
PROBES = ("chain:1", "chain:4", "chain:12", "kary:2x1", "kary:2x3")  # whose whole steps are timed before predicting
PROBE_PROMPTS = 3
MEASURED = ("tokens a step", "tokens/s", "x plain")


@dataclass(frozen=True)
class Step:
    """What is expected of a step: tokens, and nodes at depth 1, 2, .."""

    tokens: float
    widths: Sequence[float]


@dataclass(frozen=True)
class Prediction:
    configuration: Configuration
    tokens: float  # a step
    seconds: float  # a step

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def grid(engine: Engine, temperature: float) -> list[Configuration]:
    """What is predicted; of chains the default rule first, whose costs method auto takes. At temperature 0 every rule
    is exact match, so one of them will do."""
    if not has_distribution(engine):
        return [Configuration(f"chain:{d}", engine.verifier.name) for d in DEPTHS]
    chains, trees = (["block"], ["transport"]) if temperature == 0 else (["block", "rrsw"], ["transport", "hub"])
    return [
        *(Configuration(f"chain:{d}", rule) for d in DEPTHS for rule in chains if d > 1 or rule == chains[0]),
        *(Configuration(tree, rule) for tree in BRANCHING for rule in trees),
    ]


def configured(engine: Engine, configuration: Configuration) -> Engine:
    return plain(engine) if configuration == PLAINLY else with_tree(engine, configuration.tree, configuration.verifier)


def tune(
    engine: Engine, workload: Workload, best: int, rounds: int, journal: Journal, report: Report, progress: Progress
) -> Profile:
    """Fill the report; the profile of what was measured best."""
    if isinstance(engine.drafter, NoDrafter):
        raise ForetokenError("There is no drafter to tune: name one with --drafter.")
    texts = written_texts(engine, workload, journal, progress)
    configurations = grid(engine, workload.temperature)
    probes = [PLAINLY, *_probes(configurations)]
    costs = _step_costs(engine, workload, journal, progress)
    few = replace(workload, prompts=workload.prompts[:PROBE_PROMPTS])
    probed = _measure(engine, few, probes, 1, journal, progress)
    progress("predicting")
    if has_distribution(engine):
        expected, one = _forced_steps(engine, workload, texts, configurations)
    else:
        watched = [run.tokens for run in probed[probes[-1]].runs]  # of the deepest chain
        expected = {c: Step(tokens_watched(watched, len(c.most)), [float(w) for w in c.most]) for c in configurations}
        one = expected[configurations[0]].tokens - 1
    expected[PLAINLY] = Step(1.0, [])
    costs = costs.calibrated([(c.kind, expected[c].widths, runs.seconds_per_step) for c, runs in probed.items()])
    predictions = [Prediction(c, x.tokens, costs.step(c.kind, x.widths)) for c, x in expected.items()]
    predictions.sort(key=lambda x: -x.tokens_per_s)
    chosen = [x.configuration for x in predictions if x.configuration != PLAINLY][:best]
    measured = _measure(engine, workload, [PLAINLY, *chosen], rounds, journal, progress)
    winner = max(measured, key=lambda c: measured[c].tokens_per_s)
    forwards = _tables(report, costs, predictions, measured, winner)
    return Profile(
        target=fingerprint(engine.target.lm),
        drafter=fingerprint_of(engine.drafter),
        host=host(engine.target.lm),
        tree=winner.tree,
        verifier=winner.verifier,
        plain_s=costs.step(PLAIN, []),
        extra=_extra(costs),
        acceptance=one,
        versions=versions(),
        settings=dict(report.header),
        forwards=forwards,
        configurations=report.tables[-1].json()["rows"],
    )


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
        assert isinstance(engine.drafter.lm, CausalLM)
        lms["drafter"] = engine.drafter.lm
    times = journal.once("forwards", lambda: forward_costs(lms, workload.now, progress))
    typical = sum(map(len, workload.prompts)) / len(workload.prompts) + workload.max_new_tokens / 2
    drafter = ForwardCosts(**times["drafter"]) if "drafter" in times else None
    return StepCosts(ForwardCosts(**times["target"]), drafter, typical)


def _probes(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Some depths of every kind of tree and rule, the shallow ones first."""
    return [c for tree in PROBES for c in configurations if c.tree == tree]


def _measure(
    engine: Engine, workload: Workload, chosen: Sequence[Configuration], rounds: int, journal: Journal,
    progress: Progress,
) -> dict[Configuration, Runs]:  # fmt: skip
    engines = {c.name: configured(engine, c) for c in chosen}
    found = interleaved(engines, workload, rounds, progress, journal.once)
    return {c: found[c.name] for c in chosen}


def _forced_steps(
    engine: Engine, workload: Workload, texts: Sequence[list[int]], configurations: Sequence[Configuration]
) -> tuple[dict[Configuration, Step], float]:
    """(steps, acceptance of one draft); one text's distributions at a time, since they are large."""
    t = workload.temperature
    places: dict[Configuration, list[tuple[Any, Any]]] = {c: [] for c in configurations}
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


def _extra(costs: StepCosts) -> tuple[float, float, float]:
    """What a step of a chain takes beyond a plain one, in plain steps: once, a level, a node; the nearest line."""
    plain = costs.step(PLAIN, [])
    kind = next(kind for kind in costs.rest if kind.startswith("chain"))
    slope, once = np.polyfit(DEPTHS, [costs.step(kind, [1.0] * d) / plain - 1 for d in DEPTHS], 1)
    node = np.polyfit(NODES, [costs.target.at(n, costs.context) / plain for n in NODES], 1)[0]
    node = min(max(node, 0.0), slope)
    return max(0.0, float(once)), float(slope - node), float(node)


def _tables(
    report: Report, costs: StepCosts, predictions: Sequence[Prediction], measured: dict[Configuration, Runs],
    winner: Configuration,
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
        ["tree", "verifier", "tokens a step", "ms a step", "tokens/s", *(f"measured {name}" for name in MEASURED)],
        digits=2,
    )
    plain = measured[PLAINLY].tokens_per_s
    for x in predictions:
        runs = measured.get(x.configuration)
        ran = (None,) * 3 if runs is None else (runs.tokens_per_step, runs.tokens_per_s, runs.tokens_per_s / plain)
        table.add(x.configuration.tree, x.configuration.verifier, x.tokens, 1000 * x.seconds, x.tokens_per_s, *ran)
    first = predictions[0].configuration
    share = measured[first].tokens_per_s / measured[winner].tokens_per_s
    table.notes.append(f"Best measured: {winner.name}. The best predicted, {first.name}, reaches {share:.0%} of it.")
    return rows
