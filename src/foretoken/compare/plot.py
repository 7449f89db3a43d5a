"""A comparison as lines: acceptance against the number of drafts."""

from collections.abc import Sequence

from foretoken.bench.figure import save
from foretoken.compare.table import Table


def plot(tables: Sequence[Table], label: str, path: str) -> None:
    """One panel a table that has columns "rule" and "k=..."; one line a rule, bounds dashed."""
    from matplotlib.figure import Figure

    panels = [table for table in tables if table.title.startswith(("Acceptance", "Toy"))]
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    figure.suptitle(label)
    for i, table in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), i)
        places = [j for j, column in enumerate(table.columns) if column.startswith("k=")]
        for row in table.rows:
            points = [(int(table.columns[j][2:]), row[j]) for j in places]
            known = [(k, y) for k, y in points if isinstance(y, float)]
            style = "--" if row[1] == "bound" else "-"
            axes.plot([k for k, _ in known], [y for _, y in known], style, marker="o", markersize=3, label=str(row[0]))
        axes.set_title(table.title)
        axes.set_xlabel("drafts k")
        axes.set_ylabel("acceptance")
        axes.legend(fontsize=7)
    save(figure, path)
