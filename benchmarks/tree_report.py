"""Block efficiency of trees: means of a step with their errors, ratios of methods on the same prompts, and a plot."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.tree_runs import TreeRun
from foretoken.measure.plot import Line, Panel
from foretoken.measure.report import Report

NOTES = [
    "Bonus included; ±: standard error over prompts and rounds. Steps are those of the real engine.",
    "Every method continues the same prompts with the same seeds, and ratios are taken over them.",
]
PARTS = ("step", "target's forward", "drafter's", "building the tree", "deciding and the rest")


@dataclass(frozen=True, eq=False)
class Sample:
    """tokens, steps, drafted [n]: of the same prompts and rounds, in the same order, for every method."""

    tokens: np.ndarray
    steps: np.ndarray
    drafted: np.ndarray

    @property
    def efficiency(self) -> float:
        """Tokens per step, the bonus counted."""
        return float(self.tokens.sum() / self.steps.sum())

    @property
    def influence(self) -> np.ndarray:
        """Influence of each prompt and round on ln efficiency: their squares sum up to its variance."""
        n = len(self.tokens)
        raw = (self.tokens - self.efficiency * self.steps) / self.tokens.sum()
        return raw * (n / (n - 1)) ** 0.5 if n > 1 else np.full(1, np.nan)

    @property
    def error(self) -> float:
        """Standard error of `efficiency`."""
        return self.efficiency * float((self.influence**2).sum() ** 0.5)


@dataclass(frozen=True, eq=False)
class TimedSample(Sample):
    """Seconds of all runs together, as TreeRun has them."""

    wall_s: float
    target_s: float
    drafter_s: float
    own_s: float


def ratio(one: Sample, other: Sample) -> tuple[float, float]:
    """(efficiency of one over that of the other, standard error), paired by prompt and round."""
    value = one.efficiency / other.efficiency
    if len(one.tokens) != len(other.tokens):
        spread = (one.influence**2).sum() + (other.influence**2).sum()
    else:
        spread = ((one.influence - other.influence) ** 2).sum()
    return value, value * float(spread**0.5)


Place = tuple[float, int, str]  # temperature, nodes, method


def samples(runs: Sequence[TreeRun]) -> dict[Place, TimedSample]:
    """Runs of one place put together, rounds in order."""
    groups: dict[Place, list[TreeRun]] = {}
    for run in sorted(runs, key=lambda r: r.round):
        groups.setdefault((run.temperature, run.nodes, run.method), []).append(run)
    return {place: _joined(group) for place, group in groups.items()}


def _joined(group: Sequence[TreeRun]) -> TimedSample:
    tokens, steps, drafted = (
        np.concatenate([getattr(run, name) for run in group]) for name in ("tokens", "steps", "drafted")
    )
    spent = (sum(getattr(run, name) for run in group) for name in ("wall_s", "target_s", "drafter_s", "own_s"))
    return TimedSample(tokens, steps, drafted, *spent)


def tables(report: Report, found: dict[Place, TimedSample], base: str, speed: bool) -> None:
    """A table of efficiencies and one of ratios to `base` for every temperature; with `speed` one of times."""
    for temperature in sorted({place[0] for place in found}):
        here = {(n, name): sample for (t, n, name), sample in found.items() if t == temperature}
        nodes = sorted({n for n, _ in here})
        methods = list(dict.fromkeys(name for _, name in here))
        columns = ["method", *(f"{n} nodes" for n in nodes)]
        table = report.table(f"Tokens per step, temperature {temperature:g}", columns, 2)
        for name in methods:
            cells = [here.get((n, name)) for n in nodes]
            table.add(name, *(None if s is None else with_error(s.efficiency, s.error, 2) for s in cells))
        table.notes += NOTES
        drafted = report.table(f"Drafted nodes a step, temperature {temperature:g}", columns, 1)
        for name in methods:
            cells = [here.get((n, name)) for n in nodes]
            drafted.add(name, *(None if s is None else float(s.drafted.sum() / s.steps.sum()) for s in cells))
        if base in methods:
            against = report.table(f"Tokens per step over {base}'s, temperature {temperature:g}", columns, 3)
            for name in methods:
                pairs = [(here.get((n, name)), here.get((n, base))) for n in nodes]
                against.add(name, *(None if s is None or b is None else _ratio(s, b) for s, b in pairs))
        if speed:
            times = report.table(f"Tokens/s and share of building trees, temperature {temperature:g}", columns, 2)
            for name in methods:
                cells = [here.get((n, name)) for n in nodes]
                times.add(name, *(None if s is None else _speed(s) for s in cells))
            steps = report.table(f"Milliseconds of a step, temperature {temperature:g}", ["method", "nodes", *PARTS], 2)
            for (n, name), sample in sorted(here.items(), key=lambda item: (methods.index(item[0][1]), item[0][0])):
                steps.add(name, n, *_parts(sample))
            steps.notes = ["Wall clock, means of all steps. The target has read the prompt before."]


def _ratio(one: Sample, other: Sample) -> str:
    value, error = ratio(one, other)
    return with_error(value, error, 3)


def with_error(value: float, error: float, digits: int) -> str:
    """Without it where one prompt and round alone tell nothing of it."""
    return f"{value:.{digits}f}" + ("" if np.isnan(error) else f" ± {error:.{digits}f}")


def _speed(sample: TimedSample) -> str:
    return f"{sample.tokens.sum() / sample.wall_s:.0f} ({sample.own_s / sample.wall_s:.0%})"


def _parts(sample: TimedSample) -> list[float]:
    rest = sample.wall_s - sample.target_s - sample.drafter_s - sample.own_s
    spent = (sample.wall_s, sample.target_s, sample.drafter_s, sample.own_s, rest)
    return [1000 * seconds / float(sample.steps.sum()) for seconds in spent]


def panels(found: dict[Place, TimedSample]) -> list[Panel]:
    """Tokens per step against nodes, a panel per temperature; a colour per rule, a line style and marker per shape."""
    names = list(dict.fromkeys(place[2] for place in found))
    rules = list(dict.fromkeys(name.partition("+")[2] for name in names))
    shapes = list(dict.fromkeys(name.partition("+")[0] for name in names))
    styles, markers = ["-", "--", ":", "-."], "osv^Dx"
    drawn = []
    for temperature in sorted({place[0] for place in found}):
        lines = []
        for name in names:
            points = sorted((n, s) for (t, n, other), s in found.items() if (t, other) == (temperature, name))
            shape, _, rule = name.partition("+")
            look = styles[shapes.index(shape) % len(styles)], markers[shapes.index(shape)], f"C{rules.index(rule)}"
            if points:
                values = [s.efficiency for _, s in points]
                lines.append(Line(name, [n for n, _ in points], values, [s.error for _, s in points], *look))
        drawn.append(Panel(f"temperature {temperature:g}", "drafted nodes", "tokens per target forward", lines, "x"))
    return drawn
