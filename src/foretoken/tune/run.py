"""The measurements behind a profile: recipes beside plain decoding. After each prompt the faster half goes on.

This is successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943): a few prompts show which recipes are slow,
and most of the time goes to those that may be the fastest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, stdev

import numpy as np

from foretoken.build import with_recipe
from foretoken.core.policy import ShapePolicy
from foretoken.engine import Engine
from foretoken.measure.continuations import Continued, Runs, Workload, continued
from foretoken.measure.harness import Progress, rotated
from foretoken.measure.report import Report
from foretoken.measure.results import Journal
from foretoken.models.identity import fingerprint, host, versions
from foretoken.names import tree_policy
from foretoken.profile import Profile
from foretoken.recipe import PLAINLY, Recipe


@dataclass(frozen=True)
class Measured:
    """The runs of one recipe, and those of plain decoding on the same prompts in the same rounds.

    runs, plain: one per prompt, round after round.
    prompts: the number of prompts of a round.
    """

    recipe: Recipe
    runs: Runs
    plain: Runs
    prompts: int

    @property
    def x_plain(self) -> float:
        """The speed over that of plain decoding: the geometric mean over prompts."""
        return exp(fmean(self._logs))

    @property
    def error(self) -> float | None:
        """The standard error of x_plain; None after one prompt."""
        return self.x_plain * stdev(self._logs) / len(self._logs) ** 0.5 if len(self._logs) > 1 else None

    @property
    def pays(self) -> bool:
        """Whether it is faster than plain decoding by more than its error; without a gain, one of many is by chance."""
        return self.x_plain - (self.error or 0.0) > 1

    @property
    def _logs(self) -> list[float]:
        """The logarithm of the ratio of speeds for each prompt, a mean over its rounds."""
        both = zip(self.runs.runs, self.plain.runs, strict=True)
        every = [log(own.tokens_per_s / plain.tokens_per_s) for own, plain in both]
        return [fmean(every[i :: self.prompts]) for i in range(min(self.prompts, len(every)))]


def profile_of(engine: Engine, measured: Sequence[Measured], report: Report) -> Profile:
    """Add the table of all recipes to a report, and return the profile of the fastest one, which may be plain decoding.

    engine: the models, whose drafter is tuned.
    measured: what `halved` returned.
    report: the report, whose header becomes the profile's settings.
    """
    _table(report, measured)
    winner = measured[0]
    chosen = winner.recipe if winner.pays else PLAINLY
    return Profile(
        target=fingerprint(engine.target.lm),
        drafter=with_recipe(engine, winner.recipe).fingerprint,
        host=host(engine.target.lm),
        tree=chosen.tree,
        verifier=chosen.verifier or "",
        vocab=winner.recipe.vocab,
        draft_probability=chosen.draft_probability,
        extra=extra_of([x for x in measured if x.recipe.vocab == winner.recipe.vocab]),
        acceptance=next(
            x.runs.tokens_per_step - 1
            for x in measured
            if (x.recipe.tree, x.recipe.vocab, x.recipe.draft_probability) == ("chain:1", winner.recipe.vocab, None)
        ),
        versions=versions(),
        settings=dict(report.header),
        configurations=report.tables[-1].json()["rows"],
    )


def halved(
    engine: Engine,
    workload: Workload,
    tried: Sequence[Recipe],
    best: int,
    rounds: int,
    journal: Journal,
    progress: Progress,
) -> list[Measured]:
    """Measure recipes by successive halving, and return all of them, those with more runs first, then by speed.

    engine: the models, whose drafter is tuned.
    workload: the prompts to continue.
    tried: the recipes, without plain decoding.
    best: how many of them are kept to the end at least.
    rounds: how often every prompt is run.
    journal: keeps what was measured, prompt by prompt.
    progress: shows what runs.
    """
    runs: dict[Recipe, list[Continued]] = {recipe: [] for recipe in (PLAINLY, *tried)}
    left, cold = list(tried), True

    def found(recipe: Recipe) -> Measured:
        own = runs[recipe]
        plain = runs[PLAINLY][: len(own)]
        return Measured(recipe, Runs(tuple(own)), Runs(tuple(plain)), len(workload.prompts))

    for block in workload.blocks(rounds):
        turns, known = rotated([PLAINLY, *left], block.number), len(journal)
        engines = {recipe.name: with_recipe(engine, recipe) for recipe in turns}
        new = continued(engines, workload, [block], progress, journal, cold)
        cold = cold and len(journal) == known
        for recipe in turns:
            runs[recipe] += new[recipe.name].runs
        left.sort(key=lambda recipe: -found(recipe).x_plain)
        left = left[: max(best, (len(left) + 1) // 2)]
    return sorted(map(found, tried), key=lambda x: (-len(x.runs.runs), -x.x_plain))


def extra_of(measured: Sequence[Measured]) -> tuple[float, float, float]:
    """Return the time of a drafted step beyond that of a plain one, in plain steps: (per step, per level, per node).

    A line through the times of the chains, over their depth, gives the part per step and the slope, which is the sum of
    the other two: a chain has one node per level. The branching trees of a fixed shape have more nodes than levels; the
    time of those nodes says how much of the slope is per node. No part is negative.

    measured: recipes of one method between vocabularies, at least two chains among them.
    """
    chains, trees = [], []
    for x in measured:
        policy = tree_policy(x.recipe.tree)
        if isinstance(policy, ShapePolicy) and policy.floor == 0 and x.recipe.draft_probability is None:
            levels, nodes = len(policy.sizes()) - 1, policy.sizes()[-1]
            took = x.runs.seconds_per_step / x.plain.seconds_per_step - 1
            (chains if levels == nodes else trees).append((levels, nodes, took))
    slope, once = np.polyfit([levels for levels, _, _ in chains], [took for _, _, took in chains], 1).tolist()
    slope, once = max(slope, 0.0), max(once, 0.0)
    more = [(nodes - levels, took - once - slope * levels) for levels, nodes, took in trees]
    node = sum(x * y for x, y in more) / max(sum(x * x for x, _ in more), 1)
    node = min(max(node, 0.0), slope)
    return once, slope - node, node


def _table(report: Report, measured: Sequence[Measured]) -> None:
    table = report.table(
        "Recipes, after plain decoding: those that ran on most prompts first, then the fastest",
        ["tree", "verifier", "vocab", "a", "runs", "tokens per step", "ms per step", "tokens/s", "x plain", "±"],
        digits=2,
    )
    plain = measured[0].plain
    every: list[tuple[Recipe, Runs, float, float | None]] = [(x.recipe, x.runs, x.x_plain, x.error) for x in measured]
    for recipe, runs, x_plain, error in [(PLAINLY, plain, 1.0, None), *every]:
        named = recipe.tree, recipe.verifier or "", recipe.vocab, recipe.draft_probability
        ms = 1000 * runs.seconds_per_step
        table.add(*named, len(runs.runs), runs.tokens_per_step, ms, runs.tokens_per_s, x_plain, error)
    table.notes.append(
        "x plain: geometric mean over the prompts of the recipe's runs, beside plain decoding in turn, ± standard "
        "error. After each prompt the faster half goes on to the next one, so the figure of the first recipe is "
        "somewhat too high: it was chosen by it."
    )
