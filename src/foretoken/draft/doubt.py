"""Where to end a path within a step: what the drafter's own doubt tells of the next draft's chance.

A draft below one of whose path the drafter is sure to a degree c (the product of q down to it) is accepted with
probability a c^power, a the mean acceptance: by what steps have shown so far, power is that for which as many were
accepted as expected. At temperature 1 it is near 0.1, a draft with a small q being no bad draft there; at low ones near
1. A level is worth drafting while that chance is at least its price in tokens: so the floor of c is (price / a)^(1 /
power).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

POWER, WEIGHT = 0.3, 2.0  # of an unknown drafter, and its weight
LEAST, MOST = 0.03, 4.0  # power
FORGET = 0.995  # a draft
NEVER, SUREST = 1e-9, 0.95  # bounds of the floor; above 0, so that the session tells how sure it was


@dataclass
class Doubt:
    """power: as above. weight: the sum of -d(expected) / d(power) over drafts, older ones counting less."""

    power: float = POWER
    weight: float = WEIGHT

    def learn(self, mean: float, sure: Sequence[float], accepted: Sequence[bool]) -> None:
        """Of drafts below others: how sure the drafter was of the other, and whether the draft was accepted."""
        for c, kept in zip(sure, accepted, strict=True):
            if not 0 < c < 1:
                continue  # 1 tells nothing of the power
            expected = mean * c**self.power
            self.weight = FORGET * self.weight - expected * math.log(c)
            step = (expected - kept) / max(self.weight, WEIGHT)
            self.power = min(MOST, max(LEAST, self.power + step))

    def floor(self, price: float, mean: float) -> float:
        """price: tokens that a level more costs."""
        share = price / mean
        return SUREST if share >= 1 else min(SUREST, max(NEVER, share ** (1 / self.power)))
