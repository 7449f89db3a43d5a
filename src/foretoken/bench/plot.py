"""The table as bars."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken.bench.methods import OURS
from foretoken.bench.summary import Row
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_file

OUR_COLOR, THEIR_COLOR = "#2a6f97", "#a8a8a8"


def check_plot(path: str) -> None:
    """Before minutes of measuring: is matplotlib there, does it know the file's format, and can it be written?"""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ForetokenError("Plots need matplotlib: pip install 'foretoken[bench]'.") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.rpartition(".")[2] not in known:
        raise ForetokenError(f"Cannot plot to {path}: end its name in one of {', '.join(sorted(known))}.")
    check_file(Path(path))


def plot(rows: Sequence[Row], label: str, path: str) -> None:
    """One panel a temperature and batch size; bars are medians of tokens/s, whiskers their range."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.temperature, row.batch) for row in rows))
    figure = Figure(figsize=(4.5 * len(panels), 4.0), layout="constrained")
    figure.suptitle(label)
    for i, (temperature, batch) in enumerate(panels, start=1):
        shown = [row for row in rows if (row.temperature, row.batch) == (temperature, batch)][::-1]
        axes = figure.add_subplot(1, len(panels), i)
        medians = [row.tokens_per_s.median for row in shown]
        below = [row.tokens_per_s.median - row.tokens_per_s.low for row in shown]
        above = [row.tokens_per_s.high - row.tokens_per_s.median for row in shown]
        colors = [OUR_COLOR if row.system == OURS else THEIR_COLOR for row in shown]
        names = [f"{row.system}\n{row.method}" for row in shown]
        axes.barh(names, medians, xerr=[below, above], color=colors, capsize=3)
        axes.set_title(f"temperature {temperature:g}, batch {batch}")
        axes.set_xlabel("tokens/s")
    save(figure, path)


def save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ForetokenError(f"Cannot write {path}: {error.strerror}.") from error
