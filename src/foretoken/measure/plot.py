"""The table as bars."""

from collections.abc import Sequence

from foretoken.measure.figure import save
from foretoken.measure.methods import OURS
from foretoken.measure.summary import Row

OUR_COLOR, THEIR_COLOR = "#2a6f97", "#a8a8a8"


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
