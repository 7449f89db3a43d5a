"""What a node's children are expected to bring, judged from q: the model by which `budget` trees spend.

With b distinct children expected, the token is among them with probability (the optimum for i.i.d. draws)

    A(b) = 1 - m e^(-c (b - 1)),   b >= 1,          m = 1 - A(1) the drafter's miss at this node.

The first draw is the emitted one with probability

    F(b) = 1 - m - d m (1 - e^(-c (b - 1))):

what the others win is in part taken from it. The others share A(b) - F(b) evenly: S(b) each. A miss depends on how far
q is from certain, on the temperature T, and on how hard the text is here:

    m = h u,     u = mismatch * T^(-0.5) * (1 - sum q^2)^(0.75 T^0.3).

h begins above 1, since a step begins where the last one ended in a rejection. Every child that is accepted where q was
wide shows that the two models agree here, so for the first child of a node h moves on by 2.6 u (rest - h); the others
are tried where the first was rejected, and keep h. Where the verifier decides over whole paths h falls lower: a path
that was unlikely to be kept so far has been drafted too often, and loses less from there on. All fitted on measured
rows and trees; a wrong model costs speed, never exactness: it only says how many to draw.

Value of a node, for each time that it is reached, when a child costs mu (the price of a node over the probability that
the parent is reached), with levels to go:

    V(h, mu) = max over b of  F (1 + V(h', mu / F)) + (b - 1) S (1 + V(h, mu / S)) - mu b,   or 0,

averaged over the certainties that nodes have.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

CURVE, TAKEN = 1.1, 0.4  # c and d
SHARPENING, POWER, POWER_SHARPENING = 0.5, 0.75, 0.3
MOST_MISS = 0.95
LEARNING = 2.6
START, REST = {True: 1.25, False: 1.35}, {True: 0.58, False: 0.85}  # of h, by whether whole paths are decided over
CHOICES = np.array([1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0])  # b
MORE = -np.expm1(-CURVE * (CHOICES - 1))
EACH = np.divide(1.0, CHOICES - 1, where=CHOICES > 1, out=np.zeros_like(CHOICES))  # other than the first
STEP, LOWEST = 0.1, -9.0  # of the logarithms of prices
PRICE = np.arange(LOWEST, 1.0 + STEP / 2, STEP)
HARDNESS_STEP, LOWEST_HARDNESS = 0.1, 0.5
HARDNESS = np.arange(LOWEST_HARDNESS, 1.4 + HARDNESS_STEP / 2, HARDNESS_STEP)
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
        """u where q is wide; the power of 1 - sum q^2; MOST_MISS, TAKEN, LEARNING; where h goes."""
        t = self.temperature
        u, power = self.mismatch * t**-SHARPENING, POWER * t**POWER_SHARPENING
        return np.array([u, power, MOST_MISS, TAKEN, LEARNING, REST[self.joint]])

    def shares(self, certainty: np.ndarray, hardness: np.ndarray) -> Shares:
        """certainty: sum q^2 of each node; CHOICES are the last axis of what comes out. Compiled: `share_loop`."""
        scale, power = self.constants[:2]
        u = np.minimum(scale * np.maximum(1 - certainty, 0.0) ** power, MOST_MISS)
        miss = np.minimum(u * hardness, MOST_MISS)[:, None]
        taken = np.minimum(TAKEN * miss, 0.5 * (1 - miss)) * MORE
        first, other = 1 - miss - taken, (miss * MORE + taken) * EACH
        later = hardness + np.minimum(LEARNING * u, 1.0) * (REST[self.joint] - hardness)
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
            kinds.append([
                (np.ones((len(CHOICES), 1)), shares.first[..., None], *_places(shares.first, shares.hardness[0])),
                (CHOICES[:, None] - 1, shares.other[..., None], *_places(shares.other, shares.hardness[1])),
            ])  # fmt: skip
        cost = np.exp(PRICE) * CHOICES[:, None]
        for d in range(1, self.levels + 1):
            below = tables[:, d - 1].reshape(2, -1)
            for kind in kinds:
                value, nodes = -cost, CHOICES[:, None]
                for number, share, cells, weights in kind:
                    worth, size = ((row.take(cells) * weights).sum(0) for row in below)
                    value = value + number * share * (1 + worth)
                    nodes = nodes + number * size
                best = value.argmax(1)[:, None]
                value = np.take_along_axis(value, best, 1)[:, 0]
                tables[0, d] += np.maximum(value, 0.0) / len(kinds)
                tables[1, d] += np.where(value > 0, np.take_along_axis(nodes, best, 1)[:, 0], 0.0) / len(kinds)
        return tables[0], tables[1]

    def sizes(self, hardness: float) -> np.ndarray:
        """The expected nodes below a node that is surely reached, with all levels to go, at the prices e^PRICE."""
        row = (hardness - LOWEST_HARDNESS) / HARDNESS_STEP
        low = int(row)
        above, below = self.tables[1][self.levels, low : low + 2]
        return above + (row - low) * (below - above)


def _places(share: np.ndarray, hardness: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where a child of a node at price PRICE is in a table: the four cells around it, and their weights."""
    row = np.clip((hardness - LOWEST_HARDNESS) / HARDNESS_STEP, 0, len(HARDNESS) - 1.001)[:, None, None]
    column = np.clip((PRICE - np.log(share + 1e-12)[..., None] - LOWEST) / STEP, 0, len(PRICE) - 1.001)
    down, right = row % 1, column % 1
    cell = row.astype(np.int64) * len(PRICE) + column.astype(np.int64)
    cells = np.stack([cell, cell + 1, cell + len(PRICE), cell + len(PRICE) + 1])
    return cells, np.stack([(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right])
