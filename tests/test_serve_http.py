"""What the server answers, logs and counts over real sockets; requests that take long, and clients that go away."""

import asyncio
import json
import logging
import re
import socket
from copy import copy
from dataclasses import replace

import httpx
import openai
import pytest

import foretoken
import serving
import tiny
from foretoken.core.sampling import Sampling
from foretoken.models.text import TextStream
from foretoken.serve.answer import Choice
from foretoken.serve.app import create_app
from foretoken.serve.forms import Spelling
from foretoken.serve.jobs import Job, Progress, TokenLogprob
from foretoken.serve.logs import Json, Text
from foretoken.serve.settings import Settings
from limited import LONG, error
from limited import engine as engine  # fixtures
from limited import server as server
from limited import small as small
from scripts import tables
from serving import CHAT, COMPLETION, USER


def test_what_a_probe_asks(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    assert server.client.get("/version").json() == {"version": foretoken.__version__}
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["chat"]) == (serving.NAME, 16_384, True)
    error(server.client.get("/nothing"), 404)
    error(server.client.get(CHAT), 405)
    for path in ("/", "/health", "/ready"):
        assert (server.client.head(path).status_code, server.client.head(path).text) == (200, "")


def test_tokens_there_and_back(server, engine):
    told = server.post("/tokenize", {"prompt": "h\u00e9"}).json()
    assert told == {"count": 3, "max_model_len": 16_384, "tokens": engine.encode("h\u00e9")}
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "h\u00e9"}
    assert server.post("/tokenize", {"messages": USER}).json()["tokens"] == engine.encode(USER)
    assert error(server.post("/tokenize", {}))["param"] == "prompt"
    assert error(server.post("/detokenize", {"tokens": [258]}))["param"] == "tokens"


@pytest.mark.parametrize(
    ("written", "stops", "text", "listed"),
    [
        (("a", "b", "<|end|>"), (), "ab", [["a"], ["b"], []]),  # the end of the text leaves none
        (("a", "<|end|>", "b"), (), "ab", [["a"], [], ["b"]]),  # nor does one that the request ignores
        (("a", "hello", "b"), ("lob",), "ahel", [["a"], ["hello"], []]),  # of which a part is cut off
        (("a", "hello", "b"), ("hello",), "a", [["a"], []]),
        (("a", "b", "hello"), ("bhe",), "a", [["a"], [], []]),  # b was held back
        (("a", "b", "c"), ("bx",), "abc", [["a"], [], ["b", "c"]]),
        (("a", "b"), ("bx",), "ab", [["a"], ["b"]]),
        (("\u00c3", "\u00a9", "b"), (), "\u00e9b", [[], ["\u00c3", "\u00a9"], ["b"]]),  # both halves begin with it
        (("a", "\u00c3"), (), "a\ufffd", [["a"], ["\u00c3"]]),  # half of one at the end
    ],
)
def test_tokens_are_listed_with_the_text_that_they_leave(written, stops, text, listed):
    """written: the tokens as the vocabulary has them. listed: those that each step lists."""
    tokenizer = tiny.tokenizer(("hello",))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    ids = tokenizer.convert_tokens_to_ids(list(written))
    stream, silent, got = TextStream(tokenizer, stops), Spelling(tokenizer).silent, []
    choice = Choice(Job((), Sampling(), 0, 4, frozenset()), TextStream(tokenizer), None)
    for i, token in enumerate(ids):
        last = i == len(ids) - 1
        new = stream.push([token]) + (stream.finish() if last else "")
        reason = "stop" if last or stream.stopped else None
        choice.read(Progress(new, (token,), ("plain",), 0, (TokenLogprob(token, 0.0, ()),), finish_reason=reason))
        got.append([tokenizer.convert_ids_to_tokens(x.token) for _, x in choice.listed(silent)])
        if reason is not None:
            break
    assert (choice.text, got) == (text, listed)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"drain": float("inf")}, "drain is inf: it must be 0 to 86400 seconds"),
        ({"host": ""}, "host is empty: name an address of this machine"),
        ({"name": "x\udce8"}, "name is not valid Unicode"),
    ],
)
def test_settings_that_no_server_can_have(given, says):
    with pytest.raises(foretoken.ForetokenError, match=says):
        Settings(**given)


