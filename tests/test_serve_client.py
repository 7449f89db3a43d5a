"""The server as OpenAI's own client sees it: the texts are the engine's, whole and as a stream."""

import asyncio
import json

import openai
import pytest
import torch
import transformers

import command
import serving
from foretoken.serve.jobs import Progress
from foretoken.serve.prefix import BLOCK
from foretoken.serve.tally import Tally
from foretoken.vocab.vocabulary import vocabulary
from serving import USER
from serving import client as client  # fixtures
from serving import server as server

PART = {"type": "text", "text": "hi"}
SETTINGS = {"temperature": 0.8, "seed": 5, "max_tokens": 24}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return serving.toy_engine(tmp_path_factory.mktemp("pair"))


def wanted(engine, prompt, seed=5, **more):
    return engine.generate(prompt, temperature=0.8, seed=seed, max_new_tokens=24, **more)


def test_a_seeded_text_is_the_engines(engine, client):
    want = wanted(engine, "def f(x):")
    got = client.completions.create(model=serving.NAME, prompt="def f(x):", **SETTINGS)
    assert got.choices[0].text == want.text
    assert got.choices[0].finish_reason == want.finish_reason
    assert got.usage.prompt_tokens == len("def f(x):")
    assert got.usage.completion_tokens == len(want.token_ids)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert got.usage.prompt_tokens_details.cached_tokens >= 0
    assert got.seed == 5


def test_an_answer_is_the_engines(engine, client):
    want = wanted(engine, USER)
    got = client.chat.completions.create(model=serving.NAME, messages=USER, **SETTINGS)
    assert got.choices[0].message.content == want.text
    assert got.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    got = client.chat.completions.create(
        model=serving.NAME, messages=parts, temperature=0.8, seed=5, max_completion_tokens=24
    )
    assert got.choices[0].message.content == want.text


def test_choices_and_prompts_have_the_seeds_that_follow(engine, client):
    got = client.completions.create(model=serving.NAME, prompt=["abc", "xyz"], n=2, **SETTINGS)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    seeds = (("abc", 5), ("abc", 6), ("xyz", 7), ("xyz", 8))
    want = [wanted(engine, prompt, seed).text for prompt, seed in seeds]
    assert [choice.text for choice in got.choices] == want
    ids = engine.encode("abc")
    for prompt in (ids, [ids]):
        got = client.completions.create(model=serving.NAME, prompt=prompt, echo=True, **SETTINGS)
        assert got.choices[0].text == "abc" + want[0]


