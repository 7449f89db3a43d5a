"""What a node's children are expected to bring, judged from q: the model by which `budget` trees spend.

With b distinct children expected, the token is among them with probability (the optimum for i.i.d. draws)

    A(b) = 1 - m e^(-c (b - 1)),   b >= 1,          m = 1 - A(1) the drafter's miss at this node,

fitted on measured rows. The first draw is the emitted one with probability

    F(b) = 1 - m - d m (1 - e^(-c (b - 1))):

what the others win is in part taken from it. The others share A(b) - F(b) evenly. A miss depends on q through how
far it is from certain, and on the temperature, which sharpens what p and q disagree on:

    m = mismatch * T^(-0.7) * sqrt(1 - sum q^2).

A wrong model costs speed, never exactness: it only chooses how many children are drawn.

Value of a node that is reached with probability r, when a child costs lam: r w(mu), mu = lam / r, with

    w(mu) = max over b of  F (1 + w(mu / F)) + (b - 1) S (1 + w(mu / S)) - mu b,   S = (A - F) / (b - 1),   or 0.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

CURVE, TAKEN = 2.0, 0.55  # c and d
SHARPENING = 0.7
CHOICES = np.array([1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0])  # b
LOWEST, HIGHEST, STEP = -12.0, 1.5, 0.1  # of ln mu in the tables
GRID = np.arange(LOWEST, HIGHEST + STEP / 2, STEP)
MOST_MISS = 0.95


def shares(b: np.ndarray, miss: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """(F, S) for b >= 1 distinct children expected: shares of the node's reach, the first draw's and each other's."""
    more = -np.expm1(-CURVE * (b - 1))
    first = 1 - miss - np.minimum(TAKEN * miss, 0.5 * (1 - miss)) * more
    others = 1 - miss * (1 - more) - first
    return first, np.where(b > 1, others / np.maximum(b - 1, 1e-9), 0.0)


def miss_of(certainty: np.ndarray, mismatch: float, temperature: float) -> np.ndarray:
    """m, from sum q^2."""
    scale = mismatch * temperature**-SHARPENING
    return np.minimum(scale * np.sqrt(np.maximum(1 - certainty, 0.0)), MOST_MISS)


@dataclass(frozen=True)
class Forecast:
    """What a node of typical q will be worth and cost, by levels to go and by price. mu = price / reach.

    worth[d, i] = w, size[d, i] = expected nodes below, with d levels to go, at mu = e^GRID[i].
    """

    typical_miss: float
    levels: int

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        worth = np.zeros((self.levels + 1, len(GRID)))
        size = np.zeros_like(worth)
        first, other = shares(CHOICES, self.typical_miss)
        mu = np.exp(GRID)
        for d in range(1, self.levels + 1):
            value, nodes = -mu * CHOICES[:, None], np.repeat(CHOICES[:, None], len(GRID), 1)
            for number, share in ((np.ones_like(CHOICES), first), (CHOICES - 1, other)):
                shifted = GRID[None, :] - np.log(np.maximum(share, 1e-12))[:, None]
                value += (number * share)[:, None] * (1 + np.interp(shifted, GRID, worth[d - 1], right=0.0))
                nodes += number[:, None] * np.interp(shifted, GRID, size[d - 1], right=0.0)
            best = value.argmax(0)
            pays = value[best, range(len(GRID))] > 0
            worth[d] = np.where(pays, value[best, range(len(GRID))], 0.0)
            size[d] = np.where(pays, nodes[best, range(len(GRID))], 0.0)
        return worth, size
