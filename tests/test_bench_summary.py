"""Medians and paired ratios, on made-up measurements."""

import pytest

from foretoken.measure.comparison import Measurement, Row, Spread, summarise
from foretoken.measure.methods import Run


def measurement(system: str, method: str, round_: int, tokens_per_s: float, **changes: object) -> Measurement:
    run = Run(100, 50, 80, 50, 100 / tokens_per_s, 0.1, 75 / tokens_per_s, None, 10.0, 1)
    fields = {"batch": 1, "temperature": 0.0, "prompt": "p", "order": 0, "seed": 0} | changes
    return Measurement(system=system, method=method, verifier=None, round=round_, run=run, **fields)  # pyright: ignore


def values(spread: Spread | None) -> tuple[float, float, float]:
    assert spread is not None
    return spread.median, spread.low, spread.high


def rows(measurements: list[Measurement]) -> dict[tuple[str, str, int], Row]:
    return {(row.system, row.method, row.batch): row for row in summarise(measurements)}


def test_ratios_are_paired_so_that_a_slow_minute_does_not_count() -> None:
    found = []
    for round_, machine in enumerate([1.0, 0.1, 0.5]):  # the machine's speed in each round
        found.append(measurement("foretoken", "plain", round_, 100 * machine))
        found.append(measurement("foretoken", "chain:4", round_, 200 * machine))
        found.append(measurement("transformers", "plain", round_, 50 * machine))
    row = rows(found)["foretoken", "chain:4", 1]
    assert values(row.tokens_per_s) == pytest.approx((100, 20, 200))
    assert values(row.vs_plain) == pytest.approx((2, 2, 2))
    # 99 tokens after 0.1 s: (1 - 0.1) / (0.5 - 0.1) in the fast round, and so on.
    assert values(row.decoding_vs_plain) == pytest.approx((1.9 / 0.9, 9.9 / 4.9, 0.9 / 0.4))
    assert values(row.vs_transformers) == pytest.approx((4, 4, 4))
    assert row.vs_batch_1 is None
    assert row.num_runs == 3
    assert row.block_efficiency == 2.0
    assert row.acceptance_rate == 50 / 80
    assert row.outside_forwards == pytest.approx(0.25)
    assert row.outside_scoring is None


def test_batches_are_set_against_their_own_batch_size_and_against_batch_1() -> None:
    found = [
        measurement("foretoken", "plain", 0, 100),
        measurement("foretoken", "plain", 0, 400, batch=8),
        measurement("foretoken", "chain:4", 0, 150),
        measurement("foretoken", "chain:4", 0, 500, batch=8),
    ]
    row = rows(found)["foretoken", "chain:4", 8]
    assert values(row.vs_plain)[0] == pytest.approx(1.25)
    assert values(row.vs_batch_1)[0] == pytest.approx(500 / 150)
    assert row.vs_transformers is None  # it never ran


def test_rows_stand_by_temperature_then_batch_then_method() -> None:
    found = [
        measurement("foretoken", "plain", 0, 1),
        measurement("foretoken", "chain:4", 0, 1),
        measurement("foretoken", "chain:4", 0, 1, temperature=1.0),
        measurement("foretoken", "plain", 0, 1, temperature=1.0),
        measurement("foretoken", "plain", 0, 1, batch=8),
    ]
    order = [(row.temperature, row.batch, row.method) for row in summarise(found)]
    assert order == [(0.0, 1, "plain"), (0.0, 1, "chain:4"), (0.0, 8, "plain"), (1.0, 1, "plain"), (1.0, 1, "chain:4")]
