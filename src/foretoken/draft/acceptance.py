"""How many draft tokens are accepted: of one text, by depth, and by how sure the drafter was of them.

The constants were kept as those of the controller were, see there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

FORGET_LONG = 0.99  # per step: the last 100 count
HOPE, WEIGHT = 0.7, 8.0  # acceptance assumed of an unknown drafter and at a new try, and its weight in trials
ALIKE = 10.0  # trials by which depths share one acceptance
FLAT = 1e-9  # the least surprise, in nats, and the least number of rejections per nat, by which is divided


@dataclass
class Acceptance:
    """Counts of accepted and tried draft tokens; older ones count less. A token is tried if its parent was accepted.

    accepted, tried: numbers of accepted and of tried tokens, including what is assumed before any trial.
    surprise: -ln of the product of q down to the last tried token, summed over the drafts, in nats.
    tells: whether the drafter gives q; where it does not, each tried token counts as one nat.
    hits, trials: accepted and tried tokens of one sequence by depth; empty where they are not needed.
    """

    accepted: float = HOPE * WEIGHT
    tried: float = WEIGHT
    surprise: float = WEIGHT
    tells: bool = False
    hits: list[float] = field(default_factory=list)
    trials: list[float] = field(default_factory=list)

    def new(self, mean: float, weight: float, deepest: int) -> "Acceptance":
        """Return the counts that a text starts from.

        mean, weight: the acceptance that is assumed before any trial, and its weight in trials.
        deepest: the depth of the largest tree, up to which there are counts by depth.
        """
        none = [0.0] * deepest
        return Acceptance(mean * weight, weight, self.surprise / self.tried * weight, self.tells, none, none)

    def learn(self, limit: int, accepted: int, surprise: float | None, forget: float) -> None:
        """Count one draft, of which at most `limit` tokens could be accepted and `accepted` were.

        surprise, forget: of the tried ones, None if q is unknown; the weight of all that was counted before.
        """
        tried = min(accepted + 1, limit)
        self.accepted = forget * self.accepted + accepted
        self.tried = forget * self.tried + tried
        self.surprise = forget * self.surprise + (tried if surprise is None else surprise)
        self.tells = surprise is not None
        self.hits = [forget * x + (i < accepted) for i, x in enumerate(self.hits)]
        self.trials = [forget * x + (i < tried) for i, x in enumerate(self.trials)]

    @property
    def mean(self) -> float:
        """The share of tried draft tokens that were accepted."""
        return self.accepted / self.tried

    @property
    def sharpness(self) -> float:
        """Rejections per nat: c, with which a path whose product of q is s is accepted with probability s^c."""
        return (self.tried - self.accepted) / max(self.surprise, FLAT)

    def expected(self, limit: int, by_depth: bool) -> list[float]:
        """E(d) of this sequence, d = 0, 1, ..

        limit: the depth at which its paths end.
        by_depth: whether there is one acceptance per depth; else it is the mean of all.
        """
        reach, found, assumed = 1.0, [1.0], self.mean
        for depth, (hits, trials) in enumerate(zip(self.hits, self.trials, strict=True)):
            reach *= (hits + ALIKE * assumed) / (trials + ALIKE) if by_depth else assumed
            found.append(found[-1] + reach if depth < limit else found[-1])
        return found

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
