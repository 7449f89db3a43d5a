"""What everything that is measured stands on: turns, files that are gone on from, tables, medians of paired ratios."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.book import Book
from foretoken.core.errors import ForetokenError
from foretoken.measure.comparison import Measurement, Row, summarise
from foretoken.measure.harness import blocks, interleave, until_interrupted
from foretoken.measure.methods import Run
from foretoken.measure.report import Report, Spread, Table
from foretoken.measure.results import Journal

# Turns.


def test_methods_take_turns_in_an_order_that_rotates_each_warm() -> None:
    ran, lines = [], []
    every = blocks(2, 2, [0.5])
    methods = {name: name.upper() for name in "abc"}
    run, warm = (lambda m, block: ran.append(f"{m} {block.number}")), (lambda m: ran.append(f"{m} warm"))
    turns = list(interleave(methods, every, run, warm, lines.append))
    assert ran[:3] == ["A warm", "B warm", "C warm"]
    assert ran[3:] == [f"{m} {number}" for number, order in enumerate(["ABC", "BCA", "CAB", "ABC"]) for m in order]
    second = [(turn.name, turn.order, turn.last) for turn in turns[3:6]]
    assert second == [("b", 0, False), ("c", 1, False), ("a", 2, True)]
    assert lines[3] == "[1/12] round 1/2, prompt 1/2, temperature 0.5: a"
    assert lines[-1] == "[12/12] round 2/2, prompt 2/2, temperature 0.5: c"


def test_what_is_known_is_passed_over_and_warms_nothing() -> None:
    ran = []
    run, warm = (lambda _, block: ran.append(block)), (lambda _: ran.append("warm"))
    list(interleave({"a": 1}, [0, 1, 2], run, warm, print, lambda block: block < 2))
    assert ran == ["warm", 2]
    list(interleave({"a": 1}, [0, 1], lambda *_: 1 / 0, lambda _: 1 / 0, print, lambda _: True))


def test_what_was_measured_before_an_interrupt_is_kept() -> None:
    def found(until: int):
        yield from range(until)
        raise KeyboardInterrupt

    done: list[int] = []
    assert until_interrupted(found(3), done)
    assert done == [0, 1, 2]
    assert not until_interrupted(iter([3]), done)
    with pytest.raises(KeyboardInterrupt):
        until_interrupted(found(0), [])


# Files.


@dataclass(frozen=True)
class Found:
    name: str
    values: tuple[int, ...]


def book(path: Path, settings: dict, commit: str = "a") -> Book[Found]:
    return Book(str(path), Found, settings, {"commit": commit}, "runs")


def test_a_stopped_measurement_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    first = book(path, {"seed": 0})
    first.add(Found("a", (1, 2)))
    first.add(Found("b", (3,)))
    whole = path.read_text()
    path.write_text(whole[:-10])  # stopped in the middle of a line
    again = book(path, {"seed": 0}, "b")
    assert again.found == [Found("a", (1, 2))]
    again.add(Found("b", (3,)))
    assert book(path, {"seed": 0}).found == [Found("a", (1, 2)), Found("b", (3,))]
    assert [json.loads(line)["commit"] for line in path.read_text().splitlines()] == ["a", "b"]
    with pytest.raises(ForetokenError, match="seed 0, not 1: name another --out"):
        book(path, {"seed": 1})
    for foreign in (b"{}\n", b'{"results": []}', b"\xff\xfe\x00", b"no line ends here"):
        path.write_bytes(foreign)
        with pytest.raises(ForetokenError, match="holds no runs: name another --out"):
            book(path, {"seed": 0})
        assert path.read_bytes() == foreign


def test_a_journal_goes_on_where_it_stopped(tmp_path):
    path = str(tmp_path / "j")
    calls = []

    def measure() -> list[float]:
        calls.append(1)
        return [0.5]

    assert Journal(path, {"seed": 0}).once("a", measure) == [0.5]
    assert Journal(path, {"seed": 0}).once("a", measure) == [0.5]
    assert len(calls) == 1
    assert len(Journal(path, {"seed": 1})) == 0
    assert [Journal(path, {"seed": seed}).replaces for seed in (0, 1)] == [False, True]
    for useless in ("{}", "[1]", "[" * 10_000, json.dumps({"key": {"seed": 0}, "done": 3})):
        (tmp_path / "j").write_text(useless)
        assert len(Journal(path, {"seed": 0})) == 0
        assert Journal(path, {"seed": 0}).replaces
    journal = Journal(path, {"seed": 0})
    journal.close()
    assert not (tmp_path / "j").exists()


# Tables.


def test_a_table_shows_itself_in_three_ways() -> None:
    report = Report("title", {"seed": 3})
    table = report.table("some figures", ["rule", "x", "y"], digits=2)
    table.add("rrs", 0.5, None)
    table.add("rrsw", 3e-16, 7)
    table.notes.append("a note")
    made = [{"rule": "rrs", "x": 0.5, "y": None}, {"rule": "rrsw", "x": 3e-16, "y": 7}]
    shown = {"title": "some figures", "rows": made, "notes": ["a note"]}
    assert report.json() == {"title": "title", "seed": 3, "interrupted": False, "tables": [shown]}
    assert "| rrs | 0.50 | - |" in report.markdown()
    assert "| rrsw | 3e-16 | 7 |" in report.markdown()
    with pytest.raises(ValueError, match="2 cells for 3 columns"):
        Table("t", ["a", "b", "c"]).add(1, 2)


def test_tables_are_printed_once_and_as_soon_as_they_are_whole(capsys) -> None:
    report = Report("title", {"seed": 0})
    report.table("early", ["a"]).add(1)
    report.print_finished()
    assert "early" not in capsys.readouterr().out, "it may still grow"
    report.table("late", ["a"])
    report.print_finished()
    first = capsys.readouterr().out
    assert ("early" in first, "late" in first, "title" in first) == (True, False, False)
    report.interrupted = True
    report.print()
    rest = capsys.readouterr().out
    assert ("early" in rest, "late" in rest, "title" in rest, "Interrupted" in rest) == (False, True, False, True)


# Medians.


def measurement(
    system: str, method: str, round_: int, tokens_per_s: float, run: Mapping[str, Any] = {}, **changes: object
) -> Measurement:
    """run: fields of the Run."""
    timed = Run(100, 50, 80, 50, 100 / tokens_per_s, 0.1, 75 / tokens_per_s, None, 10.0, 1, **run)
    fields = {"batch": 1, "temperature": 0.0, "prompt": "p", "order": 0, "seed": 0, "verifier": None} | changes
    return Measurement(system=system, method=method, round=round_, run=timed, **fields)  # pyright: ignore


def values(spread: Spread | None) -> tuple[float, float, float]:
    return spread.median, spread.low, spread.high


def rows(measurements: list[Measurement]) -> dict[tuple[str, str, int], Row]:
    return {(row.system, row.method, row.batch): row for row in summarise(measurements)}


def test_milliseconds_per_token_are_of_the_target_of_drafting_and_the_rest() -> None:
    of_ours = {"target_s": 0.6, "drafting_s": 0.3}
    runs = {  # 100 tokens in a second
        "plain": measurement("foretoken", "plain", 0, 100, run={"target_s": 0.9}),
        "chain:4": measurement("foretoken", "chain:4", 0, 100, run=of_ours, verifier="block"),
        "head": measurement("foretoken", "head", 0, 100, run={"target_s": 0.9}, verifier="block"),
        "theirs": measurement("transformers", "theirs", 0, 100),
    }
    found = {row.method: row.ms_per_token for row in summarise(list(runs.values()))}
    assert found["plain"] == pytest.approx({"target": 9, "drafting": 0, "the rest": 1})
    assert found["chain:4"] == pytest.approx({"target": 6, "drafting": 3, "the rest": 1})
    assert found["head"] is found["theirs"] is None


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


def test_rows_stand_by_temperature_then_batch_then_method_each_as_they_came() -> None:
    came = [(1.0, 8, "plain"), (1.0, 8, "chain:4"), (0.0, 1, "chain:4"), (0.0, 8, "plain"), (1.0, 1, "plain")]
    found = summarise([measurement("foretoken", m, 0, 1, temperature=t, batch=b) for t, b, m in came])
    order = [(row.temperature, row.batch, row.method) for row in found]
    assert order == [came[0], came[1], came[4], came[3], came[2]]