def test_a_model_whose_name_clients_could_not_read(engine):
    lm = copy(engine.target.lm)
    lm.name = "models/x\udce8"
    named = replace(engine, target=replace(engine.target, lm=lm))
    with pytest.raises(foretoken.ForetokenError, match=r"The model's name, instead of .* is not valid Unicode"):
        create_app(named, Settings())


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
    server.post(COMPLETION, {"prompt": "SECRET", "best_of": 2})
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
    of_model = f'{{model_name="{serving.NAME}"}}'

    def read():
        lines = server.client.get("/metrics").text.splitlines()
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def figures():  # once the last step is counted: its texts are told first
        steps = "vllm:iteration_tokens_total_sum" + of_model
        serving.wait_until(lambda: read()[steps] == server.worker._batch.num_tokens)
        return read()

    def moved(name):
        return after[name + of_model] - before[name + of_model]

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
    by_depth = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    per = [after[key] - before[key] for key in after if key.startswith(by_depth)]
    assert sum(per) == spec["num_accepted_draft_tokens"]
    assert per == sorted(per, reverse=True)
    assert moved("vllm:generation_tokens_total") == told["usage"]["completion_tokens"]
    assert moved("vllm:prompt_tokens_total") == 3
    assert 0 < moved("vllm:iteration_tokens_total_count") < moved("vllm:iteration_tokens_total_sum") == 3 + 24
    assert moved("vllm:time_to_first_token_seconds_count") == moved("vllm:e2e_request_latency_seconds_count") == 1
    assert after["vllm:num_requests_running" + of_model] == 0
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


def test_a_request_that_takes_too_long_is_not_sent_again(small):
    """OpenAI's client repeats one after a 408 else, and each would be computed up to the time limit."""
    sent = []
    hooked = httpx.Client(event_hooks={"request": [sent.append]})
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="first", http_client=hooked) as client:
        assert client.max_retries > 0
        with pytest.raises(openai.APIStatusError, match="took more than") as caught:
            client.completions.create(model=serving.NAME, prompt="abc", max_tokens=16_000, extra_body=LONG)
    assert (caught.value.status_code, len(sent)) == (408, 1)


def test_a_client_that_does_not_read_does_not_outlive_the_time_limit(engine):
    """What is sent to it waits in `send` for ever, the error that says that the time is over too."""
    app, body = create_app(engine, Settings(name="toy", timeout=0.4)), [json.dumps({**LONG, "stream": True}).encode()]
    sent = []

    async def receive():
        return {"type": "http.request", "body": body.pop()} if body else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def asked():
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": COMPLETION, "query_string": b"", "headers": headers}
        async with app.router.lifespan_context(app):
            await asyncio.wait_for(app({**scope, "server": ("127.0.0.1", 80), "state": {}}, receive, send), 10)

    asyncio.run(asked())
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * 2]
    assert b"timeout_error" in sent[-1]["body"]


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


ONES_AND_TWOS = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}


@pytest.mark.parametrize(
    ("asked", "valid"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}, re.compile("[0-9]{3}-[0-9]{4}").fullmatch),
        ({"structured_outputs": {"choice": ["yes (1)", "no"]}}, ("yes (1)", "no").__contains__),
        ({"structured_outputs": {"json": {"enum": ["a", 7]}}}, lambda text: json.loads(text) in ("a", 7)),
        ({"structured_outputs": {"grammar": 'start: "a"+ "b"'}}, re.compile("a+b").fullmatch),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ONES_AND_TWOS}}},
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
