"""`foretoken bench`: our decoding and transformers' own `generate` on the same prompts, interleaved in one process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from statistics import median
from typing import Any

from foretoken.measure.harness import WARM_TOKENS, Block, Progress, blocks, interleave
from foretoken.measure.methods import OURS, THEIRS, Method, Run
from foretoken.measure.plot import OUR_COLOR, THEIR_COLOR, Bar, Panel, Stack
from foretoken.measure.report import Report, Spread
from foretoken.recipe import PLAIN

NOTES = [
    "tokens/s, x plain, x transformers: medians (lowest to highest) of the runs, and of ratios taken inside a round.",
    "x plain: over our plain decoding; decoding: the same after the first token, without the prefill. x transformers: "
    "over transformers' plain generate. Same batch size in all.",
    "tokens/forward: emitted tokens per target forward, bonus included. accepted: share of drafted tokens that were "
    "emitted.",
    "TTFT: time to the first token. outside: share of the wall clock spent outside calls of the models; in brackets, "
    "outside our scoring, which is those calls, masks and cache. KiB/token: growth of the peak memory after the "
    "first token.",
]


@dataclass(frozen=True)
class Measurement:
    """One run of one method. Methods are compared where temperature, prompt, round and batch are equal.

    system: OURS or THEIRS.
    verifier: the name of the rule; None where nothing is drafted, and for transformers.
    batch: the number of prompts.
    prompt: the number, from 1, of the first of the run's prompts.
    round: number of the round, from 0.
    order: the method's place among those that ran on this block, from 0.
    """

    system: str
    method: str
    verifier: str | None
    batch: int
    temperature: float
    prompt: str
    round: int
    order: int
    seed: int
    run: Run

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, all sequences of the batch together."""
        return self.run.num_tokens / self.run.wall_s

    @property
    def decoded_per_s(self) -> float | None:
        """Tokens per second after the first ones, without the prefill; None where all tokens came at once."""
        return self.run.decoding_tokens_per_s

    @property
    def outside_forwards(self) -> float:
        """The share of the wall clock outside calls of the models."""
        return 1 - self.run.forward_s / self.run.wall_s

    @property
    def outside_scoring(self) -> float | None:
        """The share of the wall clock outside our rows' score, extend and keep; None for transformers."""
        return None if self.run.scoring_s is None else 1 - self.run.scoring_s / self.run.wall_s

    def record(self) -> dict[str, Any]:
        """Return the entries of a line of JSONL. block_efficiency is the mean number of tokens per step."""
        fields = {name: value for name, value in vars(self).items() if name != "run"}
        run = self.run
        return fields | run.record() | {
            "tokens_per_s": self.tokens_per_s,
            "decoded_per_s": self.decoded_per_s,
            "block_efficiency": run.num_tokens / run.num_target_forwards,
            "acceptance_rate": run.num_accepted / run.num_drafted if run.num_drafted else None,
            "outside_forwards": self.outside_forwards,
            "outside_scoring": self.outside_scoring,
        }  # fmt: skip


def compare(
    methods: Sequence[Method],
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    rounds: int,
    seed: int,
    progress: Progress,
) -> Iterator[Measurement]:
    """Run every method on every prompt, and yield each result at once.

    methods: what is compared.
    temperatures: the sampling temperatures.
    rounds: how often every method runs on every prompt.
    prompts: the ids of each prompt. A batch takes the block's prompt and those after it; the first follows the last.
    max_new_tokens: the most tokens of each text.
    seed: of the first block; each block has one of its own.
    progress: shows what runs.
    """
    named = {f"{m.system} {m.name}, batch {m.batch}": m for m in methods}

    def run(method: Method, first: int, new: int, temperature: float, seed: int) -> Run:
        batch = [prompts[(first + j) % len(prompts)] for j in range(method.batch)]
        return method.run(batch, new, temperature, seed)

    def warm(method: Method) -> None:
        for temperature in temperatures:
            run(method, 0, min(WARM_TOKENS, max_new_tokens), temperature, seed)

    def measured(method: Method, block: Block) -> Run:
        return run(method, block.prompt, max_new_tokens, block.temperature, seed + block.number)

    for turn in interleave(named, blocks(rounds, len(prompts), temperatures), measured, warm, progress):
        m, block = named[turn.name], turn.block
        yield Measurement(
            *(m.system, m.name, m.verifier, m.batch, block.temperature, str(block.prompt + 1), block.round),
            *(turn.order, seed + block.number, turn.result),
        )


