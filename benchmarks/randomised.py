"""Whether a coin before each draft pays for a pair, and which: the paper's optimum and ours, predicted and measured.

A draft adds a forward of the drafter, lambda target forwards, and a second node to the target's forward, mu more; the
paper counts the first alone. Where no draft is made drafter and target run at the same time. So, with Z(a) the mean of
sum min(p, a q) over the workload (objective.py),

    tokens/s over plain decoding's  =  (1 + Z(a)) / (1 + a (lambda + mu)).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.expand import Expand, load_expanded
from benchmarks.forwards import OurPath, Place, measure
from benchmarks.objective import OBJECTIVES, accepted, best, conditions, paper_rate, throughput
from benchmarks.pairs import LanguageModel
from foretoken.build import plain, with_recipe
from foretoken.cli import options
from foretoken.cli.measuring import chosen_prompts, encoded, names, show
from foretoken.cli.tune import digest, open_journal
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_file
from foretoken.core.limits import check_counts, check_sampling, check_seed
from foretoken.core.shapes import Float
from foretoken.engine import Engine
from foretoken.measure.continuations import Workload, continued
from foretoken.measure.harness import Progress
from foretoken.measure.machine import machine
from foretoken.measure.plot import Line, Panel, check_plot
from foretoken.measure.plot import plot as draw
from foretoken.measure.report import Report
from foretoken.measure.results import Journal
from foretoken.measure.teacher_forcing import ScoredText, drafter_lm, logits_at, written
from foretoken.models.causal_lm import CausalLM
from foretoken.recipe import Recipe

DEFAULT_PART = "foretoken-randomised.part"
GRID = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
FORWARDS = 5  # turns of each forward


@dataclass(frozen=True)
class Point:
    """At one a, the rates in tokens/s of plain decoding. accepted: of a draft, over the workload and in one context."""

    a: float
    accepted: float | None
    in_one_context: float | None
    paper: float
    predicted: float
    measured: float

    def row(self) -> list[Any]:
        return [f"{self.a:g}", self.accepted, self.paper, self.predicted, self.measured]


@dataclass(frozen=True)
class Ratios:
    """In forwards of the target at one node: draft, a forward of the drafter; node, a second node of the target's."""

    draft: float
    node: float


def randomised(
    engine: Engine, workload: Workload, rounds: int, journal: Journal, report: Report, progress: Progress
) -> list[Point]:
    """Fill the report; what the plots draw."""
    lm = drafter_lm(engine, "is no language model with the target's vocabulary")
    if workload.temperature == 0:
        raise ForetokenError("Randomised drafting wins nothing at temperature 0: give a temperature above it.")
    engines = {f"a = {a:g}": with_coins(engine, a) for a in GRID}  # refused now, not after minutes of measuring
    p, q = _distributions(engine, lm, workload, journal, progress)
    ratios = _ratios(engine, lm, workload, journal, progress)
    _optima(report, p, q, ratios)
    runs = continued(engines, workload, workload.blocks(rounds), progress, journal)
    plain = runs["a = 0"].tokens_per_s
    grid = torch.tensor(GRID, dtype=torch.float64)
    z, one = accepted(p, q, grid), accepted(p[:1], q[:1], grid)
    rates = paper_rate(grid, z, ratios.draft), throughput(grid, z, ratios.draft + ratios.node)
    points = [
        Point(
            a,
            float(z[i]) / a if a else None,
            float(one[i]) / a if a else None,
            float(rates[0][i]),
            float(rates[1][i]),
            runs[f"a = {a:g}"].tokens_per_s / plain,
        )
        for i, a in enumerate(GRID)
    ]
    columns = ["a", "acceptance of a draft", "paper's rate", "predicted x plain", "measured x plain"]
    table = report.table("By draft probability", columns)
    for point in points:
        table.add(*point.row())
    table.notes.append(f"Plain decoding, a = 0: {plain:.1f} tokens/s in the same runs.")
    return points


def with_coins(engine: Engine, a: float) -> Engine:
    """Chains of one draft, made with probability a; at 0 plain decoding, which is the same law and needs no q."""
    return plain(engine) if a == 0 else with_recipe(engine, Recipe("chain:1", draft_probability=a))


def _distributions(
    engine: Engine, lm: CausalLM, workload: Workload, journal: Journal, progress: Progress
) -> tuple[Tensor, Tensor]:
    """p and q before every token of the texts that the target writes behind the prompts."""
    new, t, v = workload.max_new_tokens, workload.temperature, engine.target.vocab_size

    def write(i: int) -> list[int]:
        progress(f"the target continues prompt {i + 1}/{len(workload.prompts)}")
        return written(engine, [workload.prompts[i]], new, t, workload.seed + i)[0]

    rows = []
    for i, prompt in enumerate(workload.prompts):
        ids, places = journal.once(f"text {i + 1}", partial(write, i)), [(0, len(prompt) - 1 + j) for j in range(new)]
        target, drafter = (logits_at(each, [[*prompt, *ids]], places, v) for each in (engine.target.lm, lm))
        rows.append(ScoredText(target, drafter).rows(t))
    return torch.cat([p for p, _ in rows]), torch.cat([q for _, q in rows])


def forward_times(lms: Mapping[str, CausalLM], context: int, workload: Workload, progress: Progress) -> dict[str, Any]:
    """Seconds of a forward of every model with one node and with two after `context` tokens: medians of turns."""
    times: dict[str, list[list[float]]] = {name: [[], []] for name in lms}
    places = [Place(nodes, context, 1) for nodes in (1, 2)]
    for turn in measure({name: OurPath(lm) for name, lm in lms.items()}, places, FORWARDS, workload.now, progress):
        times[turn.name][turn.block.place.nodes - 1].append(turn.result)
    return {name: [median(found) for found in of_nodes] for name, of_nodes in times.items()}


