"""The server in replicas on real Ray: what clients see, sessions, and what the death of a replica does."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread, current_thread
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import serving
from foretoken.cluster import app
from foretoken.cluster.app import replicas
from foretoken.engine import Engine
from foretoken.serve.batch import Batch
from foretoken.serve.listen import address, bound
from foretoken.serve.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
SETTINGS = Settings(name=serving.NAME, max_batch=2, max_queue=30, api_key=["secret"])
KEY = {"Authorization": "Bearer secret"}
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE = 240  # seconds until a wait is a failure; no more than that is asserted by it


def load(folder: str) -> Engine:
    """Leaves the number of its process in the folder, and lets the model die once there is a file named die."""
    (Path(folder) / "pids" / str(os.getpid())).touch()
    die, step = Path(folder) / "die", Batch.step

    def mortal(batch: Batch) -> None:
        if die.exists():
            die.unlink()
            raise SystemExit("as the test wants it")
        step(batch)

    Batch.step = mortal
    return serving.load_pair(Path(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("replicas")
    (made / "pids").mkdir()
    serving.save_pair(made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """One engine, whose texts the replicas' must be."""
    return serving.load_pair(folder)


@pytest.fixture(scope="module")
def url(cluster: None, folder: Path) -> Iterator[str]:
    """Of two replicas, each with a core."""
    from ray import serve

    with bound("127.0.0.1", 0) as listening:
        where, port = address(listening), listening.getsockname()[1]
    serve.start(http_options={"port": port})
    serve.run(replicas(partial(load, str(folder)), SETTINGS, fewest=2), name="test")
    yield where
    serve.shutdown()


def figures(url: str, name: str) -> dict[str, float]:
    """A figure of every replica."""
    told: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(httpx.get(url + "/metrics", timeout=PATIENCE).text):
        for each in family.samples:
            if each.name == name:
                told[each.labels["replica"]] += each.value
    return dict(told)


def wait_until_two(url: str) -> set[str]:
    """The names of two replicas that answer, once there are two."""
    end = time.monotonic() + PATIENCE
    while len(names := set(figures(url, "vllm:num_requests_running"))) != 2:
        assert time.monotonic() < end, names
        time.sleep(0.2)
    return names


def job(i: int) -> dict[str, Any]:
    """The body of a request: every second one greedy, every third one a stream."""
    return {"prompt": f"job {i}:", "max_tokens": 96, "seed": i, "temperature": float(i % 2), "stream": i % 3 == 0}


def wanted(engine: Engine, i: int) -> str:
    body = job(i)
    result = engine.generate(body["prompt"], max_new_tokens=96, seed=i, temperature=body["temperature"])
    assert not isinstance(result, list)
    return result.text


def text_of(response: httpx.Response) -> str:
    if response.headers["content-type"] == "application/json":
        return response.json()["choices"][0]["text"]
    assert response.text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


@pytest.mark.slow
def test_many_clients_get_the_texts_of_one_engine(url, engine):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", timeout=PATIENCE, max_retries=0)

    def ask(i: int) -> str:
        body = job(i)
        if not body.pop("stream"):
            return client.completions.create(model=serving.NAME, **body).choices[0].text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(model="toy", stream=True, **body))

    before = figures(url, "vllm:request_success_total")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(32)))
    assert texts == [wanted(engine, i) for i in range(32)]
    served = {name: count - before.get(name, 0) for name, count in figures(url, "vllm:request_success_total").items()}
    assert len(served) == 2
    assert all(served.values())
    assert sum(served.values()) == 32
    chat = [{"role": "user", "content": "hello"}]
    answer = (
        client.chat.completions.create(model="toy", messages=chat, seed=4, max_tokens=16).choices[0].message.content
    )
    assert answer == engine.generate(chat, seed=4, temperature=1.0, max_new_tokens=16).text


