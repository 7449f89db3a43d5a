"""The compiled loops of `budget` trees: how many distinct children each node of a frontier gets."""

import numpy as np

from foretoken.core.budgeted import LANES


def certainty_loop(q: np.ndarray, certainty: np.ndarray) -> None:
    """certainty[i] = sum of (q / sum q)^2."""
    v = q.shape[1]
    totals, squares = np.empty(LANES), np.empty(LANES)
    for i in range(q.shape[0]):
        totals[:] = 0.0
        squares[:] = 0.0
        for x in range(0, v // LANES * LANES, LANES):
            for lane in range(LANES):
                weight = np.float64(q[i, x + lane])
                totals[lane] += weight
                squares[lane] += weight * weight
        total = square = 0.0
        for lane in range(LANES):
            total += totals[lane]
            square += squares[lane]
        for x in range(v // LANES * LANES, v):
            weight = np.float64(q[i, x])
            total += weight
            square += weight * weight
        certainty[i] = square / (total * total)


def share_loop(
    certainty: np.ndarray,
    hardness: np.ndarray,
    constants: np.ndarray,
    more: np.ndarray,
    each: np.ndarray,
    share: np.ndarray,
    later: np.ndarray,
) -> None:
    """share [2, m, c], later [2, m]: `Gain.shares` of its `constants`."""
    scale, power, most, taken, rest = constants[0], constants[1], constants[2], constants[3], constants[4]
    for i in range(certainty.shape[0]):
        u = min(scale * max(1.0 - certainty[i], 0.0) ** power, most)
        miss = min(u * hardness[i], most)
        for j in range(more.shape[0]):
            lost = min(taken * miss, 0.5 * (1.0 - miss)) * more[j]
            share[0, i, j] = 1.0 - miss - lost
            share[1, i, j] = (miss * more[j] + lost) * each[j]
        later[0, i] = hardness[i] + u * (rest - hardness[i])
        later[1, i] = hardness[i]


def spend_loop(
    reach: np.ndarray,
    share: np.ndarray,
    hardness: np.ndarray,
    choices: np.ndarray,
    price: np.ndarray,
    worth: np.ndarray,
    size: np.ndarray,
    steps: np.ndarray,
    wide: float,
    left: float,
    least: int,
    chosen: np.ndarray,
) -> int:
    """The index of the price at which the choices, and what is expected below them, cost `left` nodes, as nearly as
    the steps of both allow, or of price `least` if they cost less there; the choices alone cost no more. chosen[i]: the
    index of that of node i, -1 for none.

    share [2, m, c]: of the reach, of the first child and of each other; hardness [2, m] of theirs. worth, size
    [hardness, price]: of nodes below, gain.py. steps: of the tables: lowest hardness, step; lowest ln price, step.
    wide: what drafting at a node is worth, in misses.
    """
    m, c = share.shape[1], share.shape[2]
    row, down = np.empty((2, m), np.int64), np.empty((2, m))
    shift = np.empty((2, m, c))
    for k in range(2):
        for i in range(m):
            at = min(max((hardness[k, i] - steps[0]) / steps[1], 0.0), worth.shape[0] - 1.001)
            row[k, i], down[k, i] = int(at), at - int(at)
            for j in range(c):
                shift[k, i, j] = np.log(reach[i] * share[k, i, j] + 1e-300)
    trial = np.empty(m, np.int64)
    chosen[:] = -1
    low, high = least - 1, price.shape[0] - 1  # the highest price buys nothing
    found = high
    nearest = left
    while high - low > 1:
        middle = (low + high) // 2
        log_price = np.log(price[middle])
        total = own = 0.0
        for i in range(m):
            best, nodes, pick = 0.0, 0.0, -1
            drafting = reach[i] * wide * (1.0 - share[0, i, 0])
            for j in range(c):
                value, below = drafting - price[middle] * choices[j], choices[j]
                for k in range(2):
                    number = 1.0 if k == 0 else choices[j] - 1.0
                    at = (log_price - shift[k, i, j] - steps[2]) / steps[3]
                    at = min(max(at, 0.0), worth.shape[1] - 1.001)
                    x, right = int(at), at - int(at)
                    y, d = row[k, i], down[k, i]
                    w = (worth[y, x] * (1 - right) + worth[y, x + 1] * right) * (1 - d)
                    w += (worth[y + 1, x] * (1 - right) + worth[y + 1, x + 1] * right) * d
                    s = (size[y, x] * (1 - right) + size[y, x + 1] * right) * (1 - d)
                    s += (size[y + 1, x] * (1 - right) + size[y + 1, x + 1] * right) * d
                    value += number * reach[i] * share[k, i, j] * (1.0 + w)
                    below += number * s
                if value > best:
                    best, nodes, pick = value, below, j
            trial[i] = pick
            total += nodes
            own += choices[pick] if pick >= 0 else 0.0
        if own <= left and abs(total - left) <= nearest:
            nearest = abs(total - left)
            chosen[:] = trial
            found = middle
        if total <= left:
            high = middle
        else:
            low = middle
    return found