@dataclass(frozen=True)
class Row:
    """All runs of one method at one temperature and batch size. A ratio is None where the other side did not run.

    system, method, verifier, batch, temperature: as in Measurement.
    num_runs: the number of runs.
    vs_plain, vs_transformers: tokens/s over those of our plain decoding, and of transformers' plain one, at the same
        batch size.
    decoding_vs_plain: as vs_plain, but after the first tokens, that is without the prefill.
    vs_batch_1: tokens/s over those of the same method at batch size 1.
    block_efficiency, acceptance_rate: tokens per step, and the share of draft tokens that were emitted (None if nothing
        was drafted), over all runs together.
    ms_per_token: milliseconds by part of the work, see `_parts`.

    The other fields are medians of those of the runs, None where all of these are.
    """

    system: str
    method: str
    verifier: str | None
    batch: int
    temperature: float
    num_runs: int
    tokens_per_s: Spread
    vs_plain: Spread | None
    decoding_vs_plain: Spread | None
    vs_transformers: Spread | None
    vs_batch_1: Spread | None
    block_efficiency: float
    acceptance_rate: float | None
    ttft_s: float
    outside_forwards: float
    outside_scoring: float | None
    memory_bytes_per_token: float | None
    ms_per_token: dict[str, float] | None

    def cells(self, batched: bool) -> list[str]:
        """Return the row's cells in the table of `report`; batched: whether one is of the ratio to batch size 1."""
        outside = f"{self.outside_forwards:.0%}"
        rule = "" if self.verifier is None else f", {self.verifier}"
        return [
            f"{self.system} {self.method}{rule}",
            self.tokens_per_s.show(1),
            _shown(self.vs_plain),
            "-" if self.decoding_vs_plain is None else f"{self.decoding_vs_plain.median:.2f}",
            _shown(self.vs_transformers),
            *([_shown(self.vs_batch_1)] if batched else []),
            f"{self.block_efficiency:.2f}",
            "-" if self.acceptance_rate is None else f"{self.acceptance_rate:.2f}",
            f"{self.ttft_s * 1000:.0f}",
            outside if self.outside_scoring is None else f"{outside} ({self.outside_scoring:.0%})",
            "-" if self.memory_bytes_per_token is None else f"{self.memory_bytes_per_token / 1024:.1f}",
        ]


def _shown(spread: Spread | None) -> str:
    return "-" if spread is None else spread.show(2)


# {(prompt, round): run} of one method at one temperature and batch size
Runs = Mapping[tuple[str, int], Measurement]


def summarise(measurements: Sequence[Measurement]) -> list[Row]:
    """Return a row of the `measurements` per temperature, batch size and method, each in the order it first came in.

    Each ratio is of two runs on the same prompt in the same round, which were close in time.
    """
    groups: dict[tuple[float, int, str, str], dict[tuple[str, int], Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.temperature, m.batch, m.system, m.method), {})[m.prompt, m.round] = m
    temperatures = dict.fromkeys(m.temperature for m in measurements)
    batches = dict.fromkeys(m.batch for m in measurements)
    methods = dict.fromkeys((m.system, m.method) for m in measurements)
    rows = []
    for temperature, batch, (system, method) in product(temperatures, batches, methods):
        group = groups.get((temperature, batch, system, method))
        if group is None:
            continue
        found, runs = list(group.values()), [m.run for m in group.values()]
        tokens, forwards = sum(run.num_tokens for run in runs), sum(run.num_target_forwards for run in runs)
        drafted, accepted = sum(run.num_drafted for run in runs), sum(run.num_accepted for run in runs)
        plain = groups.get((temperature, batch, OURS, PLAIN), {})
        theirs = groups.get((temperature, batch, THEIRS, PLAIN), {})
        single = {} if batch == 1 else groups.get((temperature, 1, system, method), {})
        rows.append(
            Row(
                *(system, method, found[0].verifier, batch, temperature, len(found)),
                tokens_per_s=Spread.of([m.tokens_per_s for m in found]),
                vs_plain=_ratios(group, plain, lambda m: m.tokens_per_s),
                decoding_vs_plain=_ratios(group, plain, lambda m: m.decoded_per_s),
                vs_transformers=_ratios(group, theirs, lambda m: m.tokens_per_s),
                vs_batch_1=_ratios(group, single, lambda m: m.tokens_per_s),
                block_efficiency=tokens / forwards,
                acceptance_rate=accepted / drafted if drafted else None,
                ttft_s=median(run.ttft_s for run in runs),
                outside_forwards=median(m.outside_forwards for m in found),
                outside_scoring=_median(m.outside_scoring for m in found),
                memory_bytes_per_token=_median(run.memory_bytes_per_token for run in runs),
                ms_per_token=_parts(runs, found[0].verifier is not None),
            )
        )
    return rows


