"""The server's endpoints, limits and manners, over real sockets."""

import asyncio
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

import httpx
import pytest

import foretoken
import serving
from foretoken.core.errors import ForetokenError
from foretoken.serve.batch import Batch
from foretoken.serve.guards import Local
from foretoken.serve.listen import bound
from foretoken.serve.logs import Json, Text
from foretoken.serve.owner import Owner
from foretoken.serve.run import serve
from foretoken.serve.schema import ChatRequest, CompletionRequest
from foretoken.serve.settings import KEYS, Settings
from scripts import tables

LONG = {"prompt": "abc", "max_tokens": 16_000, "ignore_eos": True}  # takes far longer than any test waits
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return serving.toy_engine(tmp_path_factory.mktemp("pair"), context=16_384)


@pytest.fixture(scope="module")
def server(engine):
    with serving.served(engine, max_batch=2, max_queue=3, max_body=20_000) as running:
        yield running


@pytest.fixture(scope="module")
def small(engine):
    """Another server, with keys, a short time limit, one row and no queue."""
    with serving.served(engine, api_key=["first", "zweit\u00e9"], timeout=0.4, max_batch=1, max_queue=0) as running:
        yield running


def error(response, status=400):
    assert response.status_code == status, response.text
    body = response.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    assert "\n" not in body["message"]
    return body


def test_what_a_probe_asks(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    assert server.client.get("/version").json() == {"version": foretoken.__version__}
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["chat"]) == (serving.NAME, 16_384, True)
    error(server.client.get("/nothing"), 404)
    error(server.client.get(CHAT), 405)


def test_tokens_there_and_back(server, engine):
    told = server.post("/tokenize", {"prompt": "h\u00e9"}).json()
    assert told == {"count": 3, "max_model_len": 16_384, "tokens": engine.encode("h\u00e9")}
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "h\u00e9"}
    assert server.post("/tokenize", {"messages": USER}).json()["tokens"] == engine.encode(USER)
    assert error(server.post("/tokenize", {}))["param"] == "prompt"
    assert error(server.post("/detokenize", {"tokens": [258]}))["param"] == "tokens"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"best_of": 2}, "best_of", "Unknown field best_of"),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "Unknown field",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options", "is for stream"),
        ({"prompt": 5}, "prompt", "a valid string or a valid list"),
        ({"prompt": ["a", 5]}, "prompt.1", "a valid string"),
        ({"prompt": None}, "prompt", "a valid string"),
        ({"prompt": ""}, "prompt", "The prompt is empty"),
        ({"prompt": []}, "prompt", "at least one"),
        ({"prompt": [999]}, "prompt", "has token id 999"),
        ({"prompt": ["a", ""]}, "prompt", "Prompt 2 is empty"),
        ({"prompt": "a\ud800"}, "prompt", "not valid Unicode"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "5"}, "max_tokens", "a valid integer"),
        ({"max_tokens": 1.5}, "max_tokens", "a valid integer"),
        ({"max_tokens": True}, "max_tokens", "a valid integer"),
        ({"n": 6}, "n", "6 texts at once, and 5 are the most"),
        ({"prompt": ["a"] * 6}, "prompt", "6 texts at once"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"temperature": float("nan")}, "temperature", "temperature is nan"),
        ({"top_p": 0}, "top_p", "top_p is 0"),
        ({"top_k": -1}, "top_k", "top_k is -1"),
        ({"min_p": 2}, "min_p", "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty is 0"),
        ({"frequency_penalty": 1e308}, "frequency_penalty", "frequency_penalty is 1e"),
        ({"presence_penalty": "x"}, "presence_penalty", "a valid number"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has token id 'x'"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "ids go from 0 to 257"),
        ({"logit_bias": {"1": float("inf")}}, "logit_bias", "logit_bias of token 1 is inf"),
        ({"seed": -1}, "seed", "seed is -1"),
        ({"seed": 2**32 - 1, "n": 2}, "seed", "for every prompt of a list"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": 1, "echo": True}, "echo", "leave out either"),
        ({"speculation": "on"}, "speculation", "'off'"),
        ({"speculation": 0}, "speculation", "greater than or equal to 1"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "no json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "cannot be enforced",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "leave out either"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "2 fields"),
    ],
)
def test_bad_completions_are_told_by_name(server, body, param, says):
    sent = json.dumps({"prompt": "abc", "max_tokens": 4, **body})
    told = error(server.client.post(COMPLETION, content=sent, headers={"content-type": "application/json"}))
    assert told["param"] == param
    assert says in told["message"]
    assert told["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": []}, "messages", "The conversation is empty"),
        ({"messages": "hi"}, "messages", "a valid list"),
        ({"messages": [{"role": "user"}]}, "messages", "has no content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "Only system, user and assistant"),
        ({"messages": [{"role": "user", "content": "x", "image": "a"}]}, "messages.0.image", "Unknown field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages.0.content.0.type",
            "'text'",
        ),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "mean the same"),
        ({"top_logprobs": 1}, "top_logprobs", "needs logprobs"),
        ({"logprobs": 1}, "logprobs", "a valid boolean"),
        ({"metadata": {}}, "metadata", "Unknown field"),
    ],
)
def test_bad_chats_are_told_by_name(server, body, param, says):
    told = error(server.post(CHAT, {"messages": USER, "max_completion_tokens": 4, **body}))
    assert told["param"] == param
    assert says in told["message"]


