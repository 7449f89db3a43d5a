"""The compiled loops of `budget` trees: how many distinct children each node of a frontier gets."""

import numpy as np

HALVINGS = 16


def certainty_loop(q: np.ndarray, certainty: np.ndarray) -> None:
    """certainty[i] = sum of (q / sum q)^2."""
    for i in range(q.shape[0]):
        total = square = 0.0
        for x in range(q.shape[1]):
            total += q[i, x]
            square += q[i, x] * q[i, x]
        certainty[i] = square / (total * total)


def spend_loop(
    reach: np.ndarray,
    first: np.ndarray,
    other: np.ndarray,
    choices: np.ndarray,
    worth: np.ndarray,
    size: np.ndarray,
    lowest: float,
    step: float,
    left: float,
    chosen: np.ndarray,
    price: np.ndarray,
) -> None:
    """chosen[i]: the index of the choice of node i, -1 for none; price[0]: the price at which all of them, and what is
    expected below them, cost `left` nodes or, as choices are steps, the nearest below.

    first, other [m, c]: shares of the reach. worth, size: of a typical node below, by ln(price / reach).
    """
    m, c = first.shape
    trial = np.empty(m, np.int64)
    high = 0.0
    for i in range(m):
        high = max(high, np.log(reach[i]))
    high += 4.0  # a chain of sure drafts is worth more than one
    low = high + lowest
    chosen[:] = -1
    price[0] = high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        lam = np.exp(middle)
        total = 0.0
        for i in range(m):
            best, nodes, pick = 0.0, 0.0, -1
            for j in range(c):
                value, below = -lam * choices[j], choices[j]
                for k in range(2):
                    share = first[i, j] if k == 0 else other[i, j]
                    number = 1.0 if k == 0 else choices[j] - 1.0
                    if share <= 0.0 or number <= 0.0:
                        continue
                    at = (middle - np.log(reach[i] * share) - lowest) / step
                    w = s = 0.0
                    if at < 0.0:
                        w, s = worth[0], size[0]
                    elif at < worth.shape[0] - 1:
                        cell = int(at)
                        part = at - cell
                        w = worth[cell] + part * (worth[cell + 1] - worth[cell])
                        s = size[cell] + part * (size[cell + 1] - size[cell])
                    value += number * reach[i] * share * (1.0 + w)
                    below += number * s
                if value > best:
                    best, nodes, pick = value, below, j
            trial[i] = pick
            total += nodes
        if total <= left:
            chosen[:] = trial
            price[0] = high = middle
        else:
            low = middle
