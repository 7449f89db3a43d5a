"""What it costs to read a text with the drafter, and how long texts are: a drafter reads a prompt before it drafts.

A prompt of 2,000 tokens may take a drafter as long as 70 steps of plain decoding. So it is read only where what is left
of the text is expected to save more than that. How much is left nobody knows: a text is taken to be as long as the
latest ones were, and one that is longer by now, to go on for as long as it is already.

Estimates may be wrong, and a text that is not read teaches nothing. So the plain steps of such texts earn a credit, on
which one is read in the end.
"""

from collections import deque
from dataclasses import dataclass, field

PRICE, WEIGHT = 0.03, 100.0  # plain steps assumed per id, and the weight of that in ids; SmolLM2 beside Qwen takes .035
LENGTH, LATEST = 128.0, 8  # tokens of a text assumed before the first one ended; how many of the latest ones count
KEPT = 0.9  # weight of all that was measured before the newest reading
FEWEST = 32  # ids of a reading that teaches something: the time of fewer is mostly noise of the step's own
OUTLIER = 3.0  # a reading that took so many times as long as expected counts as this: code was compiled, for instance


@dataclass
class Reading:
    """What a drafter's reading takes.

    ids: the number of ids that were read; older ones count less.
    steps: plain steps that this took.
    credit: plain steps that may be spent on a reading beyond what it is expected to save.
    """

    ids: float = WEIGHT
    steps: float = PRICE * WEIGHT
    credit: float = 0.0

    def learn(self, ids: int, steps: float) -> None:
        """Learn from a step at which the drafter read ids that it would have known had it drafted before.

        ids: their number.
        steps: what the step took beyond an ordinary one, in plain steps.
        """
        if ids < FEWEST:
            return
        steps = min(max(steps, 0.0), OUTLIER * self.cost(ids))
        self.ids = KEPT * self.ids + ids
        self.steps = KEPT * self.steps + steps
        self.credit = 0.0

    def cost(self, ids: int) -> float:
        """Return the plain steps that reading so many ids takes."""
        return ids * self.steps / self.ids


@dataclass
class Lengths:
    """How long the latest texts were.

    latest: numbers of their tokens.
    """

    latest: deque[float] = field(default_factory=lambda: deque([LENGTH], LATEST))

    def left(self, emitted: int, limit: int) -> float:
        """Return how many tokens a text is expected to have yet.

        emitted: the number of its tokens so far.
        limit: the most that may follow.
        """
        return float(min(limit, max(sum(self.latest) / len(self.latest), emitted)))