def test_bodies_that_are_none(server):
    for content, kind in (
        (b"{", "application/json"),
        (b"[" * 10_000, "application/json"),
        (b"\xff", "application/json"),
        (b"[]", "application/json"),
        (b"5", "application/json"),
        (b"", "application/json"),
        (b'{"prompt": "x"}', "text/plain"),
        (b'{"prompt": "x", "\\ud800": 1}', "application/json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json"),
    ):
        error(server.client.post(COMPLETION, content=content, headers={"content-type": kind}))


def test_fuzzed_bodies_are_never_the_servers_fault(server):
    chosen = random.Random(0)
    odd = [None, True, 0, 1, -1, 3, 2**31, 2**64, 1.5, -0.0, 1e308, "", "a", "off", "\x00", [], ["a"], [1], [[1]], {}]
    odd += [{"type": "text"}, {"1": 2.0}, {"a": 1}, [{"role": "user", "content": "x"}], [{}], [None], ["a", 1]]
    fields = {CHAT: [*ChatRequest.model_fields], COMPLETION: [*CompletionRequest.model_fields]}
    statuses = set()
    for _ in range(100):
        path = chosen.choice([CHAT, COMPLETION])
        body = {"messages": USER} if path == CHAT else {"prompt": "abc"}
        body["max_tokens"] = 1
        for _ in range(chosen.choice([1, 1, 2, 3])):
            name = chosen.choice([*fields[path], "nothing"])
            body[name] = chosen.choice(odd)
        if body["max_tokens"] not in (1, 2, 3) or body.get("max_completion_tokens") == 2**31:
            body["max_tokens"] = 1  # else the text would be a long one
            body.pop("max_completion_tokens", None)
        statuses.add(server.post(path, body).status_code)
    assert statuses == {200, 400, 404}
    serving.wait_until(lambda: (server.worker.running, server.worker.waiting) == (0, 0))


def test_requests_have_ids(server):
    assert server.client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("with blanks", "x" * 129, ""):
        given = server.client.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", given)
    answered = server.post(COMPLETION, {"prompt": "abc", "max_tokens": 1}, headers={"X-Request-Id": "mine-2"})
    assert answered.json()["id"] == "cmpl-mine-2"
    assert server.post(COMPLETION, {}, headers={"X-Request-Id": "mine-3"}).headers["x-request-id"] == "mine-3"