def test_every_setting_reaches_the_sampling(engine, client):
    given = {"top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    ours = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2}
    want = wanted(engine, "abc", logit_bias={70: 3.0}, **given, **ours)
    got = client.completions.create(
        model=serving.NAME, prompt="abc", logit_bias={"70": 3}, extra_body=ours, **given, **SETTINGS
    )
    assert got.choices[0].text == want.text


def test_a_stop_string_ends_the_text(engine, client):
    text = wanted(engine, "abc").text
    stop = text[5:7]
    got = client.completions.create(model=serving.NAME, prompt="abc", stop=[stop, "never"], **SETTINGS)
    assert got.choices[0].text == text[: text.index(stop)]
    assert got.choices[0].finish_reason == "stop"


def test_a_stream_of_a_chat(engine, client):
    want = wanted(engine, USER)
    chunks = list(
        client.chat.completions.create(
            model=serving.NAME, messages=USER, stream=True, stream_options={"include_usage": True}, **SETTINGS
        )
    )
    *told, usage = chunks
    assert told[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == want.text
    assert [chunk.choices[0].finish_reason for chunk in told] == [None] * (len(told) - 1) + [want.finish_reason]
    assert all(chunk.usage is None for chunk in told)
    assert len({chunk.id for chunk in chunks}) == 1
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(want.token_ids)
    assert usage.metrics["speculative_decoding"]["num_spec_steps"] > 0


def test_every_chunk_has_the_usage_so_far_where_it_is_wanted(client):
    """As vLLM's; GuideLLM always asks for it."""
    asked = {"model": serving.NAME, "stream": True, "n": 2, "extra_body": {"ignore_eos": True}, **SETTINGS}
    for last in (True, False):
        options = {"continuous_usage_stats": True, "include_usage": last, "include_obfuscation": False}
        for ask in ({"messages": USER}, {"prompt": "abc"}):
            endpoint = client.chat.completions if "messages" in ask else client.completions
            chunks = list(endpoint.create(stream_options=options, **ask, **asked))
            counts = [chunk.usage.completion_tokens for chunk in chunks]
            assert counts == sorted(counts)
            assert 0 < counts[0] < counts[len(counts) // 2] < counts[-1] == 48
            assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
            assert all(c.usage.total_tokens == c.usage.prompt_tokens + c.usage.completion_tokens for c in chunks)
            assert (chunks[-1].choices == []) is last


def test_fields_that_change_nothing_are_taken(engine, client, server):
    """Clients send them by themselves."""
    want = wanted(engine, USER).text
    for more in (
        {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"]},
        {"safety_identifier": "x", "prompt_cache_key": "x", "user": "x", "service_tier": "default"},
        {"logprobs": False, "top_logprobs": 0, "stop": "", "extra_body": {"top_k": -1}},
        {"messages": [{"role": "user", "content": [{**PART, "cache_control": {"type": "ephemeral"}}]}]},
    ):
        got = client.chat.completions.create(**{"model": serving.NAME, "messages": USER, **SETTINGS, **more})
        assert got.choices[0].message.content == want
        assert got.choices[0].logprobs is None
    want = [wanted(engine, "abc", seed).text for seed in (5, 6)]
    got = client.completions.create(model=serving.NAME, prompt="abc", best_of=2, n=2, stop="", **SETTINGS)
    assert [choice.text for choice in got.choices] == want
    answer = {"role": "assistant", "content": "x"}
    conversation = [*USER, {**answer, "annotations": [], "reasoning_content": "Hm."}, *USER]
    told = server.post("/tokenize", {"messages": conversation}).json()["tokens"]
    assert told == engine.encode([*USER, answer, *USER])


def test_seeds_are_taken_modulo_2_to_the_32(engine, client):
    asked = {"model": serving.NAME, "prompt": "abc", **SETTINGS}
    for seed in (5 + 2**32, 5 - 2**32, 5 + 2**63):
        got = client.completions.create(**{**asked, "seed": seed})
        assert (got.choices[0].text, got.seed) == (wanted(engine, "abc").text, 5)
    got = client.completions.create(**{**asked, "seed": -1}, n=2)
    assert [choice.text for choice in got.choices] == [wanted(engine, "abc", seed).text for seed in (2**32 - 1, 0)]


def test_a_stream_of_completions_with_several_choices(engine, client):
    texts = ["", ""]
    for chunk in client.completions.create(model=serving.NAME, prompt="abc", n=2, stream=True, **SETTINGS):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
    assert texts == [wanted(engine, "abc", seed).text for seed in (5, 6)]


def test_many_at_once_do_not_disturb_each_other(engine, server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def whole(seed):
                got = await client.completions.create(
                    model=serving.NAME, prompt="abc", temperature=0.8, seed=seed, max_tokens=24
                )
                return got.choices[0].text

            async def streamed(seed):
                text = ""
                async for chunk in await client.completions.create(
                    model=serving.NAME, prompt="abc", temperature=0.8, seed=seed, max_tokens=24, stream=True
                ):
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*(kind(seed) for seed in range(5) for kind in (whole, streamed)))

    got = asyncio.run(ask())
    want = [wanted(engine, "abc", seed).text for seed in range(5) for _ in range(2)]
    assert got == want


def test_the_metrics_of_a_request_add_up(engine, client):
    got = client.completions.create(model=serving.NAME, prompt="def f(x):", **SETTINGS)
    stats = wanted(engine, "def f(x):").stats
    told = got.metrics["speculative_decoding"]
    steps = stats.num_target_forwards - stats.num_plain
    assert told["num_accepted_draft_tokens"] == stats.num_accepted
    assert told["num_draft_tokens"] == stats.num_drafted
    assert told["num_spec_steps"] == steps == sum(told["acceptance_histogram"])
    assert told["mean_acceptance_length"] == pytest.approx(1 + stats.num_accepted / steps, abs=1e-3)
    assert told["draft_acceptance_rate"] == pytest.approx(stats.num_accepted / stats.num_drafted, abs=1e-3)
    assert got.metrics["time_to_first_token_ms"] > 0


def test_the_tokens_that_the_cache_held_are_counted_once(client):
    """However many steps and choices follow."""
    asked = {"model": serving.NAME, "prompt": ["x" * 200, "y" * 200], "n": 2, **SETTINGS}
    client.completions.create(**asked)
    again = client.completions.create(**asked)
    assert again.usage.prompt_tokens_details.cached_tokens == 2 * (199 // BLOCK * BLOCK) > 0
    tally = Tally((), 1)
    for num_cached in (64, 192):  # of a text that waited in between, and was looked up again
        tally.record(0, Progress("", (), (), 0, num_cached=num_cached))
    assert tally.usage["prompt_tokens_details"] == {"cached_tokens": 64}


def test_errors_are_those_that_the_client_knows(client):
    with pytest.raises(openai.BadRequestError, match="best_of") as caught:
        client.completions.create(model=serving.NAME, prompt="x", best_of=2)
    assert caught.value.param == "best_of"
    with pytest.raises(openai.NotFoundError, match="toy"):
        client.completions.create(model="gpt-4", prompt="x")
    assert [model.id for model in client.models.list()] == [serving.NAME]
    assert client.models.retrieve(serving.NAME).id == serving.NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_the_program_llm_can_talk_with_it(engine, server):
    models = pytest.importorskip("llm.default_plugins.openai_models")
    chat = models.Chat("toy", model_name=serving.NAME, api_base=f"{server.url}/v1")
    chat.key = "none"
    want = wanted(engine, USER).text
    for stream in (False, True):
        assert chat.prompt("hi", temperature=0.8, seed=5, max_tokens=24, stream=stream).text() == want


def test_log_probabilities_are_the_targets_own(engine, client):
    """At temperature 1, whatever the sampling; the same whole, in chunks, and in both shapes."""
    asked = {"model": serving.NAME, "temperature": 0.5, "seed": 5, "max_tokens": 12}
    want = engine.generate("abc", temperature=0.5, seed=5, max_new_tokens=12).token_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(engine.target.name)
    with torch.no_grad():
        rows = model(torch.tensor([engine.encode("abc") + want])).logits[0].log_softmax(-1)[2:-1]
    whole = client.completions.create(prompt="abc", logprobs=2, **asked).choices[0].logprobs
    emitted = [float(row[token]) for row, token in zip(rows, want, strict=True)]
    assert whole.token_logprobs == pytest.approx(emitted, abs=1e-3)
    assert [max(top.values()) for top in whole.top_logprobs] == pytest.approx(rows.amax(-1).tolist(), abs=1e-3)
    among = [token in row.topk(2).indices for row, token in zip(rows, want, strict=True)]
    assert [len(top) for top in whole.top_logprobs] == [2 if best else 3 for best in among], "itself is always there"
    parts = [c.choices[0].logprobs for c in client.completions.create(prompt="abc", logprobs=2, stream=True, **asked)]
    parts = [part for part in parts if part is not None]
    assert [x for part in parts for x in part.tokens] == whole.tokens
    assert [x for part in parts for x in part.text_offset] == whole.text_offset
    assert [x for part in parts for x in part.token_logprobs] == pytest.approx(whole.token_logprobs, abs=1e-3)
    answer = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=2, **asked)
    chat = answer.choices[0].logprobs.content
    ids = engine.chat(USER, temperature=0.5, seed=5, max_new_tokens=12).token_ids
    spelled = vocabulary(engine.tokenizer).tokens
    assert [bytes(entry.bytes) for entry in chat] == [spelled[i] or engine.tokenizer.decode([i]).encode() for i in ids]
    assert all(len(entry.top_logprobs) == 2 for entry in chat)


def test_the_tokens_with_log_probabilities_are_those_of_the_text(engine, client):
    """Whole and in chunks: not the token that ends it, and not those that a stop string cuts off."""
    asked = {"model": serving.NAME, "messages": USER, "logprobs": True, **SETTINGS}
    text, end = wanted(engine, USER).text, engine.tokenizer.convert_tokens_to_ids("<|end|>")
    for more, want, tokens in (
        ({"stop": [text[5:7], "never"]}, text[: text.index(text[5:7])], None),
        ({"logit_bias": {str(end): 1000}}, "", 1),
    ):
        whole = client.chat.completions.create(**{**asked, **more})
        (choice,) = whole.choices
        listed = choice.logprobs.content
        assert (choice.message.content, choice.finish_reason) == (want, "stop")
        assert b"".join(bytes(entry.bytes) for entry in listed).decode("utf-8", "replace") == want
        assert whole.usage.completion_tokens > len(listed)
        assert tokens in (None, whole.usage.completion_tokens)
        parts = [c.choices[0] for c in client.chat.completions.create(**{**asked, **more}, stream=True)]
        assert [x.token for c in parts if c.logprobs for x in c.logprobs.content] == [x.token for x in listed]
        assert all(c.logprobs.content for c in parts if c.logprobs)
        assert all(c.delta.content or c.logprobs is None for c in parts)
        got = client.completions.create(
            model=serving.NAME, prompt=engine.encode(USER), logprobs=0, **{**SETTINGS, **more}
        )
        assert len(got.choices[0].logprobs.tokens) == len(listed)  # where <|end|> ends no text: none of 24


@pytest.mark.long
def test_the_load_benchmark_measures_servers_in_turn(engine, server, monkeypatch, capsys, tmp_path):
    workload = tmp_path / "prompts.jsonl"
    workload.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("hi", "def f(x):", "a")))
    args = ["--server", f"ours={server.url}", "--server", f"ours-plain={server.url}", "--workload", str(workload)]
    args += ["--users", "1", "--users", "3", "--max-new-tokens", "6", "--rounds", "2", "--json"]
    args += ["--library", str(engine.target.name), "--drafter", "none"]
    code, out, _ = command.run(monkeypatch, capsys, "benchmarks", "serving", *args)
    assert code == 0
    (table,) = json.loads(out)["tables"]
    assert [(row["server"], row["users"]) for row in table["rows"]] == [
        ("library", 1), ("ours", 1), ("ours-plain", 1), ("library", 3), ("ours", 3), ("ours-plain", 3),
    ]  # fmt: skip
    assert all(float(row["tokens/s"].split()[0]) > 0 for row in table["rows"])
    assert [row["x first named"] for row in table["rows"][::3]] == ["1.00 (1.00-1.00)"] * 2
    for bad in ("ours", "ours=http://127.0.0.1:9"):
        code, _, error = command.run(monkeypatch, capsys, "benchmarks", "serving", "--server", bad)
        assert code == 2
        assert "NAME=URL" in error or "start the server first" in error
