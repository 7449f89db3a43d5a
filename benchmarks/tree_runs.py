"""Runs of trees side by side: tokens a target forward brings, counted on the real engine."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.vocab_ways import Meter, Metered
from foretoken.core import files
from foretoken.core.errors import ForetokenError
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence as Running
from foretoken.core.verifier import Verifier
from foretoken.decode import Decoder
from foretoken.draft.heads import HeadDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.measure.clocks import Clock, TimedLM
from foretoken.measure.records import as_line, check, parsed
from foretoken.models.causal_lm import CausalLM
from foretoken.models.target import LMTarget, LMTargetSession

Key = tuple[float, int, str, int]  # temperature, nodes, method, round
WARM = 16  # tokens of a run before the first that is timed


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


@dataclass
class Count:
    steps: int = 0
    drafted: int = 0


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
    meter, scoring, forwards = Meter(), Clock(target.lm.device), Clock(target.lm.device)
    drafter = cell.drafter
    if isinstance(drafter.lm, CausalLM):
        drafter = replace(drafter, lm=meter.timed(drafter.lm))
    proposing = drafter if isinstance(drafter, HeadDrafter) else Metered(drafter, meter)
    timed = LMTarget(TimedLM(target.lm, scoring, forwards))
    sampling = Sampling(temperature=cell.temperature)
    deepest = num_tokens + len(drafter.policy.sizes())
    limit = target.lm.context or deepest + max(map(len, prompts))
    slots = max(map(len, prompts)) + deepest + drafter.max_nodes
    chunk = prompts[first : first + course.batch]
    counts, tokens = [Count() for _ in chunk], [0] * len(chunk)
    decoder = Decoder(timed, proposing, cell.verifier, len(chunk), slots)
    place = {}
    for i, ids in enumerate(chunk):
        rng = seeded(seed + first + i)
        sequence = Running(list(ids), sampling, rng, min(deepest, limit - len(ids)))
        place[sequence] = i
        decoder.join(sequence)
    assert isinstance(decoder.target, LMTargetSession)
    decoder.target.catch_up(decoder.sequences)
    scoring.lap()
    begin = time.perf_counter()
    while decoder.sequences:
        for sequence, step in decoder.step():
            i = place[sequence]
            counts[i].steps += 1
            counts[i].drafted += step.num_drafted
            tokens[i] = sequence.num_new
            if sequence.num_new >= num_tokens and not sequence.finished:
                decoder.leave(sequence)
    wall_s = time.perf_counter() - begin
    return TreeRun(
        *(cell.temperature, cell.nodes, cell.method, round_, seed),
        *(tuple(tokens), tuple(c.steps for c in counts), tuple(c.drafted for c in counts)),
        *(wall_s, scoring.lap(), meter.scoring.seconds, meter.own_s),
    )


def measure(
    course: Course, cells: Sequence[Cell], book: "RunBook", progress: Callable[[str], None], timed: bool = False
) -> None:
    """Every cell once a round, in rotated order; those that the book has are passed over.

    timed: the cells of a temperature take turns at every prompt (or prompts side by side), since a shared machine's
    pace changes within a run, and each has run before, since a first run may compile. What is stopped then loses the
    round of a temperature, else a cell.
    """
    warm = set[tuple[float, int, str]]()
    for round_ in range(course.rounds):
        turn = round_ * len(cells) // course.rounds
        turned = [cell for cell in [*cells[turn:], *cells[:turn]] if (*cell.key, round_) not in book.runs]
        temperatures = dict.fromkeys(cell.temperature for cell in turned)
        groups = [[cell for cell in turned if cell.temperature == t] for t in temperatures]
        for group in groups if timed else [[cell] for cell in turned]:
            runs: list[list[TreeRun]] = [[] for _ in group]
            for first in course.firsts:
                for cell, own in zip(group, runs, strict=True):
                    progress(
                        f"round {round_ + 1}/{course.rounds}, temperature {cell.temperature:g}, {cell.nodes} nodes: "
                        f"{cell.method}, prompt {first + 1}/{len(course.prompts)}"
                    )
                    if timed and cell.key not in warm:
                        run_from(cell, replace(course, num_tokens=WARM), round_, first)
                        warm.add(cell.key)
                    own.append(run_from(cell, course, round_, first))
            for own in runs:
                book.add(joined(own))


class RunBook:
    """Runs in a JSONL file that grows by a line a run, so that a stopped benchmark goes on where it was.

    settings: what must be equal for runs to be comparable; it stands in every line.
    """

    def __init__(self, path: str, settings: dict[str, Any], header: dict[str, Any]) -> None:
        self.path, self.header = Path(path), {**settings, **header}
        self.runs: dict[Key, TreeRun] = {}
        try:
            text = self.path.read_text() if self.path.exists() else ""
            whole = text[: text.rfind("\n") + 1]  # a line that was cut off when the last run was stopped
            for found in self._parsed(whole.splitlines(), settings):
                self.runs[found.key] = found
            if whole != text:
                start = f'{{"{fields(TreeRun)[0].name}": '
                if not (text[len(whole) :].startswith(start) or start.startswith(text[len(whole) :])):
                    raise self._not_ours()
                files.write(self.path, lambda path: path.write_text(whole))
            with self.path.open("a"):  # now, not after minutes of measuring
                pass
        except OSError as error:
            raise ForetokenError(f"Cannot write {path}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise self._not_ours() from error

    def _not_ours(self) -> ForetokenError:
        return ForetokenError(f"{self.path} holds no runs of benchmarks trees: name another --out.")

    def _parsed(self, lines: Iterable[str], settings: dict[str, Any]) -> Iterable[TreeRun]:
        for line in lines:
            try:
                found, record = parsed(TreeRun, line)
            except (ValueError, KeyError, TypeError) as error:
                raise self._not_ours() from error
            check(self.path, record, settings, "--out")
            yield found

    def add(self, found: TreeRun) -> None:
        self.runs[found.key] = found
        files.append(self.path, as_line(found, self.header))
