"""Counts and times of one generated sequence; rates are derived."""

import time
from dataclasses import dataclass, field

from foretoken.core.sequence import Step


@dataclass
class Stats:
    """num_tokens: emitted, bonus included. num_plain: target forwards for which nothing was drafted. num_drafted: tree
    nodes besides roots. num_first: tokens of the first step. Times in seconds of wall clock, from the moment the
    sequence joined the batch."""

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
        """One step, of whose tokens `num_tokens` were wanted (a stop string can end inside it)."""
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
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def decoding_tokens_per_s(self) -> float:
        """After the first step, without the prompt's reading; 0 where there was no other step."""
        seconds = self.wall_s - self.ttft_s
        return (self.num_tokens - self.num_first) / seconds if seconds else 0.0

    @property
    def block_efficiency(self) -> float:
        """The mean number of tokens per step, which is one forward of the target; the bonus token counts."""
        return self.num_tokens / self.num_target_forwards if self.num_target_forwards else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; a tree drafts more than one path can accept."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0
