"""The command `foretoken serve --ray`: it serves, drains and ends, with real Ray and where a call to Ray has no end."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from foretoken.cluster import app
from foretoken.serve.listen import bound
from foretoken.serve.settings import Settings
from replicas import PATIENCE, wait_until_two
from replicas import engine as engine  # fixtures
from replicas import folder as folder
from serving import COMPLETION, Process, process

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # Ray's own


@pytest.fixture
def command(folder: Path) -> Iterator[Process]:
    """`foretoken serve --ray 1` with a Ray of its own."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[cluster]'")
    line = ["target", "--drafter", "drafter", "--tree", "chain:3", "--ray", "1", "--max-replicas", "2", "--max-batch"]
    with process(*line, "1", folder=folder, RAY_ADDRESS="local") as running:  # models: in the folder where it runs
        yield running


@pytest.mark.slow
def test_replicas_come_with_the_requests(command):
    url = command.url
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
    two = Event()

    def ask() -> None:
        end = time.monotonic() + PATIENCE
        while not two.is_set() and time.monotonic() < end:
            httpx.post(url + COMPLETION, json=body, timeout=PATIENCE).raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask) for _ in range(4)]
        try:
            wait_until_two(url)
        finally:
            two.set()
        assert not [each.exception() for each in asked if each.exception()]


@pytest.mark.slow
def test_the_command_serves_and_drains(command, engine):
    running, url = command.running, command.url
    assert httpx.get(url + "/ready", headers={"Host": "evil.example"}, timeout=PATIENCE).status_code == 403
    body = {"prompt": "abc", "max_tokens": 1200, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + COMPLETION, json=body, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        first = next(lines)
        running.send_signal(signal.SIGTERM)
        while (status := httpx.get(url + "/ready", timeout=PATIENCE).status_code) == 200:
            assert running.poll() is None
        rest = list(lines)
    assert status == 404
    assert rest[-2] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in (first, *rest) if line.startswith("data: {")]
    text = "".join(event["choices"][0]["text"] for event in events)
    endless = replace(engine, eos_ids=frozenset())
    assert text == endless.generate("abc", max_new_tokens=1200, temperature=0.0).text
    assert "drains" in command.ends()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")


@pytest.mark.slow
def test_the_second_signal_ends_at_once(command):
    running = command.running
    body = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", command.url + COMPLETION, json=body, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        running.send_signal(signal.SIGINT)
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) == 0


class RayError(Exception):
    pass


class FakeServe:
    """As much of Ray Serve as the command uses, with one application. command: what is called on it."""

    deployed = False
    command: Callable[[], None]

    def start(self, **_: Any) -> None: ...

    def run(self, application: Any, name: str) -> None:
        self.deployed = True

    def status(self) -> Any:
        return SimpleNamespace(proxies=[], applications={app.NAME: "running"} if self.deployed else {})

    def delete(self, name: str, _blocking: bool) -> None:
        self.deployed = False

    def shutdown(self) -> None: ...


@pytest.fixture
def fake_serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServe]:
    fake, handlers = FakeServe(), {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    ray = SimpleNamespace(init=lambda: None, shutdown=lambda: None)
    exceptions = SimpleNamespace(RayError=RayError)
    modules = {"ray": ray, "ray.serve": fake, "ray.exceptions": exceptions}
    monkeypatch.setattr(app, "need", modules.__getitem__)
    with bound("127.0.0.1", 0) as listening:
        fake.command = lambda: app.serve_replicas("an application", Settings(), listening)
        yield fake
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("how", ["deleted", "failing", "silent"])
def test_the_command_ends_where_its_application_or_the_cluster_is_gone(fake_serve, monkeypatch, how):
    released, status, told, threads = Event(), fake_serve.status, [], []

    def gone() -> Any:
        told.append(fake_serve.deployed)
        threads.append(current_thread())
        if len(told) < 3:  # before it was there, and while it is
            return status()
        if how == "failing":
            raise RayError
        if how == "silent":
            released.wait(PATIENCE)
        return SimpleNamespace(applications={"another": "running"})

    monkeypatch.setattr(fake_serve, "status", gone)
    monkeypatch.setattr(app, "GONE_S", 2.0)
    if how == "silent":
        monkeypatch.setattr(fake_serve, "shutdown", lambda: released.wait(PATIENCE))
    try:
        with pytest.raises(SystemExit) as left:
            fake_serve.command()
    finally:
        released.set()
    assert left.value.code == 1
    assert told == [False, True, True]
    assert threads[1] is threads[2] is not threads[0]  # one that watches, however often it asks


@pytest.mark.parametrize("call", ["delete", "status", "shutdown"])
def test_a_second_signal_is_heard_while_a_call_to_ray_has_no_end(fake_serve, monkeypatch, call):
    released, status, returned = Event(), fake_serve.status, []

    def endless(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        returned.append(released.wait(PATIENCE))

    def first() -> Any:
        if fake_serve.deployed:  # and so it listens
            monkeypatch.setattr(fake_serve, "status", status)
            monkeypatch.setattr(fake_serve, call, endless)
            os.kill(os.getpid(), signal.SIGTERM)
        return status()

    monkeypatch.setattr(fake_serve, "status", first)
    monkeypatch.setattr(app, "GONE_S", math.inf)
    try:
        fake_serve.command()
        assert not returned  # so that it has not waited for the call
    finally:
        released.set()


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from foretoken.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "line",
    [
        ["serve", "--port", "0", "--ray", "2"],
        ["generate", "--batch-file", "b", "--ray", "2", "--out", "o", "--seed", "0"],
    ],
)
def test_ray_that_is_missing_is_one_sentence_before_torch(tmp_path, line):
    (tmp_path / "b").write_text('{"prompt": "x"}\n')
    path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *line],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "foretoken: Ray is not installed: pip install -e '.[cluster]'.\n")
    assert not (tmp_path / "o").exists()
