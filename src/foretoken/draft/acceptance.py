"""How many draft tokens are accepted: of one text, and by how sure the drafter was of them.

The constants were kept as those of the controller were, see there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

FORGET = 0.97  # weight of what was counted before, when a draft is counted: about the last 30 drafts matter
HOPE, WEIGHT = 0.7, 1.5  # acceptance assumed of an unknown drafter and at a new try, and its weight in trials
FLAT = 1e-9  # the least surprise, in nats, and the least number of rejections per nat, by which is divided


@dataclass
class Acceptance:
    """Counts of accepted and tried draft tokens; older ones count less. A token is tried if its parent was accepted.

    accepted, tried: numbers of accepted and of tried tokens, including what is assumed before any trial.
    surprise: -ln of the product of q down to the last tried token, summed over the drafts, in nats.
    tells: whether the drafter gives q; where it does not, each tried token counts as one nat.
    """

    accepted: float = HOPE * WEIGHT
    tried: float = WEIGHT
    surprise: float = WEIGHT
    tells: bool = False

    def new(self, mean: float) -> "Acceptance":
        """Return the counts that a text starts from; mean: the acceptance that is assumed before any trial."""
        return Acceptance(mean * WEIGHT, WEIGHT, self.surprise / self.tried * WEIGHT, self.tells)

    def learn(self, limit: int, accepted: int, surprise: float | None) -> None:
        """Count one draft, of which at most `limit` tokens could be accepted and `accepted` were.

        surprise: that of the tried ones; None if q is unknown.
        """
        tried = min(accepted + 1, limit)
        self.accepted = FORGET * self.accepted + accepted
        self.tried = FORGET * self.tried + tried
        self.surprise = FORGET * self.surprise + (tried if surprise is None else surprise)
        self.tells = surprise is not None

    @property
    def mean(self) -> float:
        """The share of tried draft tokens that were accepted."""
        return self.accepted / self.tried

    @property
    def sharpness(self) -> float:
        """Rejections per nat: c, with which a path whose product of q is s is accepted with probability s^c."""
        return (self.tried - self.accepted) / max(self.surprise, FLAT)

    @property
    def deviation(self) -> float:
        """The standard deviation of `mean`, if every tried token was accepted with that probability."""
        return math.sqrt(self.mean * (1 - self.mean) / self.tried)

    def expected(self, limit: int, deepest: int) -> list[float]:
        """Return E(d) for d = 0, 1, .., `deepest`, of a sequence whose paths end at the depth `limit`."""
        mean = self.mean
        return list(accumulate(mean**depth if depth <= limit else 0.0 for depth in range(deepest + 1)))

    def floors(self, least: Sequence[float]) -> tuple[float, ...]:
        """Return the floors of the next tree, as in `Sequence.floors`; for a drafter that gives q.

        least: for depth 1, 2, .. the least product a P(the path so far is accepted) at which a next level pays.
        """
        mean, found, power = self.mean, [0.0], 1 / max(self.sharpness, FLAT)
        for worth in least:
            if worth >= mean:
                break
            found.append((worth / mean) ** power)
        return tuple(found)
