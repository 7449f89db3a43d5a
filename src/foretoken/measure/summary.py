"""Medians. Ratios are taken inside a round, where both sides met the same prompt and the same minute, then medians."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from foretoken.measure.methods import OURS, THEIRS
from foretoken.measure.rounds import Measurement
from foretoken.profile import PLAIN


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One method at one temperature and batch size. verifier: None where nothing is drafted, and for transformers.

    vs_plain, vs_transformers: tokens/s over our plain decoding's and transformers' plain one's at the same batch size.
    decoding_vs_plain: the same as vs_plain after the first tokens, that is without the prefill.
    vs_batch_1: over the same method's at batch 1. block_efficiency, acceptance_rate: over all runs together.
    outside_forwards, outside_scoring: see Measurement; memory in bytes.
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


def summarise(measurements: Sequence[Measurement]) -> list[Row]:
    """One row a (temperature, batch, method), each in the order in which it first came."""
    groups: dict[tuple[float, int, str, str], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.temperature, m.batch, m.system, m.method), []).append(m)
    temperatures = list(dict.fromkeys(m.temperature for m in measurements))
    batches = list(dict.fromkeys(m.batch for m in measurements))
    methods = list(dict.fromkeys((m.system, m.method) for m in measurements))
    speeds = _speeds((m, m.tokens_per_s) for m in measurements)
    decoding = _speeds((m, m.decoded_per_s) for m in measurements)
    rows = []
    for (temperature, batch, system, method), group in groups.items():
        tokens, forwards = sum(m.run.num_tokens for m in group), sum(m.run.num_target_forwards for m in group)
        drafted, accepted = sum(m.run.num_drafted for m in group), sum(m.run.num_accepted for m in group)
        rows.append(
            Row(
                system,
                method,
                group[0].verifier,
                batch,
                temperature,
                len(group),
                tokens_per_s=_spread([m.tokens_per_s for m in group]),
                vs_plain=_ratios(group, speeds, batch, OURS, PLAIN),
                decoding_vs_plain=_ratios(group, decoding, batch, OURS, PLAIN),
                vs_transformers=_ratios(group, speeds, batch, THEIRS, PLAIN),
                vs_batch_1=None if batch == 1 else _ratios(group, speeds, 1, system, method),
                block_efficiency=tokens / forwards,
                acceptance_rate=accepted / drafted if drafted else None,
                ttft_s=median(m.run.ttft_s for m in group),
                outside_forwards=median(m.outside_forwards for m in group),
                outside_scoring=_median(m.outside_scoring for m in group),
                memory_bytes_per_token=_median(m.run.memory_bytes_per_token for m in group),
            )
        )

    def place(row: Row) -> tuple[int, int, int]:
        return temperatures.index(row.temperature), batches.index(row.batch), methods.index((row.system, row.method))

    return sorted(rows, key=place)


Place = tuple[float, str, int, int, str, str]


def _speeds(found: Iterable[tuple[Measurement, float | None]]) -> dict[Place, float]:
    return {_place(m, m.batch, m.system, m.method): speed for m, speed in found if speed is not None}


def _place(m: Measurement, batch: int, system: str, method: str) -> Place:
    return m.temperature, m.prompt, m.round, batch, system, method


def _ratios(
    group: Sequence[Measurement], speeds: dict[Place, float], batch: int, system: str, method: str
) -> Spread | None:
    """Speeds of the group's runs over those of another method in the same rounds; None if it never ran there."""
    own = [speeds.get(_place(m, m.batch, m.system, m.method)) for m in group]
    others = [speeds.get(_place(m, batch, system, method)) for m in group]
    ratios = [mine / other for mine, other in zip(own, others, strict=True) if mine and other]
    return _spread(ratios) if ratios else None


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None
