"""Forwards on paper: tables of milliseconds, one JSON object, a picture of the three curves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foretoken.bench.execution import THREAD, Row
from foretoken.bench.figure import save
from foretoken.bench.forwards import EAGER, TRACED, Curves, Place
from foretoken.bench.methods import THEIRS
from foretoken.bench.plot import OUR_COLOR, THEIR_COLOR
from foretoken.bench.report import as_json, machine_line, wide_console

CLOCKS = {True: "CPU time of the one thread", False: "wall clock"}
COLORS = {THEIRS: THEIR_COLOR, EAGER: "#e9a23b", TRACED: "#7a4fa3"}
NOTES = """\
ms: of one forward, median (lowest to highest) of the rounds. x: times as fast as transformers, and as our eager path;
medians of ratios taken inside a round. GB/s: weights read a second; weights that fit the processor's caches can pass
the memory's bandwidth."""


@dataclass(frozen=True)
class Report:
    """header: machine, model and settings, as plain values; header["paths"]: {name: what it is}."""

    header: dict[str, Any]
    curves: Curves
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
            f"target {h['target']}, {h['num_params'] / 1e6:.1f} M parameters, {h['label']}; memory "
            f"{h['memory_gb_s']:.1f} GB/s; {CLOCKS[h['clock'] == THREAD]}; {h['rounds']} rounds",
            *(f"{name}: {what}" for name, what in h["paths"].items()),
            sep="\n",
        )
        curves = self.curves
        titles = (("nodes", curves.over_nodes), ("context", curves.over_context), ("batch", curves.over_batch))
        for title, places in titles:
            if title == "nodes" or len(places) > 2:
                console.print(self._table(f"over {title}", places))
        console.print(NOTES)
        if self.interrupted:
            console.print("Interrupted: the figures are of the rounds that were done.")

    def _table(self, title: str, places: Sequence[Place]) -> Table:
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("nodes", "context", "batch"):
            table.add_column(column, justify="right")
        names = list(self.header["paths"])
        for name in names:
            table.add_column(f"{name} ms", justify="right")
            if name != THEIRS:
                table.add_column("x", justify="right")
            table.add_column("GB/s", justify="right")
        found = {(row.place, row.path): row for row in self.rows}
        for place in places:
            if (place, names[0]) not in found:
                continue
            cells = [str(place.nodes), str(place.context), str(place.batch)]
            for name in names:
                row = found[place, name]
                cells.append(f"{row.ms.median:.2f} ({row.ms.low:.2f}-{row.ms.high:.2f})")
                if name != THEIRS:
                    of_eager = "" if name == EAGER else f", {row.vs_eager.median:.2f}"
                    cells.append(f"{row.vs_transformers.median:.2f}{of_eager}")
                cells.append(f"{row.gb_s:.1f}")
            table.add_row(*cells)
        return table


def plot(report: Report, path: str) -> None:
    """One panel a curve: medians of ms a forward on logarithmic axes; dashed at 1 node where there are two."""
    from matplotlib.figure import Figure

    curves = report.curves
    panels = {"nodes": curves.over_nodes, "context": curves.over_context, "batch": curves.over_batch}
    figure = Figure(figsize=(13.5, 4.0), layout="constrained")
    figure.suptitle(f"{report.header['target']}, {report.header['label']}: one forward")
    found = {(row.place, row.path): row.ms.median for row in report.rows}
    for i, (axis, places) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, 3, i)
        for name in report.header["paths"]:
            for nodes in [None] if axis == "nodes" else sorted({p.nodes for p in places}):
                shown = [p for p in places if nodes in (None, p.nodes) and (p, name) in found]
                axes.plot(
                    [getattr(p, axis) for p in shown],
                    [found[p, name] for p in shown],
                    marker="o",
                    markersize=3,
                    linestyle="--" if nodes == 1 else "-",
                    color=COLORS.get(name, OUR_COLOR),
                    label=name if nodes is None else f"{name}, {nodes} nodes",
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(axis)
        axes.set_ylabel("ms")
        axes.legend(fontsize="x-small")
    save(figure, path)
