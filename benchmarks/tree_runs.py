"""Runs of trees side by side: tokens a target forward brings, counted on the real engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.decoding import opened
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence as Running
from foretoken.core.verifier import Verifier
from foretoken.draft.lm import LMDrafter
from foretoken.measure.clocks import Clocks
from foretoken.measure.harness import WARM_TOKENS, Progress, interleave, rotated
from foretoken.measure.results import Book
from foretoken.models.target import LMTarget

Key = tuple[float, int, str, int]  # temperature, nodes, method, round


@dataclass(frozen=True)
class TreeRun:
    """One method's continuation of every prompt. tokens, steps, drafted: by prompt. wall_s: of all steps,
    once the target has read the prompts; target_s, drafter_s: of them inside calls of the models; own_s: of propose and
    observe without the drafter's (0 for draft heads)."""

    temperature: float
    nodes: int
    method: str
    round: int
    seed: int
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    drafted: tuple[int, ...]
    wall_s: float
    target_s: float
    drafter_s: float
    own_s: float

    @property
    def key(self) -> Key:
        return self.temperature, self.nodes, self.method, self.round


@dataclass(frozen=True)
class Cell:
    """A method at a number of nodes and a temperature, ready to run."""

    temperature: float
    nodes: int
    method: str
    drafter: LMDrafter
    verifier: Verifier

    @property
    def key(self) -> tuple[float, int, str]:
        return self.temperature, self.nodes, self.method

    @property
    def name(self) -> str:
        return f"{self.method}, {self.nodes} nodes, temperature {self.temperature:g}"


@dataclass(frozen=True)
class Course:
    """What every cell runs on: the prompts' ids, `batch` of them side by side, each continued `rounds` times by at
    least `num_tokens` tokens."""

    target: LMTarget
    prompts: Sequence[list[int]]
    num_tokens: int
    batch: int = 8
    rounds: int = 1
    seed: int = 0

    @property
    def firsts(self) -> range:
        """The first of the prompts that are decoded side by side, for all of them."""
        return range(0, len(self.prompts), self.batch)


@dataclass(frozen=True)
class Prompts:
    """The prompts that are decoded side by side with prompt `first`, in a round."""

    round: int
    first: int
    course: Course

    def __str__(self) -> str:
        return f"round {self.round + 1}/{self.course.rounds}, prompt {self.first + 1}/{len(self.course.prompts)}"


def run(cell: Cell, course: Course, round_: int = 0) -> TreeRun:
    """Continue every prompt by steps, until it has `num_tokens` new tokens or more.

    The last step's tree is as deep as any other and counts in full: steps are counted up to a stopping time, so that
    tokens over steps is the mean of a step. Prompt i of n uses seed + n round + i.
    """
    return joined([run_from(cell, course, round_, first) for first in course.firsts])


def joined(runs: Sequence[TreeRun]) -> TreeRun:
    """One method's runs of prompts that follow one another, as one."""
    together = {name: tuple(x for r in runs for x in getattr(r, name)) for name in ("tokens", "steps", "drafted")}
    spent = {name: sum(getattr(r, name) for r in runs) for name in ("wall_s", "target_s", "drafter_s", "own_s")}
    return replace(runs[0], **together, **spent)


def run_from(cell: Cell, course: Course, round_: int, first: int) -> TreeRun:
    """`run` of the prompts that are decoded side by side with prompt `first`."""
    target, prompts, num_tokens = course.target, course.prompts, course.num_tokens
    seed = course.seed + len(prompts) * round_
    clocks, sampling = Clocks(target.lm.device), Sampling(temperature=cell.temperature)
    drafter = clocks.on_drafter(cell.drafter)
    deepest = num_tokens + len(cell.drafter.policy.sizes())
    limit = target.lm.context or deepest + max(map(len, prompts))
    slots = max(map(len, prompts)) + deepest + drafter.max_nodes
    sequences = [
        Running(list(ids), sampling, seeded(seed + i), min(deepest, limit - len(ids)))
        for i, ids in enumerate(prompts[first : first + course.batch], start=first)
    ]
    place = {sequence: i for i, sequence in enumerate(sequences)}
    tokens, steps, drafted = ([0] * len(sequences) for _ in range(3))
    decoder = opened(clocks.on_target(target), drafter, cell.verifier, sequences, slots)
    clocks.target.lap()
    begin = time.perf_counter()
    while decoder.sequences:
        for sequence, step in decoder.step():
            i = place[sequence]
            steps[i] += 1
            drafted[i] += step.num_drafted
            tokens[i] = sequence.num_new
            if sequence.num_new >= num_tokens and not sequence.finished:
                decoder.leave(sequence)
    wall_s = time.perf_counter() - begin
    return TreeRun(
        *(cell.temperature, cell.nodes, cell.method, round_, seed),
        *(tuple(tokens), tuple(steps), tuple(drafted)),
        *(wall_s, clocks.target.lap(), clocks.drafter.seconds, clocks.own_s),
    )


def measure(
    course: Course, cells: Sequence[Cell], book: Book[TreeRun], progress: Progress, timed: bool = False
) -> None:
    """Every cell once per round, in rotated order; those that the book has are passed over.

    timed: the cells of a temperature take turns at every prompt (or prompts side by side), each warm. What is stopped
    then loses the round of a temperature, else a cell.
    """
    done, warmed = {run.key for run in book.found}, set[tuple[float, int, str]]()

    def warm(cell: Cell) -> None:
        if cell.key not in warmed:
            run_from(cell, replace(course, num_tokens=WARM_TOKENS), 0, 0)
        warmed.add(cell.key)

    for round_ in range(course.rounds):
        turned = rotated(cells, round_ * len(cells) // course.rounds)
        left = [cell for cell in turned if (*cell.key, round_) not in done]
        groups = [[cell] for cell in left]
        if timed:
            temperatures = dict.fromkeys(cell.temperature for cell in left)
            groups = [[cell for cell in left if cell.temperature == t] for t in temperatures]
        for group in groups:
            blocks = [Prompts(round_, first, course) for first in course.firsts]
            methods = {cell.name: cell for cell in group}
            runs: dict[str, list[TreeRun]] = {name: [] for name in methods}
            for turn in interleave(
                methods, blocks, lambda cell, block: run_from(cell, course, block.round, block.first),
                warm if timed else None, progress,
            ):  # fmt: skip
                runs[turn.name].append(turn.result)
            for of_cell in runs.values():
                book.add(joined(of_cell))
