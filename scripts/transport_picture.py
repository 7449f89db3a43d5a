"""Draws docs/transport.svg: g, the concave curve S below it, and the polylines whose mixture S is."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from foretoken.measure.plot import save
from foretoken.verify.exact_transport import selection
from foretoken.verify.thresholds import thresholds

P = np.array([0.30, 0.24, 0.20, 0.14, 0.08, 0.04])  # in the order of falling p/q
Q = np.array([0.08, 0.12, 0.15, 0.20, 0.20, 0.25])
N = 3


def main() -> None:
    ns, cs = np.array([N]), np.array([1.0])
    rho = selection(P, Q, ns, cs)
    beta = thresholds(rho, Q, ns, cs)
    x = np.concatenate([[0.0], np.cumsum(Q)])
    hit = 1 - (1 - x) ** N
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    fine = np.linspace(0, 1, 200)
    left.plot(fine, 1 - (1 - fine) ** N, color="#a8a8a8", label="g")
    left.plot(x, hit, "o", color="#a8a8a8", markersize=4, label="G")
    left.plot(x, np.concatenate([[0.0], np.cumsum(P)]), color="#c1666b", linestyle="--", label="P")
    left.plot(x, np.concatenate([[0.0], np.cumsum(rho * Q)]), color="#2a6f97", label="S, selected mass")
    left.set_title(f"{N} draws: the selected mass is concave and below G", fontsize=10)
    left.legend()
    times = sorted({0.0, *(float(b) for b in beta if b < 1)})
    for u, end in zip(times, [*times[1:], 1.0], strict=True):
        kept = np.concatenate([[True], beta > u])
        right.plot(x[kept], hit[kept], marker="o", markersize=4, alpha=0.8, label=f"weight {end - u:.2f}")
    right.plot(x, np.concatenate([[0.0], np.cumsum(rho * Q)]), color="black", linewidth=2.5, label="their mixture, S")
    right.set_title("block rules: polylines that touch G", fontsize=10)
    right.legend()
    for axes in (left, right):
        axes.set_xlabel("q-mass of the best tokens")
    path = Path(__file__).parents[1] / "docs" / "transport.svg"
    save(figure, path, "svg")
    print(path)


if __name__ == "__main__":
    main()
