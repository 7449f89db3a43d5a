"""A benchmark on paper: a table to read, one JSON object to compute with, lines of JSONL to keep."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foretoken.core.errors import ForetokenError
from foretoken.measure.summary import Row, Spread

NOTES = """\
tokens/s, x plain, x transformers: medians (lowest to highest) of the runs, and of ratios taken inside a round.
x plain: over our plain decoding; decoding: the same after the first token, without the prefill. x transformers: over
transformers' plain generate. Same batch size in all.
tokens/forward: emitted tokens per target forward, bonus included. accepted: share of drafted tokens that were emitted.
TTFT: time to the first token. outside: share of the wall clock spent outside calls of the models; in brackets, outside
our scoring, which is those calls, masks and cache. KiB/token: growth of the peak memory after the first token."""


def as_json(header: dict[str, Any], rows: Sequence[Any], interrupted: bool) -> dict[str, Any]:
    """One object of a report whose rows are dataclasses."""
    return {**header, "interrupted": interrupted, "rows": [asdict(row) for row in rows]}


def machine_line(header: dict[str, Any]) -> str:
    """What `bench.machine` told, and the dtype."""
    h = header
    return (
        f"{h['cpu']}, {h['cores']} cores, {h['threads']} threads, load {h['load_average']}, device {h['device']}, "
        f"{h['dtype']}; torch {h['torch']}, transformers {h['transformers']}, foretoken {h['foretoken']}, commit "
        f"{h['commit']}"
    )


def wide_console() -> Console:
    """stdout, as wide as the terminal, or 150 columns where there is none."""
    return Console(width=None if sys.stdout.isatty() else 150, highlight=False, markup=False, emoji=False)


@dataclass(frozen=True)
class Report:
    """header: machine, models and settings, as plain values. interrupted: the last rounds are missing."""

    header: dict[str, Any]
    rows: Sequence[Row]
    interrupted: bool = False

    def json(self) -> dict[str, Any]:
        return as_json(self.header, self.rows, self.interrupted)

    def print(self) -> None:
        """To stdout."""
        console = wide_console()
        h = self.header
        console.print(
            machine_line(h),
            f"target {h['target']}, {h['num_params'] / 1e6:.1f} M parameters, {h['label']}; drafter {h['drafter']}; "
            f"execution {h['execution']}; {h['max_new_tokens']} new tokens, "
            f"{h['num_prompts']} prompts, {h['rounds']} rounds, seed {h['seed']}",
            sep="\n",
        )
        for temperature, batch in dict.fromkeys((row.temperature, row.batch) for row in self.rows):
            rows = [row for row in self.rows if (row.temperature, row.batch) == (temperature, batch)]
            console.print(_table(f"temperature {temperature:g}, batch {batch}, {h['label']}", rows))
        console.print(NOTES)
        if self.interrupted:
            console.print("Interrupted: the figures are of the runs that were done.")


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    batched = any(row.vs_batch_1 for row in rows)
    columns = ["tokens/s", "x plain", "decoding", "x transformers", *(["x batch 1"] if batched else []),
               "tokens/forward", "accepted", "TTFT ms", "outside", "KiB/token"]  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        cells = [
            _spread(row.tokens_per_s, 1),
            _spread(row.vs_plain, 2),
            "-" if row.decoding_vs_plain is None else f"{row.decoding_vs_plain.median:.2f}",
            _spread(row.vs_transformers, 2),
            *([_spread(row.vs_batch_1, 2)] if batched else []),
            f"{row.block_efficiency:.2f}",
            "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.2f}",
            f"{row.ttft_s * 1000:.0f}",
            _outside(row),
            "-" if row.memory_bytes_per_token is None else f"{row.memory_bytes_per_token / 1024:.1f}",
        ]
        rule = "" if row.verifier is None else f", {row.verifier}"
        table.add_row(f"{row.system} {row.method}{rule}", *cells)
    return table


def _spread(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def _outside(row: Row) -> str:
    text = f"{row.outside_forwards:.0%}"
    return text if row.outside_scoring is None else f"{text} ({row.outside_scoring:.0%})"


@runtime_checkable
class Recorded(Protocol):
    def record(self) -> dict[str, Any]: ...


L = TypeVar("L", bound=Recorded)


class Lines:
    """JSONL that appears under its name when it is complete: lines go to FILE.tmp, which is moved on leaving."""

    def __init__(self, path: str, header: dict[str, Any]) -> None:
        self.path = Path(path)
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._header = header
        try:
            self._file = self._temporary.open("w")  # now, not after minutes of measuring
        except OSError as error:
            raise self._cannot(error) from error

    def __enter__(self) -> "Lines":
        return self

    def add(self, line: Recorded) -> None:
        try:
            self._file.write(json.dumps({**line.record(), **self._header}) + "\n")
        except OSError as error:
            raise self._cannot(error) from error

    def collect(self, lines: Iterable[L], done: list[L]) -> bool:
        """Add every line, to `done` too; whether Ctrl-C ended it early. Before the first line it is raised."""
        try:
            for line in lines:
                done.append(line)
                self.add(line)
        except KeyboardInterrupt:
            if not done:
                raise
            return True
        return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._file.close()
            if kind is None:
                os.replace(self._temporary, self.path)
        except OSError as failure:
            if kind is None:
                raise self._cannot(failure) from failure
        finally:
            self._temporary.unlink(missing_ok=True)

    def _cannot(self, error: OSError) -> ForetokenError:
        return ForetokenError(f"Cannot write {self.path}: {error.strerror}.")
