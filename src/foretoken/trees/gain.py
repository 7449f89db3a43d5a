"""The model of gains, by which `budget` trees spend: what the children of a node are expected to bring, judged from q.

Let b be the expected number of distinct children of a node. The *miss* m of the node is the probability that the
emitted token is another one than the child, if one child is drawn. With b children, the token is among them with
probability (the optimum for i.i.d. draws)

    A(b) = 1 - m e^(-c (b - 1)),   b >= 1,          m = 1 - A(1).

The first draw is the emitted one with probability

    F(b) = 1 - m - d m (1 - e^(-c (b - 1))):

what the other children win is in part taken from it; d is that part, 0.7 T^2 at temperature T, but at most 1. The
others share A(b) - F(b) evenly: S(b) each. The miss depends on how far q is from certain, on T, and on the path:

    m = h u,     u = mismatch * T^(-0.35) * (1 - sum q^2)^0.7.

h, the *hardness* of the path, is 1 where a verifier decides node by node. Where it decides over whole paths, a path
that was unlikely to be kept so far has been drafted too often, and loses less from there on: for the first child of a
node h changes by u (0.43 - h); for the others, which are tried where the first was rejected, h is that of the node.

The *reach* of a node is the probability that the walk comes to it. V is the value of a node with a number of levels
still to go, for each time that it is reached. If a child costs mu, the price of a node divided by the reach of the
parent, then

    V(h, mu) = max over b of  w m + F (1 + V(h', mu / F)) + (b - 1) S (1 + V(h, mu / S)) - mu b,   or 0,

with h' the hardness at the first child, averaged over the typical values of sum q^2, the *certainty* of a node. w m is
credited to a node that gets children at all, however many: tokens of this step are not all that counts, since a step
that ends at a node of uncertain q leaves that node to the next step. So V may rise with h where nodes cost little. As
w < 1, nothing pays at mu >= 1, on which `BudgetTree.select` rests. u and m are at most 0.95, and the others take at
most half of what the first draw has.

The constants are fitted to the 32-layer pair of docs/LOG.md, "The present pair": c and d on a second draw at the root
of a chain (2,199 steps), u on measured rows, h on how deep chains were accepted, w on what whole texts took, step after
step. A wrong model costs speed, never exactness: it only decides how many children are drawn.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from foretoken.kernel.compile import compiled

CURVE, TAKEN = 0.7, 0.7  # c, and d at temperature 1
SHARPENING, POWER = 0.35, 0.7  # the exponents in u
MOST_MISS = 0.95
REST = {True: 0.43, False: 1.0}  # what h tends to, by whether the verifier decides over whole paths
WIDE = 0.7  # w
# Quantiles .1, .3, .. of sum q^2 over the nodes of that pair, by temperature.
TYPICAL = {0.3: (0.64, 0.99, 1.0, 1.0, 1.0), 0.6: (0.18, 0.54, 0.92, 0.995, 1.0), 1.0: (0.02, 0.07, 0.19, 0.53, 0.97)}

CHOICES = np.array([1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0])  # values of b
MORE = -np.expm1(-CURVE * (CHOICES - 1))  # 1 - e^(-c (b - 1))
EACH = np.divide(1.0, CHOICES - 1, where=CHOICES > 1, out=np.zeros_like(CHOICES))  # 1 / (b - 1)
LOWEST, STEP = -9.0, 0.1  # the least ln of a price, and the distance of two
LOG_PRICES = np.arange(LOWEST, 1.0 + STEP / 2, STEP)
PRICES = np.exp(LOG_PRICES)
LOWEST_HARDNESS, HARDNESS_STEP = 0.4, 0.1
HARDNESS = np.arange(LOWEST_HARDNESS, 1.1 + HARDNESS_STEP / 2, HARDNESS_STEP)


class Gain(NamedTuple):
    """The model at one temperature, for one kind of verifier.

    scale: u where sum q^2 is 0.
    taken: d.
    rest: what h tends to.
    """

    scale: float
    taken: float
    rest: float


def gain_at(temperature: float, mismatch: float, joint: bool) -> Gain:
    """Make the model for one temperature.

    temperature: the sampling temperature T, above 0.
    mismatch: u at temperature 1 where sum q^2 is 0.
    joint: whether the verifier decides over whole paths.
    """
    return Gain(mismatch * temperature**-SHARPENING, min(TAKEN * temperature**2, 1.0), REST[joint])


class Shares(NamedTuple):
    """What the model says of the children of m nodes, per choice of b in CHOICES.

    The first index is 0 for the first child of a node, and 1 for each other child.

    share: the reach of the child divided by that of the node [2, m, choices].
    log_share: ln of the reach of the child [2, m, choices].
    hardness: h at the child [2, m].
    """

    share: np.ndarray
    log_share: np.ndarray
    hardness: np.ndarray


@compiled
def shares(certainty: np.ndarray, hardness: np.ndarray, reach: np.ndarray, gain: Gain) -> Shares:
    """Apply the model to m nodes.

    certainty: sum q^2 of each node [m].
    hardness: h of each node [m].
    reach: the probability that each node is reached [m].
    gain: the model.
    """
    m, c = certainty.shape[0], CHOICES.shape[0]
    share, log_share, later = np.empty((2, m, c)), np.empty((2, m, c)), np.empty((2, m))
    for i in range(m):
        u = min(gain.scale * max(1.0 - certainty[i], 0.0) ** POWER, MOST_MISS)
        miss = min(u * hardness[i], MOST_MISS)
        for j in range(c):
            lost = min(gain.taken * miss, 0.5 * (1.0 - miss)) * MORE[j]
            share[0, i, j] = 1.0 - miss - lost
            share[1, i, j] = (miss * MORE[j] + lost) * EACH[j]
            for k in range(2):
                log_share[k, i, j] = np.log(reach[i] * share[k, i, j] + 1e-300)
        later[0, i] = hardness[i] + u * (gain.rest - hardness[i])
        later[1, i] = hardness[i]
    return Shares(share, log_share, later)


@compiled
def best_choice(i: int, reach: float, of: Shares, below: np.ndarray, price: float) -> tuple[float, float, int]:
    """Choose the number of children of one node whose value, less the cost of all nodes below the node, is largest.

    i: the index of the node in `of`.
    reach: the probability that the node is reached.
    of: what becomes of the children of all nodes.
    below: the forecast for a child, with one level less to go, as `forecast` returns it [2, hardness, price].
    price: the price of a node, in expected tokens.

    Returns (that difference in tokens, the expected number of nodes below node i, the index of b in CHOICES), or
    (0, 0, -1) for no children.
    """
    best, nodes, pick = 0.0, 0.0, -1
    log_price = np.log(price)
    drafting = reach * WIDE * (1.0 - of.share[0, i, 0])  # reach w m
    for j in range(CHOICES.shape[0]):
        value, size = drafting - price * CHOICES[j], CHOICES[j]
        for k in range(2):
            number = 1.0 if k == 0 else CHOICES[j] - 1.0  # of such children; below: bilinear interpolation in `below`
            row = (of.hardness[k, i] - LOWEST_HARDNESS) / HARDNESS_STEP
            row = min(max(row, 0.0), below.shape[1] - 1.001)
            column = (log_price - of.log_share[k, i, j] - LOWEST) / STEP
            column = min(max(column, 0.0), below.shape[2] - 1.001)
            y, x = int(row), int(column)
            down, right = row - y, column - x
            at = below[:, y : y + 2, x : x + 2]
            worth = (at[0, 0, 0] * (1 - right) + at[0, 0, 1] * right) * (1 - down)
            worth += (at[0, 1, 0] * (1 - right) + at[0, 1, 1] * right) * down
            more = (at[1, 0, 0] * (1 - right) + at[1, 0, 1] * right) * (1 - down)
            more += (at[1, 1, 0] * (1 - right) + at[1, 1, 1] * right) * down
            value += number * reach * of.share[k, i, j] * (1.0 + worth)
            size += number * more
        if value > best:
            best, nodes, pick = value, size, j
    return best, nodes, pick


@lru_cache(maxsize=64)  # 0.6 MB each
def forecast(gain: Gain, levels: int, certainties: tuple[float, ...]) -> np.ndarray:
    """Tabulate V and the expected number of nodes below a node for nodes whose q is not known yet.

    gain: the model.
    levels: the largest number of levels to go.
    certainties: typical values of sum q^2, all equally likely.

    Returns a table [levels + 1, 2, hardness, price]. Its indices are the number of levels to go, 0 for V and 1 for the
    number of nodes, the place of h in HARDNESS, and the place of mu in PRICES.
    """
    tables = np.zeros((levels + 1, 2, len(HARDNESS), len(PRICES)))
    fill_forecast(np.array(certainties), gain, tables)
    return tables


@compiled
def fill_forecast(certainties: np.ndarray, gain: Gain, tables: np.ndarray) -> None:
    """Fill the tables of `forecast`, level by level.

    certainties: typical values of sum q^2 [c].
    gain: the model.
    tables: receives the result [levels + 1, 2, hardness, price], zeros at first.
    """
    m = HARDNESS.shape[0]
    kinds = [shares(np.full(m, certainty), HARDNESS, np.ones(m), gain) for certainty in certainties]
    for d in range(1, tables.shape[0]):
        for i in range(m):
            for at in range(PRICES.shape[0]):
                for of in kinds:
                    value, nodes, _ = best_choice(i, 1.0, of, tables[d - 1], PRICES[at])
                    tables[d, 0, i, at] += value / len(kinds)
                    tables[d, 1, i, at] += nodes / len(kinds)


def typical_certainties(temperature: float) -> tuple[float, ...]:
    """Return the quantiles .1, .3, .. .9 of sum q^2 over the nodes of a text, interpolated to a `temperature`."""
    return tuple(float(np.interp(temperature, list(TYPICAL), of)) for of in zip(*TYPICAL.values(), strict=True))