@pytest.mark.slow
def test_a_client_sees_what_a_single_server_shows(url, engine):
    asked = [
        ("POST", COMPLETION, {"prompt": "abc", "max_tokens": 9, "seed": 3, "n": 2}),
        ("POST", COMPLETION, {"prompt": "abc", "max_tokens": 9, "seed": 3, "stream": True}),
        ("POST", CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 9, "seed": 1}),
        ("POST", COMPLETION, {"prompt": "abc", "surprise": 1}),
        ("POST", COMPLETION, {"prompt": "abc", "temperature": -1}),
        ("POST", COMPLETION, {"prompt": "abc", "model": "other"}),
        ("POST", COMPLETION, {"prompt": "abc " * 3000}),
        ("POST", COMPLETION, {"prompt": "abc", "n": 33}),
        ("POST", COMPLETION, "no object"),
        ("POST", "/tokenize", {"prompt": "abc"}),
        ("POST", "/detokenize", {"tokens": [97, 98]}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/other", None),
        ("GET", COMPLETION, None),
        ("GET", "/nowhere", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/version", None),
        ("GET", "/openapi.json", None),
        ("GET", "/", None),
    ]
    varying = re.compile(r'"(created|\w+_ms|tokens_per_second)":[0-9.]+')

    def seen(client: httpx.Client, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
        headers = {"X-Request-Id": "mine", **headers}
        response = client.request(method, path, json=body, headers=headers, timeout=PATIENCE)
        told = sorted(
            (name, value) for name, value in response.headers.items() if name not in ("date", "content-length")
        )
        return response.status_code, told, varying.sub("", response.text)

    with (
        serving.served(engine, max_batch=2, max_queue=30, api_key=["secret"]) as single,
        httpx.Client(base_url=url) as many,
    ):
        for method, path, body in asked:
            for headers in KEY, {}:
                assert seen(many, method, path, body, headers) == seen(single.client, method, path, body, headers), path


@pytest.mark.slow
def test_a_session_stays_with_a_replica_while_that_has_room(url):
    head = "a long beginning that all requests of a session share " * 8

    def ask(session: str, i: int, new: int = 1) -> None:
        body = {"prompt": f"{session}: {head}{i}", "max_tokens": new, "ignore_eos": True}
        httpx.post(
            url + COMPLETION, json=body, headers={**KEY, "X-Session-Id": session}, timeout=PATIENCE
        ).raise_for_status()

    homes = set()
    for session in "abcdefgh":
        before = figures(url, "vllm:prompt_tokens_total"), figures(url, "vllm:prefix_cache_hits_total")
        for i in range(4):
            ask(session, i)
        after = figures(url, "vllm:prompt_tokens_total"), figures(url, "vllm:prefix_cache_hits_total")
        grown = [
            {name: new[name] - old[name] for name in new if new[name] > old[name]}
            for old, new in zip(before, after, strict=True)
        ]
        assert len(grown[0]) == 1, grown
        assert grown[0].keys() == grown[1].keys()
        assert sum(grown[1].values()) >= 3 * (len(head) - 64)  # the cache has whole blocks
        homes |= grown[0].keys()
    assert len(homes) == 2
    before, end = figures(url, "vllm:prompt_tokens_total"), time.monotonic() + PATIENCE
    # More at once than the session's replica decodes side by side. Again until Ray knows how busy the other one is.
    while not all(count > before[name] for name, count in figures(url, "vllm:prompt_tokens_total").items()):
        assert time.monotonic() < end
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda i: ask("a", i, 400), range(6)))


@pytest.mark.slow
def test_a_client_that_goes_away_frees_its_place(url):
    body = {"prompt": "abc", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", url + COMPLETION, json=body, headers=KEY, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert sum(figures(url, "vllm:num_requests_running").values()) == 1
    end = time.monotonic() + PATIENCE
    while sum(figures(url, "vllm:num_requests_running").values()):
        assert time.monotonic() < end


@pytest.mark.slow
def test_a_client_that_tries_again_loses_nothing_when_a_replica_is_killed(url, engine, folder):
    names, done, failed = wait_until_two(url), [], []

    def ask(i: int) -> str:
        while True:
            begun = time.monotonic()
            try:
                response = httpx.post(url + COMPLETION, json=job(i), headers=KEY, timeout=PATIENCE)
            except httpx.RemoteProtocolError:  # a stream that broke off
                failed.append(begun)
                continue
            if response.status_code == 500:
                failed.append(begun)
                continue
            assert response.status_code == 200, response.text
            done.append(i)
            return text_of(response)

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, i) for i in range(96)]
        while len(done) < 16:
            time.sleep(0.01)
        pid = next(int(each.name) for each in (folder / "pids").iterdir() if Path(f"/proc/{each.name}").exists())
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        left = len(done)
        texts = [each.result(PATIENCE) for each in asked]
    assert left < 96
    assert texts == [wanted(engine, i) for i in range(96)]
    assert len(failed) <= 8
    assert all(begun < killed for begun in failed), (killed, failed)  # none that came after the death
    assert wait_until_two(url) != names


