"""Figures as files. They are checked before minutes of measuring, and drawn at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_file, write

if TYPE_CHECKING:
    from foretoken.measure.report import Spread

OUR_COLOR, THEIR_COLOR = "#2a6f97", "#a8a8a8"
PART_COLORS = (OUR_COLOR, "#e09f3e", THEIR_COLOR)  # of the parts of a stack; it has at most as many parts
# Matplotlib writes white grounds, black strokes and text without a colour; this swaps light and dark in dark mode.
DARK = """<style>@media (prefers-color-scheme: dark) {
[style*="fill: #ffffff"] { fill: #1e2129 !important }
[style*="stroke: #000000"] { stroke: #d0d4dc !important }
[id^="text_"] { fill: #d0d4dc }
}</style>
"""


@dataclass(frozen=True)
class Line:
    """Points (x, y) that are joined by a line.

    label: in the legend; lines of one label share an entry.
    x, y: the points [n].
    error: half the height of each point's error bar [n]; None for no bars.
    style, marker, color: as matplotlib names them; color None for the next free one.
    """

    label: str
    x: Sequence[float | int]
    y: Sequence[float]
    error: Sequence[float] | None = None
    style: str = "-"
    marker: str = "o"
    color: str | None = None


@dataclass(frozen=True)
class Bar:
    """A bar with a `label` beside it. Its length is the median, and its whisker goes from the lowest to the highest."""

    label: str
    of: "Spread"
    color: str


@dataclass(frozen=True)
class Stack:
    """A bar with a `label` beside it, of parts one after the other: {name: length}, in one order in all of a panel."""

    label: str
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Panel:
    """One pair of axes, with a title above them.

    x, y: the labels of the axes.
    content: what is drawn, all of one kind.
    log: the axes that are logarithmic: "x" (to base 2), "y", "xy" or "".
    """

    title: str
    x: str
    y: str
    content: Sequence[Line] | Sequence[Bar] | Sequence[Stack]
    log: str = ""


def plot(panels: Sequence[Panel], title: str, path: str) -> None:
    """Draw the `panels` side by side into a file, with one title and one legend for the lines and parts of all.

    path: the file; its ending names the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels) + 2, 4.2), layout="constrained")
    figure.suptitle(title)
    handles: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        lines = [each for each in panel.content if isinstance(each, Line)]
        bars = [each for each in panel.content if isinstance(each, Bar)]
        stacks = [each for each in panel.content if isinstance(each, Stack)]
        for line in lines:
            handles.setdefault(line.label, _line(axes, line))
        if bars:
            _bars(axes, bars)
        if stacks:
            handles |= _stacks(axes, stacks)
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
    """Write a figure of matplotlib's into a file; an SVG can be read on a dark page too.

    figure: matplotlib's Figure.
    path: the file, replaced if it exists.
    kind: the format, for example "png" or "svg".
    """
    figure.savefig(path, dpi=150, format=kind, metadata={"Date": None} if kind == "svg" else None)
    if kind == "svg":
        first = '<g id="figure_1">'
        path.write_text(path.read_text(encoding="utf-8").replace(first, DARK + first, 1), encoding="utf-8")


def _line(axes: Any, line: Line) -> Any:
    look = {"linestyle": line.style, "marker": line.marker, "markersize": 4, "color": line.color}
    return axes.errorbar(line.x, line.y, yerr=line.error, **look)


def _bars(axes: Any, bars: Sequence[Bar]) -> None:
    whiskers = [[bar.of.median - bar.of.low for bar in bars], [bar.of.high - bar.of.median for bar in bars]]
    values, colors = [bar.of.median for bar in bars], [bar.color for bar in bars]
    drawn = axes.barh([bar.label for bar in bars], values, xerr=whiskers, color=colors, capsize=3)
    axes.bar_label(drawn, fmt="{:.3g}", padding=3)
    axes.margins(x=0.12)  # room for the labels


def _stacks(axes: Any, stacks: Sequence[Stack]) -> dict[str, Any]:
    """Draw the stacks and return what the legend shows, by name."""
    labels, ends, handles = [stack.label for stack in stacks], [0.0] * len(stacks), dict[str, Any]()
    for name, color in zip(stacks[0].parts, PART_COLORS, strict=False):
        widths = [stack.parts[name] for stack in stacks]
        handles[name] = axes.barh(labels, widths, left=ends, color=color)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    return handles


def check_plot(path: str | None) -> None:
    """Refuse a figure that cannot be drawn: matplotlib is missing or lacks its format, or the file cannot be written.

    path: the file; None where no figure is asked for.
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
    """Return the format that the name of the file `path` ends in."""
    return path.rpartition(".")[2]
