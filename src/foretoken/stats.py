"""Counts and times of one generated sequence, and the rates that follow from them."""

import time
from dataclasses import dataclass, field

from foretoken.core.sequence import Step


@dataclass
class Stats:
    """What one sequence took and brought so far. Times are seconds of wall clock since the sequence joined the batch.

    num_tokens: emitted tokens, bonus tokens included.
    num_target_forwards: steps, each of which is one forward of the target, unless the target keeps recurrent states.
    num_plain: steps at which nothing was drafted.
    num_drafted: nodes of all trees besides the roots.
    num_accepted: draft tokens that were emitted.
    num_first: emitted tokens of the first step.
    ttft_s: time to the end of the first step, that is to the first token.
    wall_s: time to the end of the last step.
    """

    num_tokens: int = 0
    num_target_forwards: int = 0
    num_plain: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_first: int = 0
    ttft_s: float = 0.0
    wall_s: float = 0.0
    _start: float = field(default_factory=time.perf_counter, repr=False)

    def record(self, step: Step, num_tokens: int) -> None:
        """Count one step that ended now, with the first `num_tokens` of its tokens; a stop string may end inside it."""
        self.num_tokens += num_tokens
        self.num_target_forwards += 1
        self.num_plain += step.num_drafted == 0
        self.num_drafted += step.num_drafted
        self.num_accepted += min(step.num_accepted, num_tokens)
        self.wall_s = time.perf_counter() - self._start
        if self.num_target_forwards == 1:
            self.ttft_s, self.num_first = self.wall_s, num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second, the reading of the prompt included."""
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def decoding_tokens_per_s(self) -> float:
        """Emitted tokens per second after the first step, which reads the prompt; 0 where there was no other step."""
        seconds = self.wall_s - self.ttft_s
        return (self.num_tokens - self.num_first) / seconds if seconds else 0.0

    @property
    def block_efficiency(self) -> float:
        """The mean number of tokens per step, which is one forward of the target; the bonus token counts."""
        return self.num_tokens / self.num_target_forwards if self.num_target_forwards else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The share of draft tokens that were accepted; of a tree that branches one path at most can be."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0
