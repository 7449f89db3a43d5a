"""What it costs to read a text with the drafter, and how long texts are: a drafter reads a prompt before it drafts.

A prompt of 2,000 tokens may take a drafter as long as 70 steps of plain decoding. So it is read only where what is left
of the text is expected to save more than that. How much is left nobody knows: a text is taken to be as long as the
latest ones were, and one that is longer by now, to go on for as long as it is already.
"""

from collections import deque
from dataclasses import dataclass, field

PRICE, WEIGHT = 0.03, 100.0  # plain steps assumed per id, and the weight of that in ids; SmolLM2 beside Qwen takes .035
LENGTH, LATEST = 128.0, 8  # tokens of a text assumed before the first one ended; how many of the latest ones count
KEPT = 0.9  # weight of all that was measured before the newest reading


@dataclass
class Reading:
    """What a drafter's reading takes, and how long the latest texts were.

    ids: the number of ids that were read; older ones count less.
    steps: plain steps that this took.
    lengths: numbers of tokens of the latest texts.
    """

    ids: float = WEIGHT
    steps: float = PRICE * WEIGHT
    lengths: deque[float] = field(default_factory=lambda: deque([LENGTH], LATEST))

    def learn(self, ids: int, steps: float) -> None:
        """Learn from a step at which the drafter read ids that it would have known had it drafted before.

        ids: their number.
        steps: what the step took beyond an ordinary one, in plain steps.
        """
        self.ids = KEPT * self.ids + ids
        self.steps = KEPT * self.steps + max(steps, 0.0)

    def cost(self, ids: int) -> float:
        """Return the plain steps that reading so many ids takes."""
        return ids * self.steps / self.ids

    def left(self, emitted: int, limit: int) -> float:
        """Return how many tokens a text is expected to have yet.

        emitted: the number of its tokens so far.
        limit: the most that may follow.
        """
        return float(min(limit, max(sum(self.lengths) / len(self.lengths), emitted)))
