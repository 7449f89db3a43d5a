"""A table of figures: for a terminal, for a Markdown page, for a program."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

Cell = str | float | int | None


@dataclass(frozen=True)
class Spread:
    """The median of some figures, the lowest and the highest."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        return Spread(median(values), min(values), max(values))

    def show(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass
class Table:
    """title, column names, rows as they are measured, and notes below. digits: decimals of a float in any cell (one
    that would vanish is shown by its power of ten)."""

    title: str
    columns: Sequence[str]
    digits: int = 3
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(list(cells))

    def show(self, cell: Cell) -> str:
        if cell is None:
            return "-"
        if not isinstance(cell, float):
            return str(cell)
        if cell == 0:
            return "0"
        return f"{cell:.0e}" if 0 < abs(cell) < 0.5 * 10**-self.digits else f"{cell:.{self.digits}f}"

    def markdown(self) -> str:
        lines = [f"#### {self.title}", "", "| " + " | ".join(self.columns) + " |", "|---" * len(self.columns) + "|"]
        lines += ["| " + " | ".join(self.show(cell) for cell in row) + " |" for row in self.rows]
        return "\n".join([*lines, *([""] if self.notes else []), *(f"- {note}" for note in self.notes)])

    def json(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": self.notes}


@dataclass
class Report:
    """What a command found. It grows while it is measured, so that an interrupt leaves what was done.

    header: settings and machine, as plain values.
    figures: what the JSON has in place of the title and the tables, where a program wants more than they show.
    """

    title: str
    header: Mapping[str, Any]
    tables: list[Table] = field(default_factory=list)
    interrupted: bool = False
    figures: Mapping[str, Any] | None = None
    _printed: int | None = field(default=None, init=False, repr=False)  # tables; None: not the header either

    def table(self, title: str, columns: Sequence[str], digits: int = 3) -> Table:
        self.tables.append(Table(title, columns, digits))
        return self.tables[-1]

    def json(self) -> dict[str, Any]:
        if self.figures is not None:
            return {**self.header, "interrupted": self.interrupted, **self.figures}
        tables = [table.json() for table in self.tables]
        return {"title": self.title, **self.header, "interrupted": self.interrupted, "tables": tables}

    def markdown(self) -> str:
        parts = [f"### {self.title}", "; ".join(f"{key} {value}" for key, value in self.header.items())]
        parts += [table.markdown() for table in self.tables]
        return "\n\n".join([*parts, *([self._interrupted] if self.interrupted else [])])

    def print(self) -> None:
        """To stdout, as wide as the terminal, or 150 columns where there is none; what is printed is not repeated."""
        console = self._print(len(self.tables))
        if self.interrupted:
            console.print(self._interrupted)

    @property
    def _interrupted(self) -> str:
        done = any(table.rows for table in self.tables)
        return (
            "Interrupted: the figures are of what was done." if done else "Interrupted before there were any figures."
        )

    def print_finished(self) -> None:
        """The tables that are whole: all but the last, which grows."""
        self._print(len(self.tables) - 1)

    def _print(self, most: int) -> Console:
        console = Console(width=None if sys.stdout.isatty() else 150, highlight=False, markup=False, emoji=False)
        if self._printed is None:
            console.print(self.title)
            console.print("; ".join(f"{key} {value}" for key, value in self.header.items()))
            self._printed = 0
        for table in self.tables[self._printed : most]:
            console.print(f"\n{table.title}")
            shown = RichTable(box=SIMPLE_HEAD, pad_edge=False)
            for i, column in enumerate(table.columns):
                shown.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
            for row in table.rows:
                shown.add_row(*map(table.show, row))
            console.print(shown)
            for note in table.notes:
                console.print(f"  {note}")
        self._printed = max(self._printed, most)
        return console