def test_logs_tell_of_requests_and_not_of_texts(server, caplog):
    caplog.set_level(logging.INFO, "foretoken.serve")
    answered = server.post(COMPLETION, {"prompt": "SECRET", "max_tokens": 3}, headers={"X-Request-Id": "mine"})
    server.post(COMPLETION, {"prompt": "SECRET", "best_of": 1})
    server.client.get("/a%0Ab")
    serving.wait_until(lambda: len(caplog.records) >= 3)
    lines = [json.loads(Json().format(record)) for record in caplog.records]
    assert [line["status"] for line in lines] == [200, 400, 404]
    assert lines[0]["request_id"] == "mine"
    assert (lines[0]["prompt_tokens"], lines[0]["completion_tokens"]) == (6, 3)
    assert lines[0].keys() >= {"time", "level", "event", "method", "path", "seconds"}
    for text in [*map(Json().format, caplog.records), *map(Text().format, caplog.records)]:
        assert "SECRET" not in text
        assert answered.json()["choices"][0]["text"] not in text
        assert "\n" not in text


def test_metrics_are_those_that_vllms_clients_read(server):
    def read():
        lines = server.client.get("/metrics").text.splitlines()
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def figures():  # once the last step is counted: its texts are told first
        key = f'vllm:iteration_tokens_total_sum{{model_name="{serving.NAME}"}}'
        serving.wait_until(lambda: read()[key] == server.worker._batch.num_tokens)
        return read()

    def moved(name):
        key = f'{name}{{model_name="{serving.NAME}"}}'
        return after[key] - before[key]

    before = figures()
    told = server.post(COMPLETION, {"prompt": "abc", "max_tokens": 24, "seed": 1}).json()
    after = figures()
    assert moved("vllm:time_to_first_token_seconds_sum") == pytest.approx(
        moved("vllm:request_queue_time_seconds_sum") + moved("vllm:request_prefill_time_seconds_sum")
    )
    spec = told["metrics"]["speculative_decoding"]
    assert moved("vllm:spec_decode_num_drafts_total") == spec["num_spec_steps"] > 0
    assert moved("vllm:spec_decode_num_draft_tokens_total") == spec["num_draft_tokens"]
    assert moved("vllm:spec_decode_num_accepted_tokens_total") == spec["num_accepted_draft_tokens"]
    per = [
        after[key] - before[key]
        for key in after
        if key.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert sum(per) == spec["num_accepted_draft_tokens"]
    assert per == sorted(per, reverse=True)
    assert moved("vllm:generation_tokens_total") == told["usage"]["completion_tokens"]
    assert moved("vllm:prompt_tokens_total") == 3
    assert 0 < moved("vllm:iteration_tokens_total_count") < moved("vllm:iteration_tokens_total_sum") == 3 + 24
    assert moved("vllm:time_to_first_token_seconds_count") == moved("vllm:e2e_request_latency_seconds_count") == 1
    assert after[f'vllm:num_requests_running{{model_name="{serving.NAME}"}}'] == 0
    assert not [key for key in after if "_created" in key]  # `vllm bench serve` would add them up


def test_the_page_on_serving_has_every_figure(server):
    page = (tables.ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    names = {line.split()[2] for line in server.client.get("/metrics").text.splitlines() if line.startswith("# HELP")}
    assert set(re.findall(r"`(vllm:\w+)`", page)) == names


def test_plain_decoding_for_one_request(server):
    asked = {"prompt": "abc", "max_tokens": 24, "temperature": 0}
    drafted, plain, shallow = (
        server.post(COMPLETION, {**asked, **more}).json() for more in ({}, {"speculation": "off"}, {"speculation": 1})
    )
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"] == shallow["choices"][0]["text"]
    assert plain["metrics"]["speculative_decoding"] is None
    assert len(shallow["metrics"]["speculative_decoding"]["acceptance_histogram"]) <= 2


def test_the_keys(small, monkeypatch):
    def asked(path, key=None, scheme="Bearer"):
        headers = {} if key is None else {"Authorization": f"{scheme} {key}".encode()}
        return small.client.get(path, headers=headers)

    for path in ("/", "/health", "/ready", "/metrics", "/version"):
        assert asked(path).status_code == 200
    for path in ("/v1/models", "/openapi.json", "/nothing"):
        told = error(asked(path), 401)
        assert (told["type"], told["code"]) == ("authentication_error", "invalid_api_key")
    for key in ("first", "zweit\u00e9"):
        assert asked("/v1/models", key).status_code == 200
    for key in ("firs", "first1", "x", "First"):
        error(asked("/v1/models", key), 401)
    error(asked("/v1/models", "first", "Basic"), 401)
    monkeypatch.setenv(KEYS, " one, two,")
    assert Settings().keys == ("one", "two")
    assert Settings(api_key=["three"]).keys == ("three",)
    with pytest.raises(ForetokenError, match="key is empty"):
        Settings(api_key=[""])


OWN = ["localhost", "LocalHost:3000", "127.0.0.1", "127.1.2.3:80", "[::1]:8000"]
OTHERS = ["evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "10.0.0.1:8000", "[::2]", "[", ""]


def test_other_sites_may_not_ask_a_server_of_this_machine_that_has_no_key(server, small):
    """Neither by a name that is turned into its address (DNS rebinding), nor from a page of theirs."""
    for host in OWN:
        assert server.client.get("/", headers={"Host": host}).status_code == 200
        origin = {"Origin": f"http://{host}"}
        assert server.post(COMPLETION, {"prompt": "x", "max_tokens": 1}, headers=origin).status_code == 200
    for host in OTHERS:
        for path in ("/", "/metrics", "/v1/models"):
            assert "Host" in error(server.client.get(path, headers={"Host": host}), 403)["message"]
        for origin in (f"https://{host}", host, "null"):
            told = error(server.post(COMPLETION, {"prompt": "x"}, headers={"Origin": origin}), 403)
            assert "Origin" in told["message"]
        keyed = {"Authorization": "Bearer first", "Host": host, "Origin": f"https://{host}"}
        assert small.client.get("/v1/models", headers=keyed).status_code == 200


def test_what_is_not_bound_to_this_machine_alone_has_any_name(engine):
    with serving.served(engine, host="0.0.0.0") as running:
        assert running.client.get("/v1/models", headers={"Host": "a.example", "Origin": "null"}).status_code == 200


def test_the_name_that_the_server_is_bound_to_is_its_own():
    answered = []

    async def app(scope, receive, send):
        answered.append(scope["path"])

    async def asked(address, host):
        async def send(message):
            answered.append(message.get("status"))

        scope = {"type": "http", "path": "/", "server": address, "headers": [(b"host", host)]}
        await Local(app, "mine", ())(scope, None, send)
        return answered.pop(0)

    assert asyncio.run(asked(("127.0.0.1", 80), b"mine:80")) == "/"
    assert asyncio.run(asked(("127.0.0.1", 80), b"other:80")) == 403
    answered.clear()
    for elsewhere in (("192.168.0.1", 80), ("/run/socket", None), None):
        assert asyncio.run(asked(elsewhere, b"other:80")) == "/"


def test_an_origin_that_is_allowed(engine):
    allowed = {"Origin": "https://app.example"}
    asking = {**allowed, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with serving.served(engine, allow_origin=["https://app.example"]) as running:
        for answer in (
            running.post(COMPLETION, {"prompt": "x", "max_tokens": 1}, headers=allowed),
            running.client.options(COMPLETION, headers=asking),
        ):
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
        error(running.post(COMPLETION, {"prompt": "x"}, headers={"Origin": "https://app.example:1"}), 403)
        error(running.client.get("/", headers={**allowed, "Host": "app.example"}), 403)
    for bad in ("*", "app.example", "https://app.example/", "null"):
        with pytest.raises(ForetokenError, match="allow_origin has"):
            Settings(allow_origin=[bad])


def test_large_bodies_are_refused(server):
    large = {"prompt": "x" * 20_000}
    assert "20000 bytes" in error(server.post(COMPLETION, large), 413)["message"]

    def pieces():
        for _ in range(30):
            yield b" " * 1000

    error(server.client.post(COMPLETION, content=pieces()), 413)


def test_the_context_is_a_limit(server, engine):
    with serving.served(engine, context=32) as narrow:
        for body, path in (
            ({"prompt": "x" * 32}, COMPLETION),
            ({"messages": [{"role": "user", "content": "x" * 40}]}, CHAT),
        ):
            told = error(narrow.post(path, body))
            assert told["code"] == "context_length_exceeded"
            assert told["param"] in ("prompt", "messages")
        whole = narrow.post(COMPLETION, {"prompt": "x" * 20, "max_tokens": 100, "ignore_eos": True}).json()
        assert whole["usage"]["total_tokens"] == 32
        assert whole["choices"][0]["finish_reason"] == "length"


def test_a_request_that_takes_too_long_is_ended(small):
    headers = {"Authorization": "Bearer first"}
    assert "0.4 seconds" in error(small.post(COMPLETION, LONG, headers=headers), 408)["message"]
    serving.wait_until(lambda: small.worker.running == 0)  # its row is free before the next step
    with small.client.stream("POST", COMPLETION, json={**LONG, "stream": True}, headers=headers) as response:
        assert response.status_code == 200
        *texts, last = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert json.loads(texts[0])["choices"][0]["text"]
    assert json.loads(last)["error"]["type"] == "timeout_error"
    serving.wait_until(lambda: small.worker.running == 0)


def test_clients_that_go_away_free_their_rows(server):
    streams = [server.client.stream("POST", COMPLETION, json={**LONG, "stream": True}) for _ in range(5)]
    opened = [stream.__enter__() for stream in streams[:2]]
    texts = [response.iter_lines() for response in opened]
    for text in texts:
        assert next(text).startswith("data: ")
    waiting = []
    for _ in range(3):  # whole answers, in the queue
        body = json.dumps(LONG).encode()
        sock = socket.create_connection(server.client.base_url.netloc.decode().split(":"))
        head = [f"POST {COMPLETION} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        sock.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        waiting.append(sock)
    serving.wait_until(lambda: (server.worker.running, server.worker.waiting) == (2, 3))
    refused = server.post(COMPLETION, {"prompt": "abc", "max_tokens": 1})
    error(refused, 429)
    assert int(refused.headers["retry-after"]) >= 1
    for sock in waiting[:2]:
        sock.close()
    serving.wait_until(lambda: server.worker.waiting == 1)
    for response in opened:
        response.close()
    serving.wait_until(lambda: (server.worker.running, server.worker.waiting) == (1, 0))
    waiting[2].close()
    serving.wait_until(lambda: server.worker.running == 0)
    assert server.post(COMPLETION, {"prompt": "abc", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("tells", [True, False])
def test_a_dead_model_thread_is_told_and_ends_the_process(engine, monkeypatch, tells):
    """tells: whether it can tell those who wait for its texts."""

    class DiedError(BaseException):
        pass

    def die(*_):
        raise DiedError

    with serving.served(engine) as running:
        monkeypatch.setattr(Batch, "step", die)
        if tells:
            error(running.post(COMPLETION, {"prompt": "abc"}), 500)
        else:
            monkeypatch.setattr(Batch, "fail", die)
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
        assert response.status_code == 500
        thread.join(serving.PATIENCE)
    assert left == [1]


@pytest.fixture
def process(engine, tmp_path):
    """`foretoken serve` in a process of its own, and its address."""
    package = str(Path(foretoken.__file__).parents[1])
    line = [
        sys.executable,
        "-m",
        "foretoken",
        "serve",
        engine.target.name,
        "--drafter",
        "ngram",
        "--port",
        "0",
        "--compile",
        "off",
        "--log",
        "json",
    ]
    with subprocess.Popen(
        line, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": package}
    ) as running:
        assert running.stderr is not None
        for told in running.stderr:
            if "listens on" in told:
                break
        else:
            pytest.fail("it ended before it listened")
        yield running, re.search(r"http://[0-9.:]+", told)[0]
        running.kill()


def ask_often(url):
    """Until a connection is refused; one that is made just before the port is closed gets no answer."""
    for _ in range(10_000):
        with suppress(httpx.RemoteProtocolError, httpx.ReadError):
            httpx.get(url, timeout=serving.PATIENCE)


def test_the_first_signal_drains_and_the_second_ends(process):
    running, url = process
    with httpx.stream("POST", url + COMPLETION, json={**LONG, "stream": True}, timeout=serving.PATIENCE) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        running.send_signal(signal.SIGTERM)
        assert "drains" in running.stderr.readline()
        for _ in range(20):  # the stream goes on
            assert next(lines) is not None
        with pytest.raises(httpx.ConnectError):
            ask_often(url + "/health")
        running.send_signal(signal.SIGTERM)
        assert running.wait(serving.PATIENCE) == 0


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
    """Python's own end would not survive the model's thread, which is in the midst of C++: it was a crash, or none."""
    package = str(Path(foretoken.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", LOADING], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": package}
    ) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == "loading\n"
        running.send_signal(signal.SIGINT)
        try:
            assert (running.wait(serving.PATIENCE), running.stderr.read()) == (130, "")
        finally:
            running.kill()


def test_a_port_that_is_taken_is_told_at_once(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run("serve", "--port", port)
    assert code == 2
    assert err.startswith(f"foretoken: Cannot listen on 127.0.0.1 port {port}: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["x", "--target", "y"], "Both x and --target y"),
        (["--port", "70000"], "port is 70000"),
        (["--max-queue", "-1"], "max_queue is -1"),
        (["--max-batch", "0"], "max_batch is 0"),
        (["--timeout", "0"], "timeout is 0"),
        (["--drain", "-1"], "drain is -1"),
        (["--log", "xml"], "Unknown log xml"),
        (["--tree", "bush:3"], "bush"),
    ],
)
def test_bad_options(run, given, says):
    code, _, err = run("serve", *given)
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 1


def test_the_extra_that_is_missing_is_named(run, monkeypatch):
    monkeypatch.setattr("foretoken.cli.serve.find_spec", lambda name: None)
    code, _, err = run("serve")
    assert (code, err) == (
        2,
        "foretoken: The server needs further packages: pip install -e '.[serve]'.\n",
    )


@pytest.mark.parametrize(
    ("asked", "valid"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}, re.compile("[0-9]{3}-[0-9]{4}").fullmatch),
        ({"structured_outputs": {"choice": ["yes (1)", "no"]}}, ("yes (1)", "no").__contains__),
        ({"structured_outputs": {"json": {"enum": ["a", 7]}}}, lambda text: json.loads(text) in ("a", 7)),
        ({"structured_outputs": {"grammar": 'start: "a"+ "b"'}}, re.compile("a+b").fullmatch),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}},
                }
            },
            lambda text: set(json.loads(text)) <= {1, 2},
        ),
        ({"response_format": {"type": "text"}}, lambda text: True),
    ],
)
def test_texts_keep_to_what_the_request_wants_them_to_be(server, asked, valid):
    asking = {"max_tokens": 60, "seed": 3, **asked}
    for path, prompt in ((CHAT, {"messages": USER}), (COMPLETION, {"prompt": "x", "n": 2})):
        body = server.post(path, {**prompt, **asking}).json()
        for choice in body["choices"]:
            text = choice["text"] if path == COMPLETION else choice["message"]["content"]
            assert valid(text), text


def test_a_text_held_to_a_grammar_is_that_of_the_engine(server, engine):
    asked = {"prompt": "ab", "max_tokens": 40, "seed": 9, "structured_outputs": {"regex": "([0-9]{3} ){1,6}end"}}
    want = engine.generate("ab", grammar=foretoken.Grammar.regex("([0-9]{3} ){1,6}end"), max_new_tokens=40, seed=9)
    assert server.post(COMPLETION, asked).json()["choices"][0]["text"] == want.text