def _ratios(engine: Engine, lm: CausalLM, workload: Workload, journal: Journal, progress: Progress) -> Ratios:
    context = sum(map(len, workload.prompts)) // len(workload.prompts) + workload.max_new_tokens // 2
    lms = {"target": engine.target.lm, "drafter": lm}
    times = journal.once("forwards", lambda: forward_times(lms, context, workload, progress))
    (plain, two), (draft, _) = times["target"], times["drafter"]
    return Ratios(draft / plain, two / plain - 1)


def _optima(report: Report, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], ratios: Ratios) -> None:
    table = report.table(
        f"Best draft probability; lambda = {ratios.draft:.3f}, mu = {ratios.node:.3f}",
        [
            *("objective", "a draft costs", "best a", "x plain there", "x plain at a = 1"),
            *("s", "a < 1 wins iff s <", "holds", "best a by context: 10%", "50%", "90%"),
        ],
    )
    one, shares = torch.ones(1, dtype=torch.float64), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    cases = [
        ("paper", "lambda", ratios.draft),
        ("throughput", "lambda", ratios.draft),
        ("throughput", "lambda + mu", ratios.draft + ratios.node),
    ]
    for name, cost, lam in cases:
        objective = OBJECTIVES[name]
        found, c = best(p, q, lam, objective), conditions(p, q, lam)
        bound = c.paper if name == "paper" else c.corrected
        at_one = float(objective(one, accepted(p, q, one), lam)[0])
        holds = "yes" if c.under < bound else "no"
        by_context = torch.quantile(_by_context(p, q, lam, objective), shares).tolist()
        table.add(name, cost, found.a, found.value, at_one, c.under, bound, holds, *by_context)
    table.notes += [
        f"Exact, over all breakpoints p_i / q_i of {len(p)} positions of the target's own text. s: mean q-mass of the "
        "tokens with p > q.",
        "paper: the mean of tokens / time (Lemmas 4.3, 4.4). throughput: expected tokens over expected time.",
    ]


def _by_context(p: Tensor, q: Tensor, lam: float, objective: Callable[..., Tensor]) -> Float[Tensor, " n"]:
    every = [best(p[i : i + 1], q[i : i + 1], lam, objective).a for i in range(len(p))]
    return torch.tensor(every, dtype=torch.float64)


def panels(points: Sequence[Point]) -> list[Panel]:
    """Toner et al. 2025, Figures 3 and 4, for this pair: acceptance of a draft, and tokens/s, against a."""
    a = [point.a for point in points]

    def accepted_by(label: str, values: Sequence[float | None], style: str) -> Line:
        known = [(x, y) for x, y in zip(a, values, strict=True) if y is not None]
        return Line(label, [x for x, _ in known], [y for _, y in known], style=style)

    rates = [
        accepted_by("mean of the workload", [point.accepted for point in points], "-"),
        accepted_by("one context", [point.in_one_context for point in points], "--"),
    ]
    speeds = [
        Line("measured", a, [point.measured for point in points]),
        Line("predicted", a, [point.predicted for point in points], style="--", marker="s"),
        Line("paper's rate", a, [point.paper for point in points], style=":", marker="^"),
    ]
    return [
        Panel("Figure 3", "draft probability a", "acceptance of a draft", rates),
        Panel("Figure 4", "draft probability a", "tokens/s, x plain decoding", speeds),
    ]


def command(
    *,
    target: str | None = None,
    drafter: LanguageModel = None,
    cost_ratio: float | None = None,
    workload: str | None = None,
    temperature: float = 1.0,
    prompts: int = 6,
    max_new_tokens: int = 96,
    rounds: int = 1,
    expand: Expand = None,
    seed: int = 0,
    plot: str | None = None,
    part: str = DEFAULT_PART,
    markdown: bool = False,
    json_: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """The draft probability that pays (Toner et al. 2025): both optima, and tokens/s predicted and measured.

    One draft a step. Where a coin says no, drafter and target run at the same time, for which they need a core each.
    Interrupted, the same command goes on where it stopped.

    cost_ratio: Give the drafter the cost of this share of the target's parameters, at the same function.
    temperature: Temperature to tune for.
    seed: Seed of whatever is sampled.
    plot: Draw Figures 3 and 4 to this file (needs matplotlib).
    part: File that holds what is measured so far, removed when all is done.
    """
    check_counts(rounds=rounds, max_new_tokens=max_new_tokens)
    check_sampling(temperature=temperature)
    check_seed(seed)
    check_file(Path(part))
    check_plot(plot)
    texts = chosen_prompts(workload, prompts)
    options.check_models(target, drafter, dtype=dtype)

    engine = load_expanded(target, drafter, expand, seed, device, dtype, cost_ratio)
    chosen = Workload(encoded(engine, texts, max_new_tokens), max_new_tokens, temperature, time.perf_counter, seed)
    settings = {
        **names(target, drafter), "expand": expand, "cost_ratio": cost_ratio,
        "temperature": temperature, "prompts": prompts, "max_new_tokens": max_new_tokens, "rounds": rounds,
        "seed": seed, "clock": "wall", "workload": digest(texts),
    }  # fmt: skip
    report = Report("benchmarks randomised", {**machine(engine.target.lm.device), **settings})
    with open_journal(part, engine, settings) as journal:
        points = randomised(engine, chosen, rounds, journal, report, options.progress)
    journal.close()
    show(report, json_, markdown)
    if plot is not None:
        draw(panels(points), f"{settings['target']}, drafter {settings['drafter']}, temperature {temperature:g}", plot)
