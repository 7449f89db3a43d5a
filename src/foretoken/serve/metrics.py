"""The figures of one request, and those of the server for Prometheus.

They have vLLM's names, so that dashboards and `vllm bench serve` find them.
"""

import time
from collections import Counter as Counts
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from foretoken.serve.jobs import Job, Progress
from foretoken.serve.worker import Worker

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of the page that Prometheus reads
# Upper bounds of the histograms' buckets. Seconds: to the first token, between tokens, of a whole request. Then tokens.
FIRST = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


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
        self.accepted: Counts[int] = Counts()  # accepted draft tokens -> steps with drafts that had so many
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


class Metrics:
    """The figures that a server counts and measures.

    A step's figures are counted once for each job that took part in it. Accepted draft tokens are also counted by
    "position", vLLM's word: the depth of their node less 1.

    name: the model's name, a label of every figure.
    worker: the one that decodes; its numbers of running and waiting jobs and its use of the cache are read from it.
    """

    def __init__(self, name: str, worker: Worker) -> None:
        disable_created_metrics()  # their names begin as the counters' names do, and clients would add them up
        self.registry = CollectorRegistry()
        self.name = name

        def counter(what: str, about: str, *labels: str) -> Counter:
            return Counter(f"vllm:{what}", about, ["model_name", *labels], registry=self.registry)

        def histogram(what: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{what}", about, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(name)

        def gauge(what: str, about: str, read: str) -> None:
            made = Gauge(f"vllm:{what}", about, ["model_name"], registry=self.registry)
            made.labels(name).set_function(lambda: getattr(worker, read))

        gauge("num_requests_running", "Texts that are being decoded.", "running")
        gauge("num_requests_waiting", "Texts that wait.", "waiting")
        gauge("kv_cache_usage_perc", "Share of the cache that texts take, from 0 to 1.", "cache_use")
        self.drafts = counter("spec_decode_num_drafts", "Steps with draft tokens.").labels(name)
        self.drafted = counter("spec_decode_num_draft_tokens", "Draft tokens.").labels(name)
        self.accepted = counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.").labels(name)
        self.by_depth = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by depth, from 0.", "position"
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.").labels(name)
        self.generation_tokens = counter("generation_tokens", "Tokens of texts.").labels(name)
        self.queries = counter("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.").labels(name)
        self.hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.").labels(name)
        self.success = counter("request_success", "Texts by the reason of their end.", "finished_reason")
        self.rejections = counter("admission_rejections", "Requests refused for a full queue.").labels(name)
        self.first = histogram("time_to_first_token_seconds", "Until the first token.", FIRST)
        self.between = histogram("inter_token_latency_seconds", "Between the steps of a text.", BETWEEN)
        self.per_token = histogram("request_time_per_output_token_seconds", "Mean after the first token.", BETWEEN)
        self.queue = histogram("request_queue_time_seconds", "Waiting for other texts to end.", WHOLE)
        self.prefill = histogram("request_prefill_time_seconds", "From there to the first token.", WHOLE)
        self.whole = histogram("e2e_request_latency_seconds", "From a request to its last token.", WHOLE)
        self.decoding = histogram("request_decode_time_seconds", "From the first token to the last.", WHOLE)
        worker.on_step = histogram("iteration_tokens_total", "Tokens of a step, of all texts together.", TOKENS).observe
        for depth in range(8):
            self.by_depth.labels(name, depth).inc(0)

    def step(self, progress: Progress) -> None:
        """Count one step of one job. progress: what the step added to the job."""
        accepted = progress.origins.count("accepted")
        if progress.num_drafted:
            self.drafts.inc()
            self.drafted.inc(progress.num_drafted)
            self.accepted.inc(accepted)
            for depth in range(accepted):
                self.by_depth.labels(self.name, depth).inc()
        self.generation_tokens.inc(len(progress.token_ids))
        if progress.finish_reason is not None:
            self.success.labels(self.name, progress.finish_reason).inc()

    def began(self, num_prompt: int, first: Progress, seconds: float) -> None:
        """Count the first step of a job.

        num_prompt: number of tokens of its prompt.
        first: what the step added to the job.
        seconds: time since its request came.
        """
        self.prompt_tokens.inc(num_prompt)
        self.queries.inc(num_prompt)
        self.hits.inc(first.num_cached)
        self.first.observe(seconds)
        self.queue.observe(first.waited_s)
        self.prefill.observe(seconds - first.waited_s)

    def ended(self, tally: Tally) -> None:
        """Count a request whose texts are all finished. tally: the sums over its steps."""
        self.whole.observe(time.perf_counter() - tally.start)
        self.decoding.observe(tally.last - tally.first)
        if tally.num_tokens > 1:
            self.per_token.observe((tally.last - tally.first) / (tally.num_tokens - 1))

    def text(self) -> bytes:
        """Return the page that Prometheus reads, in UTF-8."""
        return generate_latest(self.registry)


def _ms(seconds: float) -> float:
    """Return a time in milliseconds."""
    return round(seconds * 1000, 3)