@pytest.mark.slow
def test_a_replica_whose_model_thread_died_is_replaced(url, engine, folder):
    names = wait_until_two(url)
    (folder / "die").touch()
    response = httpx.post(url + COMPLETION, json=job(1), headers=KEY, timeout=PATIENCE)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    end = time.monotonic() + PATIENCE
    while wait_until_two(url) == names:
        assert time.monotonic() < end
    assert text_of(httpx.post(url + COMPLETION, json=job(2), headers=KEY, timeout=PATIENCE)) == wanted(engine, 2)


@pytest.fixture
def command(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """`foretoken serve --ray 1` with a Ray of its own; its address, and the lines that it goes on to write."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[cluster]'")
    models = ["target", "--drafter", "drafter", "--tree", "chain:3", "--compile", "off"]  # in the folder where it runs
    line = [sys.executable, "-m", "foretoken", "serve", *models, "--ray", "1", "--port", "0", "--log", "json"]
    line += ["--max-replicas", "2", "--max-batch", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
    environment["RAY_ADDRESS"] = "local"
    told: list[str] = []
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment) as running:
        assert running.stderr is not None
        stderr = running.stderr
        for each in stderr:
            told.append(each)
            if "listens on" in each:
                break
        else:
            pytest.fail("it ended before it listened: " + "".join(told))
        Thread(target=lambda: told.extend(stderr), daemon=True).start()
        yield running, re.search(r"http://[0-9.:]+", told[-1])[0], told
        running.kill()


@pytest.mark.slow
def test_replicas_come_with_the_requests(command):
    _, url, _ = command
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
    running, url, told = command
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
    assert running.wait(PATIENCE) == 0
    assert any("drains" in line for line in told)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")


@pytest.mark.slow
def test_the_second_signal_ends_at_once(command):
    running, url, _ = command
    body = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + COMPLETION, json=body, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        running.send_signal(signal.SIGINT)
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) == 0


class RayError(Exception):
    pass


class FakeServe:
    """As much of Ray Serve as the command uses, with one application."""

    deployed = False

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
    yield fake
    for each, handler in handlers.items():
        signal.signal(each, handler)


def command_on(fake: FakeServe) -> None:
    with bound("127.0.0.1", 0) as listening:
        app.serve_replicas("an application", Settings(), listening)


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
            command_on(fake_serve)
    finally:
        released.set()
    assert left.value.code == 1
    assert told == [False, True, True]
    assert threads[1] is threads[2] is not threads[0]  # one that watches, however often it asks


@pytest.mark.parametrize("call", ["delete", "status", "shutdown"])
def test_a_second_signal_is_heard_while_a_call_to_ray_has_no_end(fake_serve, monkeypatch, call):
    released, status = Event(), fake_serve.status

    def endless(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        released.wait(PATIENCE)

    def first() -> Any:
        if fake_serve.deployed:  # and so it listens
            monkeypatch.setattr(fake_serve, "status", status)
            monkeypatch.setattr(fake_serve, call, endless)
            os.kill(os.getpid(), signal.SIGTERM)
        return status()

    monkeypatch.setattr(fake_serve, "status", first)
    try:
        begun = time.monotonic()
        command_on(fake_serve)
        assert time.monotonic() - begun < app.GONE_S / 2
    finally:
        released.set()


def test_the_command_says_what_replicas_need(run):
    for given, words in (
        (["--ray", 0], "ray is 0"),
        (["--ray", 2, "--ray-cpus", 0], "ray_cpus is 0"),
        (["--ray", 2, "--device", "cuda:1"], "--device cuda:1 names one GPU"),
        (["--max-replicas", 3], "--max-replicas needs --ray"),
    ):
        code, _, err = run("serve", *given)
        assert (code, len(err.splitlines())) == (2, 1), err
        assert words in err


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
