"""The server in replicas on real Ray: what clients see, sessions, and what the death of a replica does."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import serving
from foretoken.cluster.app import replicas
from foretoken.engine import Engine
from foretoken.serve.batch import Batch
from foretoken.serve.listen import address, bound
from foretoken.serve.settings import Settings
from replicas import KEY, PATIENCE, figures, wait_until_two
from replicas import engine as engine  # fixtures
from replicas import folder as folder
from serving import CHAT, COMPLETION

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
SETTINGS = Settings(name=serving.NAME, max_batch=2, max_queue=30, api_key=["secret"])


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
def url(cluster: None, folder: Path) -> Iterator[str]:
    """Of two replicas, each with a core."""
    from ray import serve

    with bound("127.0.0.1", 0) as listening:
        where, port = address(listening), listening.getsockname()[1]
    serve.start(http_options={"port": port})
    serve.run(replicas(partial(load, str(folder)), SETTINGS, fewest=2), name="test")
    yield where
    serve.shutdown()


def post(url: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(url + COMPLETION, json=body, headers={**KEY, **headers}, timeout=PATIENCE)


def job(i: int) -> dict[str, Any]:
    """The body of a request: every second one greedy, every third one a stream."""
    return {"prompt": f"job {i}:", "max_tokens": 96, "seed": i, "temperature": float(i % 2), "stream": i % 3 == 0}


def wanted(engine: Engine, i: int) -> str:
    return engine.generate(job(i)["prompt"], max_new_tokens=96, seed=i, temperature=float(i % 2)).text


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
    answer = client.chat.completions.create(model="toy", messages=chat, seed=4, max_tokens=16)
    assert answer.choices[0].message.content == engine.generate(chat, seed=4, temperature=1.0, max_new_tokens=16).text


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
        told = sorted(each for each in response.headers.items() if each[0] not in ("date", "content-length"))
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
        post(url, body, **{"X-Session-Id": session}).raise_for_status()

    def read() -> dict[str, float]:
        return figures(url, "vllm:prompt_tokens_total")

    homes = set()
    for session in "abcdefgh":
        before = read(), figures(url, "vllm:prefix_cache_hits_total")
        for i in range(4):
            ask(session, i)
        after = read(), figures(url, "vllm:prefix_cache_hits_total")
        tokens, hits = (
            {name: new[name] - old[name] for name in new if new[name] > old[name]}
            for old, new in zip(before, after, strict=True)
        )
        assert len(tokens) == 1, tokens
        assert tokens.keys() == hits.keys()
        assert sum(hits.values()) >= 3 * (len(head) - 64)  # the cache has whole blocks
        homes |= tokens.keys()
    assert len(homes) == 2
    before, end = read(), time.monotonic() + PATIENCE
    # More at once than the session's replica decodes side by side. Again until Ray knows how busy the other one is.
    while not all(count > before[name] for name, count in read().items()):
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
    serving.wait_until(lambda: not sum(figures(url, "vllm:num_requests_running").values()), PATIENCE)


@pytest.mark.slow
def test_a_client_that_tries_again_loses_nothing_when_a_replica_is_killed(url, engine, folder):
    names, done, failed = wait_until_two(url), [], []

    def ask(i: int) -> str:
        while True:
            begun = time.monotonic()
            try:
                response = post(url, job(i))
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
    response = post(url, job(1))
    assert response.status_code == 503  # as a single server answers what its death cuts off
    assert response.json()["error"]["type"] == "server_error"
    serving.wait_until(lambda: wait_until_two(url) != names, PATIENCE)
    assert text_of(post(url, job(2))) == wanted(engine, 2)