def _parts(runs: Sequence[Run], drafts: bool) -> dict[str, float] | None:
    """Return milliseconds per new token over all runs, prefill included, by part: target, drafting, the rest.

    Returns None where drafting is not measured by itself, as with draft heads, and for transformers.
    """
    if any(run.target_s is None or (drafts and run.drafting_s is None) for run in runs):
        return None
    target, drafting = sum(run.target_s or 0.0 for run in runs), sum(run.drafting_s or 0.0 for run in runs)
    seconds = {"target": target, "drafting": drafting, "the rest": sum(run.wall_s for run in runs) - target - drafting}
    return {name: 1000 * each / sum(run.num_tokens for run in runs) for name, each in seconds.items()}


def _ratios(group: Runs, others: Runs, speed: Callable[[Measurement], float | None]) -> Spread | None:
    """Return the speeds of one method over those of another in the same rounds; None if the other never ran there."""
    pairs = [(speed(m), speed(others[place])) for place, m in group.items() if place in others]
    ratios = [mine / other for mine, other in pairs if mine and other]
    return Spread.of(ratios) if ratios else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None


def report(header: dict[str, Any], rows: Sequence[Row], interrupted: bool) -> Report:
    """Return the report of a comparison, with a table per temperature and batch size.

    header: machine, models and settings, as plain values by name; its "label" is shown above each table.
    rows: as `summarise` returns them.
    interrupted: whether Ctrl-C ended the comparison early.
    """
    found = Report("foretoken bench", header, [], interrupted, {"rows": [asdict(row) for row in rows]})
    for (temperature, batch), shown in _panels(rows).items():
        batched = any(row.vs_batch_1 for row in shown)
        columns = ["method", "tokens/s", "x plain", "decoding", "x transformers", *(["x batch 1"] if batched else []),
                   "tokens/forward", "accepted", "TTFT ms", "outside", "KiB/token"]  # fmt: skip
        table = found.table(f"temperature {temperature:g}, batch {batch}, {header['label']}", columns)
        for row in shown:
            table.add(*row.cells(batched))
    if found.tables:
        found.tables[-1].notes = NOTES
    return found


def bars(rows: Sequence[Row]) -> list[Panel]:
    """Return panels for `plot` of the `rows`: medians of tokens/s, and our time per token by part."""
    panels = []
    for (temperature, batch), shown in _panels(rows).items():
        content = [
            Bar(f"{row.system}\n{row.method}", row.tokens_per_s, OUR_COLOR if row.system == OURS else THEIR_COLOR)
            for row in reversed(shown)
        ]
        title = f"temperature {temperature:g}, batch {batch}"
        panels.append(Panel(title, "tokens/s", "", content))
        parts = [Stack(f"{row.system}\n{row.method}", row.ms_per_token) for row in reversed(shown) if row.ms_per_token]
        if parts:
            panels.append(Panel(title, "ms per token", "", parts))
    return panels


def _panels(rows: Sequence[Row]) -> dict[tuple[float, int], list[Row]]:
    """Return the rows by (temperature, batch size), by which `summarise` has put them in order."""
    return {place: list(of) for place, of in groupby(rows, lambda row: (row.temperature, row.batch))}
