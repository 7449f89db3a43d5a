"""The server's figures for Prometheus, under vLLM's names, so that dashboards and `vllm bench serve` find them."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from foretoken.serve.jobs import Progress
from foretoken.serve.tally import Tally
from foretoken.serve.worker import Worker

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of the page that Prometheus reads
# Upper bounds of the histograms' buckets. Seconds: to the first token, between tokens, of a whole request. Then tokens.
FIRST = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


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
