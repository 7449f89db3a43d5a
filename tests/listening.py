"""Jobs for a server's worker, and who listens to what comes of them."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import foretoken
import tiny
from foretoken.core.sampling import Sampling
from foretoken.engine import Engine, Prompt, Result
from foretoken.serve.errors import ApiError
from foretoken.serve.jobs import Job, Progress
from foretoken.serve.worker import Worker

PATIENCE = 60.0  # seconds that only a test that fails waits


class Listener:
    """Collects what is told of one job. on_news: called after each piece, on the worker's thread."""

    def __init__(self, on_news: Callable[["Listener"], None] = lambda _: None) -> None:
        self.news: list[Progress | ApiError] = []
        self.done = threading.Event()
        self.on_news = on_news

    def __call__(self, news: Progress | ApiError) -> None:
        self.news.append(news)
        self.on_news(self)
        if isinstance(news, ApiError) or news.finish_reason:
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


def saved(target: LlamaForCausalLM, root: Path) -> dict[str, str]:
    """The folders of a target, and of a drafter that agrees with it often."""
    drafter = tiny.perturbed(target, 0.15, 1)
    return {"target": tiny.save(target, root / "target"), "drafter": tiny.save(drafter, root / "drafter")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Those of a target that the kernel takes."""
    return saved(tiny.llama(0, hidden=64), tmp_path_factory.mktemp("models"))


def load(folders: dict[str, str], drafter: str | None = "drafter", **options) -> Engine:
    """An engine whose texts end by their length alone. drafter: the name of a folder, or of a way to draft."""
    engine = foretoken.load(folders["target"], drafter=folders.get(drafter or "", drafter), device="cpu", **options)
    return replace(engine, eos_ids=frozenset())


def job(engine: Engine, prompt: Prompt, seed: int = 0, new: int = 24, temperature: float = 0.8, **options) -> Job:
    sampling = Sampling(temperature=temperature, **options.pop("sampling", {}))
    return Job(tuple(engine.encode(prompt)), sampling, seed, new, engine.eos_ids, **options)


def asked(worker: Worker, wanted: Job) -> Listener:
    """Submit a job; its listener."""
    listener = Listener()
    worker.submit(wanted, listener)
    return listener


def alone(engine: Engine, prompt: Prompt, seed: int = 0, new: int = 24, temperature: float = 0.8) -> Result:
    """What the engine writes for a job with these arguments."""
    return engine.generate(prompt, max_new_tokens=new, temperature=temperature, seed=seed)


@pytest.fixture
def work() -> Iterator[Callable[..., Worker]]:
    """Opens workers, and starts them if told to; they are stopped at the end of the test."""
    opened = []

    def work(engine: Engine, start: bool = False, **options) -> Worker:
        opened.append(Worker(engine, **options))
        if start:
            opened[-1].start()
        return opened[-1]

    yield work
    for worker in opened:
        worker.stop()


def finish(worker: Worker, *listeners: Listener) -> None:
    """Start a worker and wait for its jobs, as one call."""
    worker.start()
    for listener in listeners:
        assert listener.done.wait(PATIENCE)


class Raises:
    """A processor that fails once a text is long enough."""

    def __init__(self, error: Exception, length: int) -> None:
        self.error, self.length = error, length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= self.length:
            raise self.error
        return scores
