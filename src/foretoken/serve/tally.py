"""Sums over the steps of one request: its numbers of tokens, its times, and its accepted draft tokens."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from foretoken.serve.jobs import Job, Progress


class Tally:
    """The sums over the steps of one request.

    jobs: those of the request, prompt by prompt.
    n: number of choices of each prompt, whose tokens are counted once for all of them.
    start: when the request came, in seconds of time.perf_counter.
    """

    def __init__(self, jobs: Sequence[Job], n: int) -> None:
        self.start = time.perf_counter()
        self.prompt_tokens = sum(len(job.ids) for job in jobs[::n])
        self.n = n
        self.cached: dict[int, int] = {}  # the first job of a prompt -> tokens of it that the prefix cache held
        self.waited_s = 0.0  # seconds, of the job that waited longest
        self.num_tokens = 0
        self.num_drafted = 0
        self.accepted: Counter[int] = Counter()  # accepted draft tokens -> steps with drafts that had so many
        self.first = self.last = self.start  # moments of the first token and the last one

    def record(self, index: int, progress: Progress) -> None:
        """Count a step of job number `index`. progress: what the step added to the job."""
        now = time.perf_counter()
        if self.last == self.start:
            self.first = now
        self.last = now
        self.waited_s = max(self.waited_s, progress.waited_s)
        if index % self.n == 0:
            self.cached.setdefault(index, progress.num_cached)
        self.num_tokens += len(progress.token_ids)
        if progress.num_drafted:
            self.num_drafted += progress.num_drafted
            self.accepted[progress.origins.count("accepted")] += 1

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, as JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }

    @property
    def metrics(self) -> dict[str, Any]:
        """vLLM's metrics of a request, over all choices; speculative_decoding is None where nothing was drafted."""
        seconds, between = self.last - self.start, self.last - self.first
        return {
            "time_to_first_token_ms": _ms(self.first - self.start),
            "queue_time_ms": _ms(self.waited_s),
            "generation_time_ms": _ms(between),
            "mean_itl_ms": _ms(between / (self.num_tokens - 1)) if self.num_tokens > 1 else None,
            "tokens_per_second": round(self.num_tokens / seconds, 3) if seconds else None,
            "speculative_decoding": self._speculative() if self.accepted else None,
        }

    def _speculative(self) -> dict[str, Any]:
        num_steps, num_accepted = self.accepted.total(), sum(length * steps for length, steps in self.accepted.items())
        return {
            "mean_acceptance_length": round(1 + num_accepted / num_steps, 4),
            "draft_acceptance_rate": round(num_accepted / self.num_drafted, 4),
            "acceptance_histogram": [self.accepted[length] for length in range(max(self.accepted) + 1)],
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": self.num_drafted,
        }


def _ms(seconds: float) -> float:
    """Return a time in milliseconds."""
    return round(seconds * 1000, 3)
