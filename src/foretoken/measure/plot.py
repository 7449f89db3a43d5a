"""Figures as files: refused before minutes of measuring, drawn at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_file, write

OUR_COLOR, THEIR_COLOR = "#2a6f97", "#a8a8a8"
PART_COLORS = (OUR_COLOR, "#e09f3e", THEIR_COLOR)  # of the parts of a stack, of which there are at most so many
# Matplotlib writes white grounds, black strokes and text without a colour; a reader's dark mode turns them round.
DARK = """<style>@media (prefers-color-scheme: dark) {
[style*="fill: #ffffff"] { fill: #1e2129 !important }
[style*="stroke: #000000"] { stroke: #d0d4dc !important }
[id^="text_"] { fill: #d0d4dc }
}</style>
"""


@dataclass(frozen=True)
class Line:
    """Points (x, y) under one label. error: half the height of each point's bar, if there is one. color: by default one
    of its own."""

    label: str
    x: Sequence[float | int]
    y: Sequence[float]
    error: Sequence[float] | None = None
    style: str = "-"
    marker: str = "o"
    color: str | None = None


@dataclass(frozen=True)
class Bar:
    """value, and the ends of its whisker."""

    label: str
    value: float
    low: float
    high: float
    color: str


@dataclass(frozen=True)
class Stack:
    """A bar of parts, one behind the other. parts: by name, in an order that all stacks of a panel share."""

    label: str
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Panel:
    """One pair of axes. log: the axes that are logarithmic, "x" to base 2, "y", or both."""

    title: str
    x: str
    y: str
    content: Sequence[Line] | Sequence[Bar] | Sequence[Stack]
    log: str = ""


def plot(panels: Sequence[Panel], title: str, path: str) -> None:
    """Draw the panels side by side, with one legend for the lines and parts of all, in the format that path ends in."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels) + 2, 4.2), layout="constrained")
    figure.suptitle(title)
    handles: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        lines = [each for each in panel.content if isinstance(each, Line)]
        for line in lines:
            handles.setdefault(line.label, _line(axes, line))
        if panel.content and isinstance(panel.content[0], Bar):
            _bars(axes, [each for each in panel.content if isinstance(each, Bar)])
        if panel.content and isinstance(panel.content[0], Stack):
            handles |= _stacks(axes, [each for each in panel.content if isinstance(each, Stack)])
        if lines and all(isinstance(x, int) for line in lines for x in line.x):
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        if "x" in panel.log:
            axes.set_xscale("log", base=2)
        if "y" in panel.log:
            axes.set_yscale("log")
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=7)
    write(Path(path), lambda temporary: save(figure, Path(temporary), _kind(path)))


def save(figure: Any, path: Path, kind: str) -> None:
    """Write a figure of matplotlib's; as an SVG it also reads on a dark page."""
    figure.savefig(path, dpi=150, format=kind, metadata={"Date": None} if kind == "svg" else None)
    if kind == "svg":
        path.write_text(for_dark_pages(path.read_text(encoding="utf-8")), encoding="utf-8")


def for_dark_pages(svg: str) -> str:
    """The text of an SVG of matplotlib's with the colours of a dark page beside those of a light one."""
    figure = svg.index('<g id="figure_1">')
    return svg[:figure] + DARK + svg[figure:]


def _line(axes: Any, line: Line) -> Any:
    look = {"linestyle": line.style, "marker": line.marker, "markersize": 4, "color": line.color}
    return axes.errorbar(line.x, line.y, yerr=line.error, **look)


def _bars(axes: Any, bars: Sequence[Bar]) -> None:
    whiskers = [[bar.value - bar.low for bar in bars], [bar.high - bar.value for bar in bars]]
    values, colors = [bar.value for bar in bars], [bar.color for bar in bars]
    drawn = axes.barh([bar.label for bar in bars], values, xerr=whiskers, color=colors, capsize=3)
    axes.bar_label(drawn, fmt="{:.3g}", padding=3)
    axes.margins(x=0.12)  # room for the labels


def _stacks(axes: Any, stacks: Sequence[Stack]) -> dict[str, Any]:
    """Draws them; returns what the legend shows, by name."""
    labels, ends, handles = [stack.label for stack in stacks], [0.0] * len(stacks), dict[str, Any]()
    for name, color in zip(stacks[0].parts, PART_COLORS, strict=False):
        widths = [stack.parts[name] for stack in stacks]
        handles[name] = axes.barh(labels, widths, left=ends, color=color)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    return handles


def check_plot(path: str | None) -> None:
    """Refuse a figure that cannot be drawn: matplotlib is missing or does not know its format, or the folder is.

    path: None where no figure is asked for.
    """
    if path is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ForetokenError("Plots need matplotlib: pip install -e '.[bench]'.") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if _kind(path) not in known:
        raise ForetokenError(f"Cannot plot to {path}: end its name in one of {', '.join(sorted(known))}.")
    check_file(Path(path))


def _kind(path: str) -> str:
    return path.rpartition(".")[2]
