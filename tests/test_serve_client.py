"""The server as OpenAI's own client sees it: the texts are the engine's, whole and as a stream."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
import transformers

import serving
from foretoken.serve.jobs import Progress
from foretoken.serve.metrics import Tally
from foretoken.serve.prefix import BLOCK
from foretoken.vocab.vocabulary import vocabulary
from serving import USER
from serving import client as client  # fixtures
from serving import engine as engine
from serving import server as server

PART = {"type": "text", "text": "hi"}
SETTINGS = {"temperature": 0.8, "seed": 5, "max_tokens": 24}


def wanted(engine, prompt="abc", seed=5, **more):
    return engine.generate(prompt, temperature=0.8, seed=seed, max_new_tokens=24, **more)


def complete(client, prompt="abc", **more):
    return client.completions.create(**{"model": serving.NAME, "prompt": prompt, **SETTINGS, **more})


def chat(client, **more):
    return client.chat.completions.create(**{"model": serving.NAME, "messages": USER, **SETTINGS, **more})


def texts(completion):
    return [choice.text for choice in completion.choices]


def test_a_seeded_text_is_the_engines(engine, client):
    want, got = wanted(engine, "def f(x):"), complete(client, "def f(x):")
    assert texts(got) == [want.text]
    assert got.choices[0].finish_reason == want.finish_reason
    assert got.usage.prompt_tokens == len("def f(x):")
    assert got.usage.completion_tokens == len(want.token_ids)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert got.usage.prompt_tokens_details.cached_tokens >= 0
    assert got.seed == 5


def test_an_answer_is_the_engines(engine, client):
    parts = [{"role": "user", "content": [PART]}]
    for got in (chat(client), chat(client, messages=parts, max_tokens=None, max_completion_tokens=24)):
        assert got.choices[0].message.content == wanted(engine, USER).text
        assert got.choices[0].message.role == "assistant"


def test_choices_and_prompts_have_the_seeds_that_follow(engine, client):
    got = complete(client, ["abc", "xyz"], n=2)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    seeds = (("abc", 5), ("abc", 6), ("xyz", 7), ("xyz", 8))
    assert texts(got) == [wanted(engine, prompt, seed).text for prompt, seed in seeds]
    ids = engine.encode("abc")
    for prompt in (ids, [ids]):
        assert texts(complete(client, prompt, echo=True)) == ["abc" + texts(got)[0]]


def test_every_setting_reaches_the_sampling(engine, client):
    given = {"top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    ours = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2}
    want = wanted(engine, logit_bias={70: 3.0}, **given, **ours)
    assert texts(complete(client, logit_bias={"70": 3}, extra_body=ours, **given)) == [want.text]


def test_a_stop_string_ends_the_text(engine, client):
    text = wanted(engine, "abcd").text
    stop = text[5:7]
    got = complete(client, "abcd", stop=[stop, "never"])
    assert texts(got) == [text[: text.index(stop)]]
    assert got.choices[0].finish_reason == "stop"


def test_a_stream_of_a_chat(engine, client):
    want = wanted(engine, USER)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
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
    for last in (True, False):
        options = {"continuous_usage_stats": True, "include_usage": last, "include_obfuscation": False}
        for ask in (chat, complete):
            chunks = list(ask(client, stream=True, stream_options=options, n=2, extra_body={"ignore_eos": True}))
            counts = [chunk.usage.completion_tokens for chunk in chunks]
            assert counts == sorted(counts)
            assert 0 < counts[0] < counts[len(counts) // 2] < counts[-1] == 48
            assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
            assert all(c.usage.total_tokens == c.usage.prompt_tokens + c.usage.completion_tokens for c in chunks)
            assert (chunks[-1].choices == []) is last


def test_fields_that_change_nothing_are_taken(engine, client, server):
    """Clients send them by themselves."""
    for more in (
        {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"]},
        {"safety_identifier": "x", "prompt_cache_key": "x", "user": "x", "service_tier": "default"},
        {"logprobs": False, "top_logprobs": 0, "stop": "", "extra_body": {"top_k": -1}},
        {"messages": [{"role": "user", "content": [{**PART, "cache_control": {"type": "ephemeral"}}]}]},
    ):
        (choice,) = chat(client, **more).choices
        assert (choice.message.content, choice.logprobs) == (wanted(engine, USER).text, None)
    assert texts(complete(client, best_of=2, n=2, stop="")) == [wanted(engine, seed=seed).text for seed in (5, 6)]
    answer = {"role": "assistant", "content": "x"}
    conversation = [*USER, {**answer, "annotations": [], "reasoning_content": "Hm."}, *USER]
    told = server.post("/tokenize", {"messages": conversation}).json()["tokens"]
    assert told == engine.encode([*USER, answer, *USER])


def test_seeds_are_taken_modulo_2_to_the_32(engine, client):
    for seed in (5 + 2**32, 5 - 2**32, 5 + 2**63):
        got = complete(client, seed=seed)
        assert (texts(got), got.seed) == ([wanted(engine).text], 5)
    assert texts(complete(client, seed=-1, n=2)) == [wanted(engine, seed=seed).text for seed in (2**32 - 1, 0)]


def test_a_stream_of_completions_with_several_choices(engine, client):
    got = ["", ""]
    for chunk in complete(client, n=2, stream=True):
        (choice,) = chunk.choices
        got[choice.index] += choice.text
    assert got == [wanted(engine, seed=seed).text for seed in (5, 6)]


def test_many_at_once_do_not_disturb_each_other(engine, client):
    def ask(seed, stream):
        if not stream:
            return complete(client, seed=seed).choices[0].text
        return "".join(chunk.choices[0].text for chunk in complete(client, seed=seed, stream=True))

    with ThreadPoolExecutor(10) as pool:
        got = list(pool.map(ask, [seed // 2 for seed in range(10)], [False, True] * 5))
    assert got == [wanted(engine, seed=seed // 2).text for seed in range(10)]


def test_the_metrics_of_a_request_add_up(engine, client):
    got, stats = complete(client, "def f(x):"), wanted(engine, "def f(x):").stats
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
    for _ in range(2):
        got = complete(client, ["x" * 200, "y" * 200], n=2)
    assert got.usage.prompt_tokens_details.cached_tokens == 2 * (199 // BLOCK * BLOCK) > 0
    tally = Tally((), 1)
    for num_cached in (64, 192):  # of a text that waited in between, and was looked up again
        tally.record(0, Progress("", (), (), 0, num_cached=num_cached))
    assert tally.usage["prompt_tokens_details"] == {"cached_tokens": 64}


def test_errors_are_those_that_the_client_knows(client):
    with pytest.raises(openai.BadRequestError, match="best_of") as caught:
        complete(client, best_of=2)
    assert caught.value.param == "best_of"
    with pytest.raises(openai.NotFoundError, match="toy"):
        complete(client, model="gpt-4")
    assert [model.id for model in client.models.list()] == [serving.NAME]
    assert client.models.retrieve(serving.NAME).id == serving.NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_the_program_llm_can_talk_with_it(engine, server):
    models = pytest.importorskip("llm.default_plugins.openai_models")
    model = models.Chat("toy", model_name=serving.NAME, api_base=f"{server.url}/v1")
    model.key = "none"
    for stream in (False, True):
        assert model.prompt("hi", **SETTINGS, stream=stream).text() == wanted(engine, USER).text


def test_log_probabilities_are_the_targets_own(engine, client):
    """At temperature 1, whatever the sampling; the same whole, in chunks, and in both shapes."""
    asked = {"temperature": 0.5, "max_tokens": 12, "logprobs": 2}
    want = engine.generate("abc", temperature=0.5, seed=5, max_new_tokens=12).token_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(engine.target.name)
    with torch.no_grad():
        rows = model(torch.tensor([engine.encode("abc") + want])).logits[0].log_softmax(-1)[2:-1]
    whole = complete(client, **asked).choices[0].logprobs
    emitted = [float(row[token]) for row, token in zip(rows, want, strict=True)]
    assert whole.token_logprobs == pytest.approx(emitted, abs=1e-3)
    assert [max(top.values()) for top in whole.top_logprobs] == pytest.approx(rows.amax(-1).tolist(), abs=1e-3)
    among = [token in row.topk(2).indices for row, token in zip(rows, want, strict=True)]
    assert [len(top) for top in whole.top_logprobs] == [2 if best else 3 for best in among], "itself is always there"
    parts = [chunk.choices[0].logprobs for chunk in complete(client, stream=True, **asked)]
    parts = [part for part in parts if part is not None]
    assert [x for part in parts for x in part.tokens] == whole.tokens
    assert [x for part in parts for x in part.text_offset] == whole.text_offset
    assert [x for part in parts for x in part.token_logprobs] == pytest.approx(whole.token_logprobs, abs=1e-3)
    listed = chat(client, **{**asked, "logprobs": True}, top_logprobs=2).choices[0].logprobs.content
    ids = engine.chat(USER, temperature=0.5, seed=5, max_new_tokens=12).token_ids
    spelled = vocabulary(engine.tokenizer).tokens
    assert [bytes(each.bytes) for each in listed] == [spelled[i] or engine.tokenizer.decode([i]).encode() for i in ids]
    assert all(len(each.top_logprobs) == 2 for each in listed)


def test_the_tokens_with_log_probabilities_are_those_of_the_text(engine, client):
    """Whole and in chunks: not the token that ends it, and not those that a stop string cuts off."""
    text, end = wanted(engine, USER).text, engine.tokenizer.convert_tokens_to_ids("<|end|>")
    for more, want, tokens in (
        ({"stop": [text[5:7], "never"]}, text[: text.index(text[5:7])], None),
        ({"logit_bias": {str(end): 1000}}, "", 1),
    ):
        whole = chat(client, logprobs=True, **more)
        (choice,) = whole.choices
        listed = choice.logprobs.content
        assert (choice.message.content, choice.finish_reason) == (want, "stop")
        assert b"".join(bytes(entry.bytes) for entry in listed).decode("utf-8", "replace") == want
        assert whole.usage.completion_tokens > len(listed)
        assert tokens in (None, whole.usage.completion_tokens)
        parts = [chunk.choices[0] for chunk in chat(client, logprobs=True, **more, stream=True)]
        assert [x.token for c in parts if c.logprobs for x in c.logprobs.content] == [x.token for x in listed]
        assert all(c.logprobs.content for c in parts if c.logprobs)
        assert all(c.delta.content or c.logprobs is None for c in parts)
        got = complete(client, engine.encode(USER), logprobs=0, **more)
        assert len(got.choices[0].logprobs.tokens) == len(listed)  # where <|end|> ends no text: none of 24


@pytest.mark.long
def test_the_load_benchmark_measures_servers_in_turn(engine, server, run, tmp_path):
    workload = tmp_path / "prompts.jsonl"
    workload.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("hi", "def f(x):", "a")))
    args = ["--server", f"ours={server.url}", "--server", f"ours-plain={server.url}", "--workload", str(workload)]
    args += ["--users", "1", "--users", "3", "--max-new-tokens", "6", "--rounds", "2", "--json"]
    args += ["--library", str(engine.target.name), "--drafter", "none"]
    code, out, _ = run("benchmarks", "serving", *args)
    assert code == 0
    (table,) = json.loads(out)["tables"]
    assert [(row["server"], row["users"]) for row in table["rows"]] == [
        ("library", 1), ("ours", 1), ("ours-plain", 1), ("library", 3), ("ours", 3), ("ours-plain", 3),
    ]  # fmt: skip
    assert all(float(row["tokens/s"].split()[0]) > 0 for row in table["rows"])
    assert [row["x first named"] for row in table["rows"][::3]] == ["1.00 (1.00-1.00)"] * 2
    for bad in ("ours", "ours=http://127.0.0.1:9"):
        code, _, error = run("benchmarks", "serving", "--server", bad)
        assert code == 2
        assert "NAME=URL" in error or "start the server first" in error
