"""What a request's body may be: what is not taken is named, and is never the server's fault."""

import asyncio
import json
import random
import time

import pytest

import serving
from foretoken.serve.guards import sized
from foretoken.serve.schema import ChatRequest, CompletionRequest
from limited import engine as engine  # fixtures
from limited import error
from limited import server as server
from raising import raising
from serving import CHAT, COMPLETION, USER


def held_to(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def nested(depth):
    """A schema of objects in objects."""
    return {"type": "object", "properties": {"x": nested(depth - 1)}} if depth else {}


COMPLETIONS = [
    ({"best_of": 2}, "best_of", "best_of is 2, and n is 1: texts are not ranked here"),
    ({"best_of": 1, "n": 2}, "best_of", "best_of is 1, and n is 2"),
    ({"best_of": 0}, "best_of", "best_of is 0"),
    ({"prompt": "a", "": 1}, "", "Unknown field ''"),
    ({"prompt": "a", " ": 1}, " ", "Unknown field ' '"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options", "is for stream"),
    ({"stream_options": {"chunk_size": 1}}, "stream_options.chunk_size", "Unknown field"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "must be False."),
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
    ({"max_tokens": True}, "max_tokens", "a valid integer"),
    ({"n": 6}, "n", "6 texts at once, and 5 are the most"),
    ({"prompt": ["a"] * 6}, "prompt", "6 texts at once"),
    ({"temperature": -1}, "temperature", "temperature is -1"),
    ({"temperature": float("nan")}, "temperature", "temperature is nan"),
    ({"top_p": 0}, "top_p", "top_p is 0"),
    ({"top_k": -2}, "top_k", "top_k is -2"),
    ({"min_p": 2}, "min_p", "min_p is 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty is 0"),
    ({"frequency_penalty": 1e308}, "frequency_penalty", "frequency_penalty is 1e"),
    ({"presence_penalty": "x"}, "presence_penalty", "a valid number"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has token id 'x'"),
    ({"logit_bias": {"258": 1}}, "logit_bias", "ids go from 0 to 257"),
    ({"logit_bias": {"1": float("inf")}}, "logit_bias", "logit_bias of token 1 is inf"),
    ({"seed": 2**64}, "seed", "less than 18446744073709551616"),
    ({"seed": -(2**63) - 1}, "seed", "greater than or equal to -9223372036854775808"),
    ({"stop": [""]}, "stop.0", "at least 1 character"),
    ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
    ({"stop": "a" * 1001}, "stop", "is refused: String should have at most 1000 characters."),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"max_tokens": 0, "echo": True}, "max_tokens", "but for echo with logprobs"),
    ({"speculation": "on"}, "speculation", "'off' or a valid integer"),
    ({"speculation": ["off"]}, "speculation", "'off' or a valid integer"),
    ({"speculation": 0}, "speculation", "greater than or equal to 1"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "no json_schema"),
    ({"response_format": "json"}, "response_format", "must be an object."),
    (held_to(nested(200)), "response_format", "is nested too deeply"),
    ({"structured_outputs": {"regex": "(" * 9000}}, "structured_outputs", "is not understood"),
    ({"x" * 9000: 1}, "x" * 100, "Unknown field xxx"),
    (held_to({"$ref": "#"}), "response_format", "has no text"),  # though it compiles
    ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs", "has no text"),
    ({"stop": ["a"] * 17}, "stop", "should have at most 16 items after validation, not 17."),
    (held_to({"type": "x"}), "response_format", "cannot be enforced"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "leave out either"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"choice": ["a", "\ud800"]}}, "structured_outputs", "Choice 2 is not valid Unicode"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "2 fields"),
]
CHATS = [
    ({"messages": []}, "messages", "The conversation is empty"),
    ({"messages": "hi"}, "messages", "a valid list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "Only system, user and assistant"),
    ({"messages": [{"role": "user", "content": "x", "image": "a"}]}, "messages.0.image", "Unknown field"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "mean the same"),
    ({"top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    ({"logprobs": 1}, "logprobs", "a valid boolean"),
    ({"metadata": {"a": 1}}, "metadata.a", "a valid string"),
    ({"store": True}, "store", "must be False."),
    ({"service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
    ({"modalities": ["text", "audio"]}, "modalities.1", "'text'"),
    ({"modalities": []}, "modalities", "at least 1 item"),
    ({"messages": [{**USER[0], "annotations": [{"type": "url_citation"}]}]}, "messages.0.annotations", "0 items"),
    ({"messages": [{**USER[0], "reasoning_content": 5}]}, "messages.0.reasoning_content", "a valid string"),
    ({"messages": [["user", "hi"]]}, "messages.0", "must be an object."),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [*((COMPLETION, *case) for case in COMPLETIONS), *((CHAT, *case) for case in CHATS)],
)
def test_bad_bodies_are_told_by_name(server, path, body, param, says):
    good = {"prompt": "abc", "max_tokens": 4} if path == COMPLETION else {"messages": USER, "max_completion_tokens": 4}
    sent = json.dumps({**good, **body})
    told = error(server.client.post(path, content=sent, headers={"content-type": "application/json"}))
    assert told["param"] == param
    assert says in told["message"]
    assert len(told["message"]) < 500
    assert told["type"] == "invalid_request_error"


def test_bodies_that_are_none(server):
    bodies = [b"{", b"[" * 10_000, b"\xff", b"[]", b"5", b"", b'{"prompt": "x", "\\ud800": 1}']
    bodies += [b'{"seed": ' + b"9" * 5000 + b"}"]
    for content, kind in [*((body, "application/json") for body in bodies), (b'{"prompt": "x"}', "text/plain")]:
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


def test_large_bodies_are_refused(server):
    assert "20000 bytes" in error(server.post(COMPLETION, {"prompt": "x" * 20_000}), 413)["message"]
    error(server.client.post(COMPLETION, content=iter([b" " * 1000] * 30)), 413)


def test_who_sends_a_large_body_slowly_reads_why_it_is_refused(server):
    """All of it is sent before the answer is read, as many clients do: the connection must not be reset meanwhile."""

    def pieces(count: int):
        for _ in range(count):
            yield b" " * 10_000
            time.sleep(0.02)

    error(server.client.post(COMPLETION, content=pieces(12), headers={"Content-Length": "120000"}), 413)
    error(server.client.post(COMPLETION, content=pieces(12)), 413)


def test_who_leaves_in_the_midst_of_a_body_is_no_error():
    """Nothing is answered, and the application inside hears nothing of it."""
    messages = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return messages.pop(0)

    never = raising(AssertionError("it was called"))
    asyncio.run(sized(never, 100, 1.0)({"type": "http", "headers": []}, receive, never))
    assert not messages


def test_the_models_own_context_is_refused_like_one_that_is_named(engine):
    """And its folder is not shown to clients."""
    with serving.served(engine) as running:
        told = error(running.post(COMPLETION, {"prompt": [1] * engine.target.lm.context}))
    assert told["code"] == "context_length_exceeded"
    assert f"the context of {serving.NAME} is " in told["message"]


def test_the_context_is_a_limit(engine):
    with serving.served(engine, context=32) as narrow:
        for path, param, given in (
            (COMPLETION, "prompt", "x" * 32),
            (CHAT, "messages", [{"role": "user", "content": "x" * 40}]),
        ):
            told = error(narrow.post(path, {param: given}))
            assert (told["code"], told["param"]) == ("context_length_exceeded", param)
        whole = narrow.post(COMPLETION, {"prompt": "x" * 20, "max_tokens": 100, "ignore_eos": True}).json()
        assert whole["usage"]["total_tokens"] == 32
        assert whole["choices"][0]["finish_reason"] == "length"
