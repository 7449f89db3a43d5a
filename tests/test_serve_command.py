"""The command `foretoken serve`: bad options, its signals, and its end where the model's thread has died."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread

import httpx
import pytest

import foretoken
import serving
from foretoken.core.errors import ForetokenError
from foretoken.serve.batch import Batch
from foretoken.serve.listen import bound
from foretoken.serve.owner import Owner
from foretoken.serve.run import Server, serve
from foretoken.serve.settings import Settings
from limited import LONG, error
from limited import engine as engine  # fixtures
from raising import raising
from serving import COMPLETION

pytestmark = pytest.mark.long


@pytest.mark.parametrize("tells", [True, False])
def test_a_dead_model_thread_is_told_and_ends_the_process(engine, monkeypatch, tells):
    """tells: whether it can tell those who wait for its texts."""

    class DiedError(BaseException):
        pass

    with serving.served(engine) as running:
        monkeypatch.setattr(Batch, "step", raising(DiedError))
        if tells:
            error(running.post(COMPLETION, {"prompt": "abc"}), 503)
        else:
            monkeypatch.setattr(Batch, "fail", raising(DiedError))
            with pytest.raises(httpx.ReadTimeout):
                running.post(COMPLETION, {"prompt": "abc"}, timeout=0.5)
            serving.wait_until(lambda: running.worker.error is not None)
        error(running.client.get("/health"), 503)
        error(running.client.get("/ready"), 503)
        error(running.post(COMPLETION, {"prompt": "abc"}), 503)

    left = []

    def run(listening):
        try:
            serve(engine, Settings(drain=1.0), listening, Owner())
        except SystemExit as leaving:
            left.append(leaving.code)

    with bound("127.0.0.1", 0) as listening:
        thread = Thread(target=run, args=(listening,))
        thread.start()
        with httpx.Client(transport=httpx.HTTPTransport(retries=10), timeout=serving.PATIENCE) as client:
            response = client.post(f"http://127.0.0.1:{listening.getsockname()[1]}{COMPLETION}", json={"prompt": "abc"})
        assert response.status_code == (503 if tells else 500)
        thread.join(serving.PATIENCE)
    assert left == [1]


def test_idle_connections_are_kept_longer_than_clients_keep_them(engine, monkeypatch):
    """Else a request may be sent on a connection that the server is just closing, and gets no answer."""
    kept = []
    monkeypatch.setattr(Server, "run", lambda server, sockets: kept.append(server.config.timeout_keep_alive))
    with bound("127.0.0.1", 0) as listening:
        serve(engine, Settings(), listening, Owner())
    assert kept == [75]


@pytest.fixture
def process(engine, tmp_path, request):
    """`foretoken serve` in a process of its own. A test may be given further options."""
    options = ["--drafter", "ngram", *getattr(request, "param", ())]
    with serving.process(engine.target.name, *options, folder=tmp_path) as running:
        yield running


def ask_often(url):
    """Until a connection is refused; one that is made just before the port is closed gets no answer."""
    for _ in range(10_000):
        with suppress(httpx.RemoteProtocolError, httpx.ReadError):
            httpx.get(url, timeout=serving.PATIENCE)


def test_the_first_signal_drains_and_the_second_ends(process):
    running, url = process.running, process.url
    with httpx.stream("POST", url + COMPLETION, json={**LONG, "stream": True}, timeout=serving.PATIENCE) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        running.send_signal(signal.SIGTERM)
        serving.wait_until(lambda: "drains" in process.told[-1])
        for _ in range(20):  # the stream goes on
            assert next(lines) is not None
        with pytest.raises(httpx.ConnectError):
            ask_often(url + "/health")
        running.send_signal(signal.SIGTERM)
        *_, last = (line for line in lines if line)
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "The server is shutting down."
        assert "Traceback" not in process.ends()


@pytest.mark.parametrize(
    ("process", "twice"), [(("--drain", "1000"), True), (("--drain", "1"), False)], indirect=["process"]
)
def test_who_never_sends_a_whole_body_does_not_hold_the_end_up(process, twice):
    """Neither when a second signal came, nor when the time to drain is over."""
    host, port = process.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"POST {COMPLETION} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\nx".encode())
        httpx.get(process.url + "/health")  # the other request was begun before
        process.running.send_signal(signal.SIGTERM)
        serving.wait_until(lambda: "drains" in process.told[-1])
        if twice:
            process.running.send_signal(signal.SIGTERM)
        assert "Traceback" not in process.ends()


@pytest.mark.parametrize("process", [("--drain", "1")], indirect=True)
def test_what_runs_longer_than_drain_is_told_so(process):
    url = process.url
    with ThreadPoolExecutor(1) as others, httpx.Client(timeout=serving.PATIENCE) as client:
        with client.stream("POST", url + COMPLETION, json={**LONG, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            assert next(lines).startswith("data: ")
            other = others.submit(client.post, url + COMPLETION, json=LONG)
            while not re.search(r"num_requests_running\{[^}]*\} 2", client.get(url + "/metrics").text):
                pass
            process.running.send_signal(signal.SIGTERM)
            *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "The server is shutting down."
        answer = other.result(serving.PATIENCE)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "The server is shutting down.")
    assert "Traceback" not in process.ends()


LOADING = """
import sys, torch
from foretoken.cli.main import main
from foretoken.cli.options import EngineOptions

def load(*_):
    numbers = torch.rand(500, 500)
    print("loading", file=sys.stderr, flush=True)
    while True:
        numbers = numbers @ numbers

EngineOptions.load = load
sys.argv = ["foretoken", "serve", "--port", "0"]
main()
"""


def test_ctrl_c_while_the_model_is_loading_is_a_clean_end():
    """Python's own end would not survive the model's thread, which is in the midst of C++."""
    package = str(Path(foretoken.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", LOADING], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": package}
    ) as running:
        assert running.stderr.readline() == "loading\n"
        running.send_signal(signal.SIGINT)
        try:
            assert (running.wait(serving.PATIENCE), running.stderr.read()) == (130, "")
        finally:
            running.kill()


def test_a_host_that_no_network_has_is_refused(run):
    run.refused("Cannot listen on é..x port ", "serve", "--host", "é..x")


def test_a_port_that_another_server_took_during_the_load_is_told(engine):
    with bound("127.0.0.1", 0) as first, bound(*first.getsockname()) as second:  # as if both loaded a model now
        first.listen()
        with pytest.raises(ForetokenError, match=r"^Cannot listen on 127\.0\.0\.1 port \d+: .* Choose another"):
            serve(engine, Settings(), second, Owner())


def test_a_port_that_is_taken_is_told_at_once(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run.refused(f"Cannot listen on 127.0.0.1 port {port}: ", "serve", "--port", port)


def test_the_extra_that_is_missing_is_named(run, monkeypatch):
    monkeypatch.setattr("foretoken.cli.serve.find_spec", lambda name: None)
    run.refused("The server needs further packages: pip install -e '.[serve]'.", "serve")
