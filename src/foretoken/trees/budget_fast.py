"""The compiled loops of `budget` trees: how many distinct children each node of a frontier gets."""

import numpy as np


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
    price: np.ndarray,
    worth: np.ndarray,
    size: np.ndarray,
    lowest: float,
    step: float,
    left: float,
    chosen: np.ndarray,
    found: np.ndarray,
) -> None:
    """chosen[i]: the index of the choice of node i, -1 for none; found[0]: the index of the price at which these, and
    what is expected below them, cost `left` nodes, as nearly as the steps of both allow. They alone cost no more.

    first, other [m, c]: shares of the reach. worth, size [price, reach]: of a typical node below.
    """
    m, c = first.shape
    cells = np.empty((m, c, 2), np.int64)
    parts = np.empty((m, c, 2))
    for i in range(m):
        for j in range(c):
            for k in range(2):
                share = first[i, j] if k == 0 else other[i, j]
                at = (np.log(reach[i] * share + 1e-300) - lowest) / step
                at = min(max(at, 0.0), worth.shape[1] - 1.001)
                cells[i, j, k] = int(at)
                parts[i, j, k] = at - int(at)
    trial = np.empty(m, np.int64)
    chosen[:] = -1
    low, high = -1, price.shape[0] - 1  # the highest price buys nothing
    found[0] = high
    nearest = left
    while high - low > 1:
        middle = (low + high) // 2
        total = own = 0.0
        for i in range(m):
            best, nodes, pick = 0.0, 0.0, -1
            for j in range(c):
                value, below = -price[middle] * choices[j], choices[j]
                for k in range(2):
                    number = 1.0 if k == 0 else choices[j] - 1.0
                    share = first[i, j] if k == 0 else other[i, j]
                    cell, part = cells[i, j, k], parts[i, j, k]
                    w = worth[middle, cell] * (1 - part) + worth[middle, cell + 1] * part
                    value += number * (reach[i] * share + w)
                    below += number * (size[middle, cell] * (1 - part) + size[middle, cell + 1] * part)
                if value > best:
                    best, nodes, pick = value, below, j
            trial[i] = pick
            total += nodes
            own += choices[pick] if pick >= 0 else 0.0
        if own <= left and abs(total - left) <= nearest:
            nearest = abs(total - left)
            chosen[:] = trial
            found[0] = middle
        if total <= left:
            high = middle
        else:
            low = middle
