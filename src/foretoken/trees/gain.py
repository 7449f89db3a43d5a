"""What a node's children are expected to bring, judged from q: the model by which `budget` trees spend.

With b distinct children expected, the token is among them with probability (the optimum for i.i.d. draws)

    A(b) = 1 - m e^(-c (b - 1)),   b >= 1,          m = 1 - A(1) the drafter's miss at this node.

The first draw is the emitted one with probability

    F(b) = 1 - m - d m (1 - e^(-c (b - 1))):

what the others win is in part taken from it, d = 0.7 T^2 of it, at most all. The others share A(b) - F(b) evenly: S(b)
each. A miss depends on how far q is from certain, on the temperature T, and on the path:

    m = h u,     u = mismatch * T^(-0.35) * (1 - sum q^2)^0.7.

h is 1 where a verifier decides node by node. Where it decides over whole paths, a path that was unlikely to be kept so
far has been drafted too often, and loses less from there on: for the first child of a node h moves on by u (0.43 - h),
the others, tried where the first was rejected, keep it.

Value of a node, for each time that it is reached, when a child costs mu (the price of a node over the probability that
the parent is reached), with levels to go:

    V(h, mu) = max over b of  w m + F (1 + V(h', mu / F)) + (b - 1) S (1 + V(h, mu / S)) - mu b,   or 0,

averaged over the certainties that nodes have. w m is credited to a node that gets children at all, however many: tokens
of this step are not all that counts, since a step that ends before a wide row leaves it to the next one. So V may rise
with h where nodes cost little; and as w < 1 nothing pays at mu >= 1, on which `BudgetTree.select` rests. u and m are at
most 0.95, and the others take at most half of what the first draw has.

u, c and d are fitted on measured rows, h on how deep chains were accepted, w on what whole texts took, step after step
(docs/LOG.md). A wrong model costs speed, never exactness: it only says how many to draw.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

CURVE, TAKEN = 0.7, 0.7  # c, and d at temperature 1
SHARPENING, POWER = 0.35, 0.7
MOST_MISS = 0.95
REST = {True: 0.43, False: 1.0}  # where h goes, by whether whole paths are decided over
WIDE = 0.7  # w
CHOICES = np.array([1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0])  # b
MORE = -np.expm1(-CURVE * (CHOICES - 1))
EACH = np.divide(1.0, CHOICES - 1, where=CHOICES > 1, out=np.zeros_like(CHOICES))  # other than the first
STEP, LOWEST = 0.1, -9.0  # of the logarithms of prices
PRICE = np.arange(LOWEST, 1.0 + STEP / 2, STEP)
HARDNESS_STEP, LOWEST_HARDNESS = 0.1, 0.4
HARDNESS = np.arange(LOWEST_HARDNESS, 1.1 + HARDNESS_STEP / 2, HARDNESS_STEP)
STEPS = np.array([LOWEST_HARDNESS, HARDNESS_STEP, LOWEST, STEP])


@dataclass(frozen=True)
class Shares:
    """[nodes, choices]. first, other: of the node's reach, the first child's and each other's. hardness [2, ...]: h of
    the first child and of the others."""

    first: np.ndarray
    other: np.ndarray
    hardness: np.ndarray


@dataclass(frozen=True)
class Gain:
    """mismatch: u at temperature 1 where q is wide. joint: whether the verifier decides over whole paths."""

    mismatch: float
    temperature: float
    joint: bool

    @cached_property
    def constants(self) -> np.ndarray:
        """u where q is wide; the power of 1 - sum q^2; MOST_MISS; d at this temperature; where h goes."""
        t = self.temperature
        return np.array([self.mismatch * t**-SHARPENING, POWER, MOST_MISS, min(TAKEN * t**2, 1.0), REST[self.joint]])

    def shares(self, certainty: np.ndarray, hardness: np.ndarray) -> Shares:
        """certainty: sum q^2 of each node; CHOICES are the last axis of what comes out. Compiled: `share_loop`."""
        scale, power, most, lost, rest = self.constants
        u = np.minimum(scale * np.maximum(1 - certainty, 0.0) ** power, most)
        miss = np.minimum(u * hardness, most)[:, None]
        taken = np.minimum(lost * miss, 0.5 * (1 - miss)) * MORE
        first, other = 1 - miss - taken, (miss * MORE + taken) * EACH
        later = hardness + u * (rest - hardness)
        return Shares(first, other, np.stack([later, hardness]))


@dataclass(frozen=True)
class Forecast:
    """What nodes not seen yet, of the certainties given, will be worth and cost for each time they are reached.

    worth, size [levels to go, hardness, price]: V, and the expected nodes below, at HARDNESS and at the prices e^PRICE
    over the reach.
    """

    gain: Gain
    certainties: tuple[float, ...]
    levels: int

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (self.levels + 1, len(HARDNESS), len(PRICE))
        tables = np.zeros((2, *shape))  # worth, size
        kinds = []
        for certainty in self.certainties:
            shares = self.gain.shares(np.full(len(HARDNESS), certainty), HARDNESS)
            children = [
                (np.ones((len(CHOICES), 1)), shares.first[..., None], *_places(shares.first, shares.hardness[0])),
                (CHOICES[:, None] - 1, shares.other[..., None], *_places(shares.other, shares.hardness[1])),
            ]
            kinds.append((WIDE * (1 - shares.first[:, :1, None]), children))
        cost = np.exp(PRICE) * CHOICES[:, None]
        for d in range(1, self.levels + 1):
            below = tables[:, d - 1].reshape(2, -1)
            for wide, children in kinds:
                value, nodes = wide - cost, CHOICES[:, None]
                for number, share, cells, weights in children:
                    worth, size = ((row.take(cells) * weights).sum(0) for row in below)
                    value = value + number * share * (1 + worth)
                    nodes = nodes + number * size
                best = value.argmax(1)[:, None]
                value = np.take_along_axis(value, best, 1)[:, 0]
                tables[0, d] += np.maximum(value, 0.0) / len(kinds)
                tables[1, d] += np.where(value > 0, np.take_along_axis(nodes, best, 1)[:, 0], 0.0) / len(kinds)
        return tables[0], tables[1]

    @cached_property
    def sizes(self) -> np.ndarray:
        """The expected nodes below a root, with all levels to go, at the prices e^PRICE."""
        return self.tables[1][self.levels, round((1.0 - LOWEST_HARDNESS) / HARDNESS_STEP)]


def _places(share: np.ndarray, hardness: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where a child of a node at price PRICE is in a table: the four cells around it, and their weights."""
    row = np.clip((hardness - LOWEST_HARDNESS) / HARDNESS_STEP, 0, len(HARDNESS) - 1.001)[:, None, None]
    column = np.clip((PRICE - np.log(share + 1e-12)[..., None] - LOWEST) / STEP, 0, len(PRICE) - 1.001)
    down, right = row % 1, column % 1
    cell = row.astype(np.int64) * len(PRICE) + column.astype(np.int64)
    cells = np.stack([cell, cell + 1, cell + len(PRICE), cell + len(PRICE) + 1])
    return cells, np.stack([(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right])
