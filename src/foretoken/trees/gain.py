"""What a node's children are expected to bring, judged from q: the model by which `budget` trees spend.

With b distinct children expected, the token is among them with probability (the optimum for i.i.d. draws)

    A(b) = 1 - m e^(-c (b - 1)),   b >= 1,          m = 1 - A(1) the drafter's miss at this node,

fitted on measured rows. The first draw is the emitted one with probability

    F(b) = 1 - m - d m (1 - e^(-c (b - 1))):

what the others win is in part taken from it. The others share A(b) - F(b) evenly. A miss depends on q through how
far it is from certain, and on the temperature, which sharpens what p and q disagree on:

    k = mismatch * T^(-0.7) * sqrt(1 - sum q^2),     m = k / (1 + k),   or   m = r k / (1 + r k)

at a node reached with probability r, the latter where the verifier decides over whole paths: a path that was unlikely
to be kept so far has been drafted too often, and loses less from there on. A chain's reach then falls as 1 / (1 + k
depth), not geometrically: both as measured. A wrong model costs speed, never exactness: it only says how many to draw.

Value of a node reached with probability r, when a child costs lam, with levels to go:

    W(r) = max over b of  r F + W(r F) + (b - 1) (r S + W(r S)) - lam b,     S = (A - F) / (b - 1),      or 0.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

CURVE, TAKEN = 2.0, 0.55  # c and d
SHARPENING = 0.7
CHOICES = np.array([1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0])  # b
STEP, LOWEST = 0.1, -9.0  # of the logarithms in the tables
REACH = np.arange(LOWEST, STEP / 2, STEP)
PRICE = np.arange(LOWEST, 1.0 + STEP / 2, STEP)


def shares(b: np.ndarray, miss: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """(F, S) for b >= 1 distinct children expected: shares of the node's reach, the first draw's and each other's."""
    more = -np.expm1(-CURVE * (b - 1))
    first = 1 - miss - np.minimum(TAKEN * miss, 0.5 * (1 - miss)) * more
    others = 1 - miss * (1 - more) - first
    return first, np.where(b > 1, others / np.maximum(b - 1, 1e-9), 0.0)


@dataclass(frozen=True)
class Gain:
    """mismatch: k at temperature 1 where q is wide. joint: whether the verifier decides over whole paths."""

    mismatch: float
    temperature: float
    joint: bool

    def miss(self, certainty: np.ndarray, reach: np.ndarray) -> np.ndarray:
        """m, from sum q^2."""
        k = self.mismatch * self.temperature**-SHARPENING * np.sqrt(np.maximum(1 - certainty, 0.0))
        k = k * reach if self.joint else k
        return k / (1 + k)


@dataclass(frozen=True)
class Forecast:
    """What nodes not seen yet, of a typical certainty, will be worth and cost.

    worth, size [levels to go, price, reach]: W, and the expected nodes below, at the prices e^PRICE, reaches e^REACH.
    """

    gain: Gain
    certainty: float
    levels: int

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (self.levels + 1, len(PRICE), len(REACH))
        worth, size = np.zeros(shape), np.zeros(shape)
        reach, b = np.exp(REACH), CHOICES[:, None]
        first, other = shares(b, self.gain.miss(np.array([self.certainty]), reach))
        kinds = [
            (number, share, *_cells(REACH + np.log(share + 1e-9))) for number, share in ((1.0, first), (b - 1, other))
        ]
        price = np.exp(PRICE)[:, None, None]
        for d in range(1, self.levels + 1):
            value, nodes = -price * b, np.zeros(1) + b
            for number, share, cell, part in kinds:
                below = worth[d - 1][:, cell] * (1 - part) + worth[d - 1][:, cell + 1] * part
                value = value + number * (reach * share + below)
                nodes = nodes + number * (size[d - 1][:, cell] * (1 - part) + size[d - 1][:, cell + 1] * part)
            best = value.argmax(1)[:, None]
            value = np.take_along_axis(value, best, 1)[:, 0]
            worth[d] = np.maximum(value, 0.0)
            size[d] = np.where(value > 0, np.take_along_axis(nodes, best, 1)[:, 0], 0.0)
        return worth, size


def _cells(log_reach: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in REACH: the entry below and the share of the next."""
    at = np.clip((log_reach - LOWEST) / STEP, 0, len(REACH) - 1.001)
    cell = at.astype(np.int64)
    return cell, at - cell
