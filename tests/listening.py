"""Jobs for a server's worker, and who listens to what comes of them."""

import threading
from collections.abc import Callable

from foretoken.core.sampling import Sampling
from foretoken.engine import Engine, Prompt
from foretoken.serve.jobs import Failed, Job, Progress
from foretoken.serve.worker import Worker

PATIENCE = 60.0  # seconds that only a test that fails waits


class Listener:
    """Collects what is told of one job. on_news: called after each piece, on the worker's thread."""

    def __init__(self, on_news: Callable[["Listener"], None] = lambda _: None) -> None:
        self.news: list[Progress | Failed] = []
        self.done = threading.Event()
        self.on_news = on_news

    def __call__(self, news: Progress | Failed) -> None:
        self.news.append(news)
        self.on_news(self)
        if isinstance(news, Failed) or news.finish_reason:
            self.done.set()

    @property
    def steps(self) -> list[Progress]:
        return [x for x in self.news if isinstance(x, Progress)]

    @property
    def ids(self) -> list[int]:
        return [token for step in self.steps for token in step.token_ids]

    def wait(self) -> list[int]:
        assert self.done.wait(PATIENCE)
        assert isinstance(self.news[-1], Progress), self.news[-1]
        return self.ids


def job(engine: Engine, prompt: Prompt, seed: int = 0, new: int = 24, temperature: float = 0.8, **options) -> Job:
    sampling = Sampling(temperature=temperature, **options.pop("sampling", {}))
    return Job(tuple(engine.encode(prompt)), sampling, seed, new, engine.eos_ids, **options)


def started(engine: Engine, **options) -> Worker:
    worker = Worker(engine, **options)
    worker.start()
    return worker


def finish(worker: Worker, *listeners: Listener) -> None:
    """Start a worker and wait for its jobs, as one call."""
    worker.start()
    for listener in listeners:
        assert listener.done.wait(PATIENCE)
