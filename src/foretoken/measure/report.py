"""Tables of figures, and their output for a terminal, for a Markdown page and as JSON."""

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
        """Return the spread of `values`, at least one."""
        return Spread(median(values), min(values), max(values))

    def show(self, digits: int) -> str:
        """Return "median (low-high)" with `digits` decimals."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass
class Table:
    """One table of a report, with a title above it, and notes below.

    digits: the decimals of a float in any cell; one that would round to 0 is shown by its power of ten.
    rows: one value per column each, added as they are measured.
    """

    title: str
    columns: Sequence[str]
    digits: int = 3
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Add a row; raises ValueError unless there is one cell per column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(list(cells))

    def show(self, cell: Cell) -> str:
        """Return `cell` as text; None is "-"."""
        if cell is None:
            return "-"
        if not isinstance(cell, float):
            return str(cell)
        if cell == 0:
            return "0"
        return f"{cell:.0e}" if 0 < abs(cell) < 0.5 * 10**-self.digits else f"{cell:.{self.digits}f}"

    def markdown(self) -> str:
        """Return the table, with title and notes, in Markdown."""
        lines = [f"#### {self.title}", "", "| " + " | ".join(self.columns) + " |", "|---" * len(self.columns) + "|"]
        lines += ["| " + " | ".join(self.show(cell) for cell in row) + " |" for row in self.rows]
        return "\n".join([*lines, *([""] if self.notes else []), *(f"- {note}" for note in self.notes)])

    def json(self) -> dict[str, Any]:
        """Return the table as plain values: title, rows (one dict per row, by column) and notes."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": self.notes}


@dataclass
class Report:
    """The results of a command. They are added while it measures, so that an interrupt leaves what was done.

    header: settings and machine, as plain values by name.
    interrupted: whether Ctrl-C ended the measurement early.
    figures: entries of the JSON in place of the title and the tables, where it has more than they show; None: none.
    """

    title: str
    header: Mapping[str, Any]
    tables: list[Table] = field(default_factory=list)
    interrupted: bool = False
    figures: Mapping[str, Any] | None = None
    _printed: int | None = field(default=None, init=False, repr=False)  # tables; None before the header

    def table(self, title: str, columns: Sequence[str], digits: int = 3) -> Table:
        """Add an empty table and return it; title, columns, digits: as in Table."""
        self.tables.append(Table(title, columns, digits))
        return self.tables[-1]

    def json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        if self.figures is not None:
            return {**self.header, "interrupted": self.interrupted, **self.figures}
        tables = [table.json() for table in self.tables]
        return {"title": self.title, **self.header, "interrupted": self.interrupted, "tables": tables}

    def markdown(self) -> str:
        """Return the report in Markdown."""
        parts = [f"### {self.title}", "; ".join(f"{key} {value}" for key, value in self.header.items())]
        parts += [table.markdown() for table in self.tables]
        return "\n\n".join([*parts, *([self._interrupted] if self.interrupted else [])])

    def print(self) -> None:
        """Print what is not printed yet to stdout, as wide as the terminal, or 150 columns where there is none."""
        console = self._print(len(self.tables))
        if self.interrupted:
            console.print(self._interrupted)

    @property
    def _interrupted(self) -> str:
        if any(table.rows for table in self.tables):
            return "Interrupted: the figures are of what was done."
        return "Interrupted before there were any figures."

    def print_finished(self) -> None:
        """Print the tables that are complete: all but the last one, to which rows are still added."""
        self._print(len(self.tables) - 1)

    def _print(self, most: int) -> Console:
        """Print the header and the first `most` tables, as far as they are not printed yet."""
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
