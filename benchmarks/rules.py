"""`python -m benchmarks rules`: every rule and bound at every number of drafts and temperature.

On a real pair of models, on toy distributions, or by time alone.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.contenders import SAMPLED, Acceptance, Contender, all_rules, any_size
from benchmarks.exactly import Outcome, enumerated
from benchmarks.execution import numbers
from benchmarks.pairs import LanguageModel, Positions, Text, check_score, score, toy_rows, truncate
from benchmarks.speed import measure_speed
from foretoken.cli import options
from foretoken.cli.measuring import names, show
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Law
from foretoken.core.limits import MOST_DRAWS, check_counts, check_seed
from foretoken.measure.child_acceptance import draw as draws_of
from foretoken.measure.child_acceptance import siblings
from foretoken.measure.harness import Progress
from foretoken.measure.machine import machine
from foretoken.measure.plot import Line, Panel, check_plot
from foretoken.measure.plot import plot as draw
from foretoken.measure.report import Cell, Report, Table
from foretoken.measure.teacher_forcing import ScoredText

TUPLES = 400  # draws enumerated at a pair, at most
MOST_TOY_TOKENS, LEAST_TOY_TOKENS = 20, 4
TOY_PAIRS, TIMED_PAIRS, ENUMERATED_PAIRS = 5, 24, 2
SIMILARITIES = (0.7, 0.5)
CELL_SECONDS = 5.0  # of --speed
DEFAULT_DRAWS = "1,2,3,4,8"
DEFAULT_TEMPERATURES = "1,0.6,0.3"


@dataclass(frozen=True)
class Settings:
    """draws: the numbers k that are compared."""

    draws: tuple[int, ...]
    temperatures: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        if not self.draws or min(self.draws) < 1:
            raise ForetokenError(f"draws is {list(self.draws)}: give numbers >= 1.")
        if not self.temperatures or not all(0 < t < float("inf") for t in self.temperatures):
            raise ForetokenError(
                f"temperature is {list(self.temperatures)}: give finite numbers > 0 (at 0 every rule is exact match)."
            )


def measure_pair(report: Report, scored: ScoredText, settings: Settings, progress: Progress) -> None:
    """Acceptance at every temperature; then time and deviation at the first one."""
    contenders = any_size()
    ks = [f"k={k}" for k in settings.draws]
    num_pairs, v = scored.target.shape
    for temperature in settings.temperatures:
        p, q = scored.rows(temperature)
        table = report.table(f"Acceptance, temperature {temperature:g}", ["rule", "law", *ks])
        errors: dict[str, float] = {}  # of what was sampled
        for contender in contenders:
            progress(f"temperature {temperature:g}: {contender.name}")
            cells: list[Cell] = []
            for k in settings.draws:
                found = _acceptance(table, contender, p, q, k, settings.seed)
                cells.append(None if found is None else found.mean)
                if found is not None and found.error is not None:
                    errors[contender.name] = max(found.error, errors.get(contender.name, 0.0))
            table.add(contender.name, contender.law_name, *cells)
        table.notes.append(f"P(a draft is accepted), mean over {num_pairs} positions, {v} tokens; without sampling.")
        if errors:
            table.notes.append(
                f"But {', '.join(errors)}: {SAMPLED} sampled draws a position, standard error up to "
                f"{max(errors.values()):.4f}."
            )
    p, q = scored.rows(settings.temperatures[0])
    _times(report, p, q, settings, progress)
    _deviations(report, p, q, settings, progress)


def _acceptance(table: Table, contender: Contender, p: Tensor, q: Tensor, k: int, seed: int) -> Acceptance | None:
    """None also for an optimum that nobody can compute at this size; a note then says so."""
    try:
        return contender.acceptance(p, q, k, seed)
    except ForetokenError as error:
        note = f"{contender.name}: {error}"
        if note not in table.notes:
            table.notes.append(note)
        return None


def _times(report: Report, p: Tensor, q: Tensor, settings: Settings, progress: Progress) -> None:
    rows = (
        f"{min(TIMED_PAIRS, len(p))} positions, {p.shape[1]} tokens, float32, temperature {settings.temperatures[0]:g}"
    )
    ks = [f"k={k}" for k in settings.draws]
    table = report.table(
        f"Processor time of one verification in microseconds, median of {rows}", ["rule", "law", *ks], digits=0
    )
    p, q = p[:TIMED_PAIRS].float(), q[:TIMED_PAIRS].float()
    for contender in any_size():
        progress(f"time: {contender.name}")
        cells: list[Cell] = [call_us(contender, p, q, k, settings.seed) for k in settings.draws]
        if any(cell is not None for cell in cells):
            table.add(contender.name, contender.law_name, *cells)


def call_us(contender: Contender, p: Tensor, q: Tensor, k: int, seed: int) -> float | None:
    """Median processor time of one call of the rule; choosing the law and drawing are not in it."""
    rng = torch.Generator().manual_seed(seed)
    seconds = []
    for i in range(len(p)):
        node = contender.node(q[i], k)
        if node is None:
            return None
        rule, law = node
        record = siblings(draws_of(law, q[i], 1, rng)[0], q[i], law)
        if i == 0:
            rule(p[i].clone(), record)  # compiles
        begin = time.process_time()  # not the wall clock: other programs may want this core
        rule(p[i], record)
        seconds.append(time.process_time() - begin)
    return median(seconds) * 1e6


def _deviations(report: Report, p: Tensor, q: Tensor, settings: Settings, progress: Progress) -> None:
    ks = [f"k={k}" for k in settings.draws]
    table = report.table("Deviation of what is emitted from p", ["rule", "law", *ks])
    num_pairs = min(ENUMERATED_PAIRS, len(p))
    for contender in any_size():
        progress(f"deviation: {contender.name}")
        cells: list[Cell] = []
        for k in settings.draws:
            small_p, small_q = truncate(p[:num_pairs], q[:num_pairs], _tokens(k))
            found = _outcomes(contender, small_p, small_q, k)
            cells.append(None if found is None else _worst(found, small_p))
        if any(cell is not None for cell in cells):
            table.add(contender.name, contender.law_name, *cells)
    table.notes.append(
        f"Largest total variation over {num_pairs} positions, every draw enumerated (no sampling, float64), with q cut "
        f"to its likeliest tokens: {', '.join(f'{_tokens(k)} at k={k}' for k in settings.draws)}. "
        f"- where a law with random N has more than {TUPLES * 10} draws."
    )


def _tokens(k: int, most: int = 50) -> int:
    """The largest vocabulary whose draws can be enumerated."""
    return max(v for v in range(2, most + 1) if v == 2 or v**k <= TUPLES)


def _outcomes(contender: Contender, p: Tensor, q: Tensor, k: int) -> list[Outcome] | None:
    """Every pair enumerated; None where there is no rule to call, or a random number of draws is too large."""
    found = []
    for i in range(len(p)):
        node = contender.node(q[i], k)
        if node is None or _num_tuples(node[1], q[i]) > TUPLES * 10:
            return None
        found.append(enumerated(*node, p[i], q[i]))
    return found


def _num_tuples(law: Law, q: Tensor) -> int:
    return 1 if law.name == "opaque" else int((q > 0).sum()) ** law.k


def _worst(outcomes: Sequence[Outcome], p: Tensor) -> float:
    return max(outcome.total_variation(p[i]) for i, outcome in enumerate(outcomes))


def measure_toy(report: Report, settings: Settings, progress: Progress) -> None:
    """All rules on the toy pairs of SpecHub (Sun et al. 2024), appendix E, enumerated over every draw."""
    draws = [k for k in settings.draws if _tokens(k, MOST_TOY_TOKENS) >= LEAST_TOY_TOKENS]
    if not draws:
        raise ForetokenError(f"draws is {list(settings.draws)}: toy distributions are enumerated for up to 4.")
    ks = [f"k={k}" for k in draws]
    for temperature in settings.temperatures:
        for similarity in SIMILARITIES:
            title = f"Toy pairs, temperature {temperature:g}, similarity {similarity:g}"
            table = report.table(title, ["rule", "law", *ks, "deviation"])
            for contender in all_rules():
                progress(f"{title}: {contender.name}")
                _toy_row(table, contender, draws, temperature, similarity, settings.seed)
            sizes = ", ".join(f"{_tokens(k, MOST_TOY_TOKENS)} at k={k}" for k in draws)
            table.notes.append(
                f"Mean acceptance over {TOY_PAIRS} pairs, standard normal logits, every draw enumerated; tokens: "
                f"{sizes}. deviation: largest total variation of what is emitted from p. Columns have different "
                "tokens: compare inside one only."
            )


def _toy_row(
    table: Table, contender: Contender, draws: Sequence[int], temperature: float, similarity: float, seed: int
) -> None:
    cells: list[Cell] = []
    worst: list[float] = []
    for k in draws:
        p, q = toy_rows(TOY_PAIRS, _tokens(k, MOST_TOY_TOKENS), temperature, similarity, seed)
        outcomes = _outcomes(contender, p, q, k)
        if outcomes is None:
            found = _acceptance(table, contender, p, q, k, seed)
            cells.append(None if found is None else found.mean)
        else:
            cells.append(sum(outcome.acceptance for outcome in outcomes) / len(outcomes))
            worst.append(_worst(outcomes, p))
    table.add(contender.name, contender.law_name, *cells, max(worst, default=None))


def panels(tables: Sequence[Table]) -> list[Panel]:
    """Acceptance against the number of drafts: a panel per table that has it, a line per rule, bounds dashed."""
    found = []
    for table in tables:
        if not table.title.startswith(("Acceptance", "Toy")):
            continue
        places = [j for j, column in enumerate(table.columns) if column.startswith("k=")]
        lines = []
        for row in table.rows:
            points = [(int(table.columns[j][2:]), y) for j in places if isinstance(y := row[j], float)]
            style, marker = "--" if row[1] == "bound" else "-", "os^v"[len(lines) // 10]  # there are ten colours
            lines.append(Line(str(row[0]), [k for k, _ in points], [y for _, y in points], None, style, marker))
        found.append(Panel(table.title, "drafts k", "acceptance", lines))
    return found


def command(
    *,
    toy: bool = False,
    speed: bool = False,
    target: str | None = None,
    drafter: LanguageModel = None,
    text: Text = None,
    draws: str = DEFAULT_DRAWS,
    temperature: str = DEFAULT_TEMPERATURES,
    positions: Positions = 240,
    seed: int = 0,
    plot: str | None = None,
    markdown: bool = False,
    json_: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Compare verification rules by acceptance, time and deviation from the target's distribution.

    On a real pair of models over a text (by default the demo pair), or with --toy on the toy distributions of the
    SpecHub paper, where every draw of every rule is enumerated, or with --speed by time alone on random rows of up to
    128,000 tokens. The table goes to stdout.

    toy: Enumerate every rule on toy distributions; no model.
    speed: Time every rule and published solver by vocabulary and drafts; no model.
    draws: Numbers of drafts to compare, with commas.
    temperature: Temperatures of both models, with commas.
    seed: Seed of whatever is sampled.
    plot: Draw acceptance to this file (needs matplotlib).
    """
    ks = numbers(draws, "draws")
    if max(ks) > MOST_DRAWS:
        raise ForetokenError(f"--draws is {draws}: give numbers up to {MOST_DRAWS}.")
    temperatures = numbers(temperature, "temperature", float)
    if toy and speed:
        raise ForetokenError("--toy and --speed are two comparisons: ask for one at a time.")
    if plot is not None and speed:
        raise ForetokenError("--plot draws acceptance, which --speed does not measure: leave one of them out.")
    check_plot(plot)
    check_counts(positions=positions)
    check_seed(seed)
    texts = [] if toy or speed else check_score(target, drafter, text, dtype)

    settings = Settings(ks, temperatures, seed)
    scored = None if toy or speed else score(target, drafter, texts, positions, device, dtype)

    header = {**machine(torch.device("cpu")), "seed": seed}
    if scored is not None:
        header |= {**names(target, drafter), "text": text or "held-out", "positions": positions}
    report = Report("Verification rules compared", header)

    def tell(line: str) -> None:
        if not (json_ or markdown):
            options.progress("")
            report.print_finished()
        options.progress(line)

    try:
        if speed:
            measure_speed(report, settings.temperatures, seed, CELL_SECONDS, options.progress)
        elif scored is None:
            measure_toy(report, settings, tell)
        else:
            measure_pair(report, scored, settings, options.progress)
    except KeyboardInterrupt:
        report.interrupted = True
    if plot is not None:
        models = "" if scored is None else f": {header['target']}, drafter {header['drafter']}"
        draw(panels(report.tables), f"{report.title}{models}", plot)
    show(report, json_, markdown)
