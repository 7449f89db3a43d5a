"""Processor time of one verification by rule, vocabulary and number of draws; published solvers beside ours."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.pairs import toy_rows
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Law
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.measure.child_acceptance import draw, siblings
from foretoken.measure.harness import Progress
from foretoken.measure.report import Cell, Report
from foretoken.verify import VERIFIERS
from foretoken.verify.published.global_resolution import Failure, GlobalResolution, Resolving
from foretoken.verify.published.plan import Solver

TOO_LARGE = "refused: too large"
GRID = ((10, 2), (10, 5), (100, 2), (1000, 2), (1000, 16), (32_000, 4), (32_000, 16), (128_000, 4), (128_000, 16))
OURS = ("transport", "transport-grouped", "pairwise", "rrs", "rrsw", "kseq", "hub", "spechub")
PAIRS = 16


@dataclass(frozen=True)
class Timed:
    """solve(p, record): one verification; whether it succeeded. growth: its time grows with this power of the number of
    sets that the draws can show; 0 where it does not look at them one by one."""

    name: str
    solve: Callable[[Tensor, Siblings], bool]
    growth: int


@dataclass(frozen=True)
class Timing:
    """mean_ms: None where nothing was run, and then the reason is given."""

    mean_ms: float | None
    success: float = 1.0
    num: int = 0
    why: str = ""

    def __str__(self) -> str:
        if self.mean_ms is None:
            return self.why
        shown = f"{self.mean_ms:.0f}" if self.mean_ms >= 100 else f"{self.mean_ms:.3g}"
        return shown if self.success == 1 else f"{shown} ({self.success:.0%})"


def call(rule: Verifier, p: Tensor, record: Siblings) -> bool:
    rule(p, record)
    return True


def resolve(rule: GlobalResolution, p: Tensor, record: Siblings) -> bool:
    assert record.q is not None
    found = rule.solve(p.double().numpy(), record.q.double().numpy(), record.law)
    if isinstance(found, Failure):
        return False
    found.row(record.draws)
    return True


def timed(
    solve: Callable[[Tensor, Siblings], bool], law: Law, p: Tensor, q: Tensor, limit_s: float, seed: int
) -> tuple[list[float], int]:
    """(processor seconds of each verification, how many succeeded); none begins after `limit_s` seconds.

    Raises ForetokenError where the pairs are larger than the solver takes.
    """
    rng = torch.Generator().manual_seed(seed)
    seconds, successes = [], 0
    begin = time.perf_counter()
    for i in range(len(p)):
        if seconds and time.perf_counter() - begin > limit_s:
            break
        record = siblings(draw(law, q[i], 1, rng)[0], q[i], law)
        start = time.process_time()  # not the wall clock: other programs may want this core
        successes += solve(p[i], record)
        seconds.append(time.process_time() - start)
    return seconds, successes


def time_cell(solver: Timed, p: Tensor, q: Tensor, n: int, most: int, limit_s: float, seed: int) -> Timing:
    """The mean over the first `most` pairs, or as many as begin within `limit_s`."""
    try:
        seconds, successes = timed(solver.solve, IID(n), p[:most], q[:most], limit_s, seed)
    except ForetokenError:  # the message says so of every pair alike
        return Timing(None, why=TOO_LARGE)
    return Timing(1000 * sum(seconds) / len(seconds), successes / len(seconds), len(seconds))


def num_sets(v: int, n: int) -> int:
    """Of tokens that n draws from v tokens can show."""
    return sum(math.comb(v, size) for size in range(1, n + 1))


def measure_speed(report: Report, temperatures: Sequence[float], seed: int, limit_s: float, progress: Progress) -> None:
    """Every rule at every (V, n) of GRID, at every temperature, on random rows: float32, standard normal logits.

    limit_s: no further pair is begun in a cell after so many seconds, and a cell that would take longer is left out.
    """
    columns = ["rule", "law", *(f"({v}, {n})" for v, n in GRID)]
    for temperature in temperatures:
        table = report.table(f"Milliseconds a verification at (V, n), temperature {temperature:g}", columns)
        for name in (*OURS, *(name for name, rule in VERIFIERS.items() if isinstance(rule, Solver))):
            family = VERIFIERS[name].laws[0]
            cells: list[Cell] = []
            last = (1, 0.0)
            for v, n in GRID:
                progress(f"temperature {temperature:g}: {name} ({v}, {n})")
                cells.append(_cell(VERIFIERS[name], family, v, n, temperature, seed, limit_s, last))
                if isinstance(cells[-1], float):
                    last = (num_sets(v, n), cells[-1])
            table.add(name, family.name, *cells)
        table.notes += [
            f"Median processor time of one call over at most {PAIRS} pairs, after one more; in brackets the "
            "share of pairs that were solved, where not all were. Choosing the draws is not in it.",
            f"-: so many draws are not taken, cannot be enumerated, or would take over {limit_s:g} s.",
        ]


def _cell(
    rule: Verifier,
    family: LawFamily,
    v: int,
    n: int,
    temperature: float,
    seed: int,
    limit_s: float,
    last: tuple[int, float],
) -> Cell:
    """last: the number of draw sets and the milliseconds of the cell before."""
    law = family(n)
    enumerates = isinstance(rule, Solver) and not isinstance(rule, Resolving)
    if not rule.accepts(law) or (enumerates and last[1] / 1000 * num_sets(v, n) / last[0] > limit_s):
        return None
    p, q = (rows.float() for rows in toy_rows(PAIRS + 1, v, temperature, 0.5, seed))
    solve = partial(resolve, rule) if isinstance(rule, GlobalResolution) else partial(call, rule)
    try:
        timed(solve, law, p[:1], q[:1], limit_s, seed)  # which compiles
        seconds, solved = timed(solve, law, p[1:], q[1:], limit_s, seed)
    except ForetokenError:
        return None
    ms = 1000 * median(seconds)
    return ms if solved == len(seconds) else f"{ms:.3f} ({solved / len(seconds):.0%})"
