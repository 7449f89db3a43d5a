"""The arena by the clock: whole continuations, every method in turn on every prompt, plain decoding among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.arena_report import error, shown
from benchmarks.book import Book
from benchmarks.contestants import Contestant
from foretoken.build import plain, with_recipe
from foretoken.draft.auto import auto_drafter
from foretoken.engine import Engine
from foretoken.measure.clocks import clock_named, seconds
from foretoken.measure.continuations import Continued, Workload
from foretoken.measure.harness import WARM_TOKENS, Block, Progress, blocks, interleave
from foretoken.measure.report import Report
from foretoken.names import tree_policy
from foretoken.recipe import AUTO, METHODS, PLAIN, Recipe

COLUMNS = ["method", "tokens/s", "x plain", "x auto", "tokens per step"]


@dataclass(frozen=True)
class Timed:
    """One method's continuation of one prompt; tokens and seconds as in `Continued`."""

    temperature: float
    method: str
    round: int
    prompt: int
    tokens: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.seconds


def controlled(engine: Engine) -> Engine:
    """The engine's drafter under method auto."""
    deepest = with_recipe(engine, Recipe(METHODS[AUTO], vocab=engine.recipe.vocab))
    sizes, device = tree_policy(METHODS[AUTO]).sizes(), engine.target.lm.device
    return replace(deepest, drafter=auto_drafter(deepest.drafter, sizes, device))


def methods(engine: Engine, chosen: Sequence[Contestant]) -> dict[str, Engine]:
    """Plain decoding, method auto, which a user gets who names nothing, and the contestants."""
    named = {f"{c.tree} {c.player}": c.engine(engine) for c in chosen}
    return {PLAIN: plain(engine), AUTO: controlled(engine), **named}


def time_all(
    engines: Mapping[str, Engine], workload: Workload, rounds: int, book: Book[Timed], progress: Progress
) -> bool:
    """Add to the book every method's continuation of every prompt, but for prompts and rounds that it has whole.

    Returns whether Ctrl-C ended it early.
    """
    t, of_block = workload.temperature, list[Timed]()
    done = {(run.temperature, run.method, run.round, run.prompt) for run in book.found}

    def known(block: Block) -> bool:
        return all((t, name, block.round, block.prompt) in done for name in engines)

    def run(engine: Engine, block: Block) -> Continued:
        return workload.run(engine, block.prompt, workload.seed + 1000 * block.round + block.prompt)

    def warm(engine: Engine) -> None:
        workload.run(engine, 0, 0, WARM_TOKENS)

    every = blocks(rounds, len(workload.prompts), [t])
    try:
        for turn in interleave(engines, every, run, warm, progress, known):
            place = turn.block.round, turn.block.prompt
            of_block.append(Timed(t, turn.name, *place, turn.result.tokens, turn.result.seconds))
            if turn.last:
                for each in of_block:
                    book.add(each)
                of_block.clear()
    except KeyboardInterrupt:
        return True
    return False


def workload_of(engine: Engine, prompts: Sequence[list[int]], new: int, temperature: float, seed: int) -> Workload:
    """The prompts' continuations, by the clock of the engine's device."""
    device = engine.target.lm.device
    return Workload(prompts, new, temperature, seconds(clock_named(device), device), seed)


def clock_table(report: Report, title: str, found: Sequence[Timed], names: Sequence[str]) -> None:
    """Add a row for each method of `names`; ratios are taken on the same prompt and round, and averaged."""
    runs: dict[str, dict[tuple[int, int], Timed]] = {}
    for run in found:
        runs.setdefault(run.method, {})[run.round, run.prompt] = run
    table = report.table(f"{title}: by the clock", COLUMNS, 2)
    for name in (name for name in names if name in runs):
        mine = runs[name]
        steps, tokens = sum(len(run.tokens) for run in mine.values()), sum(sum(run.tokens) for run in mine.values())
        ratios = [
            np.array([run.tokens_per_s / runs[base][at].tokens_per_s for at, run in mine.items() if at in runs[base]])
            for base in (PLAIN, AUTO)
        ]
        speed = tokens / sum(run.seconds for run in mine.values())
        table.add(name, round(speed), *(shown(float(x.mean()), error(x)) for x in ratios), tokens / steps)
    table.notes = [
        "Whole runs without the first step, which reads the prompt; ±: standard error over prompts and rounds."
    ]
