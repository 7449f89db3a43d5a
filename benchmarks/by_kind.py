"""Prompts of several kinds: how many times as fast as plain decoding, for each kind and for all.

Of whole runs, and of what comes after the first step, which reads the prompt.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from benchmarks.peers import Answered
from foretoken.cli.prompts import Prompt, read_batch
from foretoken.measure.harness import Block, Turn
from foretoken.measure.report import Report
from foretoken.recipe import PLAIN

ALL = "all"
NOTES = [
    "tokens/s: of whole runs. x plain: geometric mean over prompts ± standard error; each ratio is taken of one prompt "
    "in one round, and a prompt counts once.",
]
DECODING = "The same ratios of tokens/s after the first step, which reads the prompt: of decoding alone."
Turns = Sequence[Turn[Block, Answered]]
NO_RATIO = (math.nan, math.nan)
Place = tuple[int, int]  # a prompt and a round, by their numbers


def read_kinds(path: str) -> list[tuple[str | None, Prompt]]:
    """(kind, prompt) of each line of a JSONL file of prompts. The kind is the line's "kind"; None where it has none."""
    prompts = list(read_batch(path).values())
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    kinds = [line.get("kind") if isinstance(line, dict) else None for line in lines]
    return list(zip(kinds, prompts, strict=True))


@dataclass(frozen=True)
class Row:
    """One way to decode on one kind of prompts.

    temperature: of the texts. kind: of the prompts, ALL for those of every kind. name: of the way.
    vs_plain, vs_other: (ratio of tokens/s to plain decoding and to another way, its standard error); nan without one.
    tokens_per_step: new tokens per forward of the target. num_same: answers with the ids of plain decoding.
    decoding_vs_plain: as vs_plain, after the first step.
    """

    temperature: float
    kind: str
    name: str
    tokens_per_s: float
    vs_plain: tuple[float, float]
    vs_other: tuple[float, float]
    tokens_per_step: float
    num_answers: int
    num_same: int
    decoding_vs_plain: tuple[float, float] = NO_RATIO


def rows(turns: Turns, kinds: Sequence[str], other: str | None = None) -> list[Row]:
    """A row for each temperature, way and kind, and where there are several kinds, one for all of them.

    kinds: of each prompt. other: the way to compare with besides plain decoding.
    """
    of_kind: dict[tuple[float, str, str], dict[Place, Answered]] = {}
    several = len(set(kinds)) > 1
    for turn in turns:
        for kind in [*([ALL] if several else []), kinds[turn.block.prompt]]:
            of_kind.setdefault((turn.block.temperature, turn.name, kind), {})[turn.block.prompt, turn.block.round] = (
                turn.result
            )
    made = []
    for (temperature, name, kind), answers in of_kind.items():
        alone = of_kind.get((temperature, PLAIN, kind), {})
        compared = {} if other is None else of_kind.get((temperature, other, kind), {})
        tokens = sum(a.num_tokens for a in answers.values())
        speed = tokens / sum(a.seconds for a in answers.values())
        steps = tokens / sum(a.num_steps or 0 for a in answers.values())
        same = sum(i in alone and a.ids == alone[i].ids for i, a in answers.items())
        whole, later = attrgetter("tokens_per_s"), attrgetter("decoding_tokens_per_s")
        ratios = (_ratio(answers, alone, whole), _ratio(answers, compared, whole))
        decoding = _ratio(answers, alone, later)
        made.append(Row(temperature, kind, name, speed, *ratios, steps, len(answers), same, decoding))
    order = [ALL, *dict.fromkeys(kinds)]
    return sorted(made, key=lambda row: (row.temperature, order.index(row.kind)))


def _ratio(
    ones: Mapping[Place, Answered], others: Mapping[Place, Answered], rate: Callable[[Answered], float | None]
) -> tuple[float, float]:
    """(geometric mean of the ratios of a rate, standard error), over the prompts for which both have one."""
    of_prompt: dict[int, list[float]] = {}
    for place in ones.keys() & others.keys():
        mine, theirs = rate(ones[place]), rate(others[place])
        if mine is not None and theirs is not None:
            of_prompt.setdefault(place[0], []).append(np.log(mine / theirs))
    if not of_prompt:
        return NO_RATIO
    logs = np.array([np.mean(each) for each in of_prompt.values()])  # rounds of one prompt are no samples of their own
    mean = float(np.exp(logs.mean()))
    return mean, mean * float(logs.std(ddof=1) / len(logs) ** 0.5) if len(logs) > 1 else float("nan")


def tables(report: Report, found: Sequence[Row], other: str | None = None) -> None:
    """Two tables for each temperature, of whole runs and of decoding: a row for each way, a column for each kind."""
    names = list(dict.fromkeys(row.name for row in found))
    for temperature in dict.fromkeys(row.temperature for row in found):
        these = [row for row in found if row.temperature == temperature]
        kinds = list(dict.fromkeys(row.kind for row in these))
        ratios = [f"x plain, {kind}" if len(kinds) > 1 else "x plain" for kind in kinds]
        same = ["same text as plain"] if temperature == 0 else []
        table = report.table(f"T = {temperature:g}", ["method", "tokens/s", *ratios, "tokens per step", *same], 2)
        table.notes += NOTES if other is None else [*NOTES, f"In brackets: x {other}."]
        for name in names:
            of = {row.kind: row for row in these if row.name == name}
            if not of:  # an interrupt came before
                continue
            whole = next(iter(of.values()))
            cells = [_ratios(of[kind]) if kind in of else "-" for kind in kinds]
            equal = [f"{whole.num_same} of {whole.num_answers}"] if same else []
            table.add(name, f"{whole.tokens_per_s:.0f}", *cells, whole.tokens_per_step, *equal)
        if all(math.isnan(row.decoding_vs_plain[0]) for row in these):
            continue
        decoding = report.table(f"T = {temperature:g}, once the prompt is read", ["method", *ratios], 1)
        decoding.notes.append(DECODING)
        for name in names:
            of = {row.kind: row for row in these if row.name == name}
            if of:
                decoding.add(name, *(_with_error(of[kind].decoding_vs_plain) if kind in of else "-" for kind in kinds))


def _ratios(row: Row) -> str:
    """Over plain decoding, with the error where there is one; in brackets over the other way, where there is one."""
    return _with_error(row.vs_plain) + ("" if np.isnan(row.vs_other[0]) else f" ({row.vs_other[0]:.2f})")


def _with_error(ratio: tuple[float, float]) -> str:
    value, error = ratio
    return f"{value:.2f}" + (f" ± {error:.2f}" if error > 0 else "")
