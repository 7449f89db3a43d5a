"""`python -m benchmarks arena`: drafters, trees and rules at equal numbers of nodes, by tokens and by the clock.

By tokens: at places of answers that the target gave, trees are drafted as in decoding, and what a rule accepts of each
is computed exactly (expected.py). Rules with one law meet on the same trees, and all on the same places.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.arena_clock import Timed, clock_table, methods, time_all, workload_of
from benchmarks.arena_report import Score, by_player, panel, tables
from benchmarks.book import Book
from benchmarks.contestants import Contestant, contestants, nodes_of, rules, trees_of, usual
from benchmarks.execution import numbers
from benchmarks.expected import survival
from benchmarks.places import PAIRS, Pair, Text, answered, drafted_along, identity, pair_named
from foretoken.cli import options
from foretoken.cli.measuring import chosen_prompts, encoded, show
from foretoken.core.files import check_folder
from foretoken.core.limits import check_choice, check_counts, check_seed, check_temperatures
from foretoken.engine import Engine
from foretoken.measure.harness import Progress
from foretoken.measure.machine import machine
from foretoken.measure.plot import Panel, check_plot
from foretoken.measure.plot import plot as draw
from foretoken.measure.report import Report
from foretoken.models.load import choose_device
from foretoken.trees.forms import check_size, read_tree

USUAL_PAIRS = ["smollm2", "smollm2-ngram", "toy"]
TEMPERATURES = [0.0, 0.6, 1.0]
OUT = "foretoken-arena"
SIDE_BY_SIDE = 8  # texts whose trees are drafted together


@dataclass(frozen=True)
class Measured:
    """What one contestant accepted at the places of one text, on average.

    drafted: nodes of its trees. survival: P(at least i draft tokens are accepted), i = 1, 2, ..
    """

    temperature: float
    nodes: int
    tree: str
    rule: str
    law: str
    text: int
    drafted: float
    survival: tuple[float, ...]

    @property
    def contestant(self) -> Contestant:
        return Contestant(self.nodes, self.tree, self.rule, self.law)


def measure(
    engine: Engine, texts: Sequence[Text], temperature: float, meeting: Sequence[Contestant], book: Book[Measured],
    seed: int, progress: Progress,
) -> None:  # fmt: skip
    """Add to the book what each contestant accepts of the trees at the places of each text, but for what it has."""
    known = {(m.temperature, m.contestant, m.text) for m in book.found}
    groups: dict[object, list[Contestant]] = {}
    for each in meeting:
        groups.setdefault(each.drawn, []).append(each)
    for number, group in enumerate(groups.values(), start=1):
        for first in range(0, len(texts), SIDE_BY_SIDE):
            together = range(first, min(first + SIDE_BY_SIDE, len(texts)))
            left = [c for c in group if any((temperature, c, i) not in known for i in together)]
            if not left:
                continue
            about = f"temperature {temperature:g}, {group[0].tree}, {group[0].law}"
            progress(f"[{number}/{len(groups)}] {about}: texts {first + 1} to {together.stop} of {len(texts)}")
            for result in _measured(engine, texts[first : together.stop], first, temperature, left, seed):
                if (temperature, result.contestant, result.text) not in known:
                    book.add(result)


def _measured(
    engine: Engine, texts: Sequence[Text], first: int, temperature: float, group: Sequence[Contestant], seed: int
) -> Iterator[Measured]:
    """Contestants that meet on the same trees. first: the number of the first text, among all."""
    policy, _ = group[0].drawn
    depth = len(policy.sizes()) - 1
    drafted: list[list[int]] = [[] for _ in texts]
    kept: dict[Contestant, list[list[list[float]]]] = {c: [[] for _ in texts] for c in group}
    for i, tree, p in drafted_along(group[0].engine(engine), texts, temperature, seed + first):
        drafted[i].append(tree.num_drafted)
        for c in group:
            kept[c][i].append(survival(c.verifier, tree, p, depth))
    for c, of_texts in kept.items():
        for i, rows in enumerate(of_texts):
            mean = tuple(float(x) for x in np.mean(rows, axis=0))
            yield Measured(temperature, c.nodes, c.tree, c.rule, c.law, first + i, float(np.mean(drafted[i])), mean)


def scores(found: Sequence[Measured], temperature: float, meeting: Sequence[Contestant]) -> list[Score]:
    """Those of the contestants that the book has, each over the texts in order."""
    grouped: dict[Contestant, dict[int, Measured]] = {}
    for m in found:
        if m.temperature == temperature:
            grouped.setdefault(m.contestant, {})[m.text] = m
    made = []
    for c in meeting:
        of = [m for _, m in sorted(grouped.get(c, {}).items())]
        if of:
            rows = np.array([m.survival for m in of])
            made.append(Score(c, rows.sum(1), float(np.mean([m.drafted for m in of])), rows.mean(0)))
    whole = max((len(score.accepted) for score in made), default=0)
    return [score for score in made if len(score.accepted) == whole]  # one that was stopped has fewer texts


@dataclass(frozen=True)
class Course:
    """What every pair goes through; options of the command. rounds: of whole runs by the clock."""

    temperatures: Sequence[float]
    trees: Mapping[int, Sequence[str]]  # by their number of draft tokens
    rules: Sequence[str]
    prompts: int
    places: int
    max_new_tokens: int
    seed: int
    rounds: int
    out: Path


def run(pair: Pair, course: Course, report: Report, device: str | None, dtype: str | None) -> list[Panel]:
    """Measure one pair and fill the report with what is complete, also where Ctrl-C ends it."""
    engine = pair.load(device, dtype)
    settings = {
        **identity(engine), "prompts": course.prompts, "places": course.places,
        "max_new_tokens": course.max_new_tokens, "seed": course.seed,
    }  # fmt: skip
    header, file = {"commit": report.header["commit"]}, str(course.out / pair.name.replace("/", "-"))
    book = Book(f"{file}.jsonl", Measured, settings, header, "figures of the arena")
    clocked = Book(f"{file}-clock.jsonl", Timed, settings, header, "runs of the arena") if course.rounds else None
    room = course.max_new_tokens + 3 * max(course.trees)
    prompts = encoded(engine, chosen_prompts(pair.workload, course.prompts), room)

    def progress(line: str) -> None:
        options.progress(f"{pair.name}: {line}")

    drawn: list[Panel] = []
    for t in course.temperatures:
        title = f"{pair.name}, temperature {t:g}"
        meeting = [c for n, trees in course.trees.items() for c in contestants(engine, n, trees, t, course.rules)]
        usuals = [usual(n, t, engine) for n in course.trees]
        try:
            progress(f"temperature {t:g}: the target answers")
            texts = answered(engine, prompts, course.max_new_tokens, course.places, t, course.seed)
            measure(engine, texts, t, meeting, book, course.seed, progress)
        except KeyboardInterrupt:
            report.interrupted = True
        found = scores(book.found, t, meeting)
        if found:
            tables(report, title, found, usuals)
            drawn.append(panel(title, found))
        if clocked is not None and found and not report.interrupted:
            chosen = [score.contestant for of in by_player(found).values() for score in of.values()]
            engines = methods(engine, list(dict.fromkeys([*usuals, *chosen])))
            work = workload_of(engine, prompts, course.max_new_tokens, t, course.seed)
            report.interrupted = time_all(engines, work, course.rounds, clocked, progress)
            clock_table(report, title, [run for run in clocked.found if run.temperature == t], list(engines))
        if report.interrupted:
            break
    return drawn


def command(
    *,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(PAIRS)}, or TARGET,DRAFTER; may be repeated. Default: {', '.join(USUAL_PAIRS)}."
        ),
    ] = None,
    nodes: str = "8,16,32",
    tree: list[str] | None = None,
    rule: list[str] | None = None,
    temperature: list[float] | None = None,
    prompts: int = 8,
    places: int = 8,
    max_new_tokens: int = 96,
    rounds: int = 0,
    out: str = OUT,
    seed: int = 0,
    plot: str | None = None,
    markdown: bool = False,
    json_: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Drafters, trees and rules at equal numbers of nodes: expected accepted draft tokens, and with --rounds speed.

    What a rule accepts of a drafted tree is computed, not sampled, so that rules with one law are compared on the same
    trees. By tokens alone a busy machine does no harm.

    nodes: Draft tokens of a tree, with commas.
    tree: Tree; may be repeated. Default: chain, kary, delayed, budget and dynamic of --nodes.
    rule: Verification rule; may be repeated. Default: all.
    temperature: May be repeated. Default: 0, 0.6 and 1.
    prompts: Prompts that the target answers.
    places: Places of each answer at which trees are drafted.
    max_new_tokens: Tokens of an answer, at most.
    rounds: Also whole runs by the clock, of each rule on its best trees: so many a prompt.
    out: Folder for the single figures. The same command goes on where it stopped.
    seed: Seed of answers and of what is drafted.
    plot: Draw accepted tokens to this file (needs matplotlib).
    """
    sizes = numbers(nodes, "nodes")
    check_counts(prompts=prompts, places=places, max_new_tokens=max_new_tokens, nodes=min(sizes), rounds=rounds or 1)
    check_size(max(sizes))
    for name in tree or ():
        read_tree(name)
    check_seed(seed, prompts)
    temperatures = list(dict.fromkeys(TEMPERATURES if temperature is None else temperature))
    check_temperatures(temperatures)
    known = rules()
    for name in rule or ():
        check_choice("rule of the arena", name, known)
    pairs = [pair_named(name) for name in dict.fromkeys(pair or USUAL_PAIRS)]
    for each in pairs:
        options.check_models(each.target, each.drafter, device=device, dtype=dtype)
        chosen_prompts(each.workload, prompts)
    check_folder(Path(out))
    check_plot(plot)
    options.quiet()

    Path(out).mkdir(parents=True, exist_ok=True)
    trees = {n: trees_of(n) for n in sizes}
    if tree is not None:
        trees = {n: [f"chain:{n}", *(x for x in dict.fromkeys(tree) if nodes_of(x) == n)] for n in map(nodes_of, tree)}
    course = Course(temperatures, trees, rule or known, prompts, places, max_new_tokens, seed, rounds, Path(out))
    header = {
        **machine(choose_device(device)), "prompts": prompts, "places": places,
        "max_new_tokens": max_new_tokens, "rounds": rounds, "seed": seed,
    }  # fmt: skip
    report = Report("The arena: drafters, trees and rules", header)
    drawn: list[Panel] = []
    try:
        for each in pairs:
            drawn += run(each, course, report, device, dtype)
            if report.interrupted:
                break
    except KeyboardInterrupt:
        report.interrupted = True
    if plot is not None and drawn:
        draw(drawn, "Accepted draft tokens of a step against draft tokens in the tree", plot)
    show(report, json_, markdown)
