"""A server of the toy pair on a free loopback port, inside the test's own process."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from transformers import PreTrainedTokenizerFast

import foretoken
import tiny
from foretoken.engine import Engine
from foretoken.serve.app import create_app
from foretoken.serve.listen import address, bound
from foretoken.serve.settings import Settings
from foretoken.serve.worker import Worker

PATIENCE, LONG_PATIENCE = 60, 240  # seconds until a wait is a failure, and one for a whole program
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Only system, user and assistant speak here.') }}{% endif %}"
    "{{ m.role[0] + ':' + m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
NAME = "toy"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Served:
    """A running server. url: without a slash at the end."""

    url: str
    worker: Worker
    client: httpx.Client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)


def toy_tokenizer(template: Any = TEMPLATE, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Bytes, the mark that ends a turn, and what other special tokens a chat template has."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", *special]})
    tokenizer.chat_template = template
    return tokenizer


def save_pair(folder: Path, context: int = 2048, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Write the folders of a pair with a chat template. tokenizer: by default `toy_tokenizer()`."""
    tokenizer = tokenizer or toy_tokenizer()
    target = tiny.llama(0, vocab=len(tokenizer), context=context)
    for name, model in (("target", target), ("drafter", tiny.perturbed(target, 0.15, 1))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def save_target(folder: Path, context: int = 2048) -> str:
    """Write the folder of a target with a chat template, which the kernel takes."""
    tokenizer = toy_tokenizer()
    tiny.llama(0, vocab=len(tokenizer), hidden=64, context=context).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def load_pair(folder: Path) -> Engine:
    """The engine of what `save_pair` wrote."""
    return foretoken.load(str(folder / "target"), drafter=str(folder / "drafter"), tree="chain:3", device="cpu")


def toy_engine(folder: Path, context: int = 2048, tokenizer: PreTrainedTokenizerFast | None = None) -> Engine:
    """Of a new pair; see `save_pair`."""
    save_pair(folder, context, tokenizer)
    return load_pair(folder)


def client_of(served: Served) -> openai.OpenAI:
    """OpenAI's own client of a server, which tries nothing twice."""
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@contextmanager
def served(engine: Engine, **settings: Any) -> Iterator[Served]:
    """The real app behind a real uvicorn."""
    chosen = Settings(name=NAME, port=0, **settings)
    app = create_app(engine, chosen)
    started = Event()

    class Started(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    with bound(chosen.host, chosen.port) as listening:
        server = Started(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5))
        thread = Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            assert started.wait(PATIENCE)
            url = address(listening)
            with httpx.Client(base_url=url, timeout=PATIENCE) as client:
                yield Served(url, app.state.service.worker, client)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


@dataclass(frozen=True)
class Process:
    """`foretoken serve` in a process of its own. url: its address. told: the lines that it has written to stderr."""

    running: subprocess.Popen[str]
    url: str
    told: list[str]

    def ends(self) -> str:
        """Wait for its end, which must be one without an error; all that it wrote."""
        assert self.running.wait(LONG_PATIENCE) == 0
        wait_until(lambda: self.told[-1] == "")
        return "".join(self.told)


@contextmanager
def process(*options: str, folder: Path, **environment: str) -> Iterator[Process]:
    """`foretoken serve` with these options and a free port, once it listens. folder: where it runs."""
    line = [sys.executable, "-m", "foretoken", "serve", *options, "--port", "0", "--compile", "off", "--log", "json"]
    path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment) as running:
        told: list[str] = []
        listens = Event()

        def read() -> None:
            while told[-1:] != [""]:  # its end
                told.append(running.stderr.readline())
                if "listens on" in told[-1] or not told[-1]:
                    listens.set()

        Thread(target=read, daemon=True).start()
        try:
            assert listens.wait(LONG_PATIENCE)
            urls = re.findall(r"listens on (http://[0-9.:]+) \(base URL of OpenAI clients: \1/v1\)", "".join(told))
            assert urls, "it ended before it listened: " + "".join(told)
            yield Process(running, urls[0], told)
        finally:
            running.kill()


def wait_until(true: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Return as soon as it is true; fail if it never is."""
    end = time.monotonic() + patience
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """That of a new toy pair."""
    return toy_engine(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Served]:
    """A server of the engine that the test's module has as a fixture."""
    with served(engine) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of it."""
    with client_of(server) as made:
        yield made
