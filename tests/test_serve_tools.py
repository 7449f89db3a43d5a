"""Tools and their calls, as OpenAI's own client sees them: offered, made, streamed, forced, and sent back."""

import json
import random
import re
import time

import pydantic
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from tokenizers import AddedToken

import serving
from foretoken.core.errors import ForetokenError
from foretoken.models.grammar import Grammar
from foretoken.serve import requests
from foretoken.serve.calls import HERMES, LLAMA
from foretoken.serve.schema import ChatRequest
from foretoken.serve.structure import grammar_of
from foretoken.serve.tools import tool_use
from serving import client as client  # fixtures
from serving import server as server

CHAT = "/v1/chat/completions"
# What templates do beside writing calls.
AROUND = """\
{% if tools %}Tools:{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}<|end|>
{% endif %}
{% for m in messages %}
{% if m.tool_calls %}a:CALLS<|end|>
{% elif m.role == 'tool' %}t:{{ m.content }}<|end|>
{% else %}{{ m.role[0] }}{% if m.name %}({{ m.name }}){% endif %}:{{ m.content }}<|end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}a:{% endif %}"""
# As Qwen writes it: one {"name": .., "arguments": ..} between marks for each call.
MARKED = AROUND.replace(
    "CALLS",
    "{{ m.content }}{% for c in m.tool_calls %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    """{{ '<tool_call>\n{"name": "' + c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}"""
    "{{ '\n</tool_call>' }}{% endfor %}",
)
# As Llama 3.1 writes it: one {"name": .., "parameters": ..} instead of an answer.
BARE = AROUND.replace(
    "CALLS",
    '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
)
XML = AROUND.replace("CALLS", "{% for c in m.tool_calls %}<function={{ c.function.name }}></function>{% endfor %}")
MARKS = ("<tool_call>", "</tool_call>", "<think>")  # of Qwen's tokenizers: tokens that are text
USER = [{"role": "user", "content": "hi"}]


class City(pydantic.BaseModel):
    city: str


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rom", "S\u00e3o Paulo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "hot": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name="weather", parameters=WEATHER, **more):
    return {"type": "function", "function": {"name": name, "description": "D", "parameters": parameters, **more}}


TOOLS = [tool(), {"type": "function", "function": {"name": "clock"}}]
SETTINGS = {"model": serving.NAME, "messages": USER, "max_tokens": 200, "seed": 1}


def marked(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tokenizer_of(template, added=(), special=()):
    tokenizer = serving.toy_tokenizer(template, special)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


def with_template(folder, template, added=()):
    return serving.toy_engine(folder, tokenizer=tokenizer_of(template, added))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return with_template(tmp_path_factory.mktemp("marked"), MARKED, MARKS)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    with serving.served(with_template(tmp_path_factory.mktemp("bare"), BARE)) as running:
        yield running


@pytest.fixture
def says(monkeypatch):
    """Make the model say a text: its answers are held to its tokens, and the rest of the way is the real one."""
    tokenizer = tokenizer_of(MARKED, MARKS)

    def say(text):
        parts = filter(None, re.split(f"({'|'.join(MARKS)})", text))
        known = {part: f"<[{tokenizer.convert_tokens_to_ids(part)}]>" for part in MARKS}
        whole = Grammar.lark("start: " + " ".join(known.get(part, json.dumps(part)) for part in parts))
        monkeypatch.setattr(requests, "grammar_of", lambda *_: (whole, "tools"))

    return say


def both(client, **asked):
    """(message, finish reason) of an answer, and the same of a stream as the client puts it together."""
    choice = client.chat.completions.create(**{**SETTINGS, **asked}).choices[0]
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**{**SETTINGS, **asked}, stream=True):
        state.handle_chunk(chunk)
    streamed = state.current_completion_snapshot.choices[0]
    return [(choice.message, choice.finish_reason), (streamed.message, streamed.finish_reason)]


def read(message):
    return message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


ONE, TWO = marked("weather", '{"city": "Rom", "days": 1}'), marked("clock", "{}")
MADE, MADE_TWO = ("weather", '{"city": "Rom", "days": 1}'), ("clock", "{}")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ONE, None, [MADE]),
        (f"{ONE}\n{TWO}", None, [MADE, MADE_TWO]),
        (f"\n{TWO}\n", None, [MADE_TWO]),
        (f"Let me look.\n{ONE}", "Let me look.", [MADE]),
        (f"Let me look. {ONE} Then:\n{TWO}", "Let me look. Then:", [MADE, MADE_TWO]),
        ('<tool_call>{"name":"f","parameters":{"a":[1,{"b":"}"}]}}</tool_call>', None, [("f", '{"a":[1,{"b":"}"}]}')]),
        (marked("f", '{"a": "</tool_call> \\" <tool_call>"}'), None, [("f", '{"a": "</tool_call> \\" <tool_call>"}')]),
        (marked("f", '{"a": "\\ud800", "b": 1e999}'), None, [("f", '{"a": "\\ud800", "b": 1e999}')]),
        ("1 < 2 and <tool_cal", "1 < 2 and <tool_cal", []),
        ("A text. \n", "A text. \n", []),
        (f"It is <tool_call>{{}}</tool_call> {ONE}", "It is <tool_call>{}</tool_call>", [MADE]),
        ("<tool_call> \"unfinished", "<tool_call> \"unfinished", []),
        (f"<tool_call>\n{ONE} {TWO}", "<tool_call>", [MADE, MADE_TWO]),
        (marked("f", '"{}"'), marked("f", '"{}"'), []),
        (marked("f", '{"a": NaN}'), marked("f", '{"a": NaN}'), []),
        (marked("f", "{") + " so", marked("f", "{") + " so", []),
    ],
)  # fmt: skip
def test_calls_are_read_whole_and_from_a_stream(client, says, text, content, calls):
    says(text)
    for message, reason in both(client, tools=TOOLS):
        assert read(message) == (content, calls)
        assert reason == ("tool_calls" if calls else "stop")
        ids = [call.id for call in message.tool_calls or ()]
        assert len(set(ids)) == len(ids)
        assert all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids)


def test_a_call_that_is_cut_is_text(client, says):
    says(f"{TWO}\n{ONE}")  # a mark is one token, any other character another
    whole = len(TWO.replace("<tool_call>", "1").replace("</tool_call>", "2"))
    for message, reason in both(client, tools=TOOLS, max_tokens=whole + 30):
        assert reason == "length"
        assert read(message) == (f"\n{ONE}"[: 30 + len("tool_call>")], [MADE_TWO])
    for message, reason in both(client, tools=TOOLS, max_tokens=whole - 1):
        assert (message.content, message.tool_calls, reason) == (TWO[: -len("</tool_call>")], None, "length")
    for message, reason in both(client, tools=TOOLS, stop=["\n</tool"]):
        assert (message.content, message.tool_calls, reason) == (TWO[: -len("\n</tool_call>")], None, "stop")


def test_text_before_a_call_comes_as_it_grows(client, says):
    text = "Let me look at a <table> first."
    says(f"{text}\n{ONE}")
    chunks = list(client.chat.completions.create(stream=True, tools=TOOLS, **SETTINGS))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", None)
    parts = [delta.content for delta in deltas if delta.content]
    assert "".join(parts) == text
    assert len(parts) >= len(text) // 4  # a step adds at most four tokens, of one byte each
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.index, call.type, call.function.name, call.function.arguments) == (0, "function", *MADE)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("form", [HERMES, LLAMA])
def test_how_the_text_is_cut_changes_nothing(form):
    chosen = random.Random(0)
    pieces = [
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        '"',
        "{}",
        "<",
        "a",
        '{"name": "f", "arguments": {"a": "',
        '"}}',
    ]
    pieces += [ONE, TWO, '{"name": "f", "parameters": {}}', '\n{ "name" :"f", "parameters": {}}']

    def outcome(parts):
        reader, text, calls = form.reader(), "", []
        for i, part in enumerate(parts):
            said, made = reader.read(part, last=i == len(parts) - 1)
            text, calls = text + said, calls + made
        return text, [(call.index, call.name, call.arguments) for call in calls]

    num_calls = 0
    for _ in range(2000):
        text = "".join(chosen.choices(pieces, k=chosen.randrange(8)))
        cuts = sorted(chosen.choices(range(len(text) + 1), k=6))
        whole = outcome([text])
        assert outcome([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
        assert outcome([*text, ""]) == whole
        num_calls += len(whole[1])
        if not whole[1]:
            assert whole[0] == text
    assert num_calls > 30


def fits(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "clock":
        return arguments == {}
    city, days = arguments.pop("city"), arguments.pop("days")
    hot = arguments.pop("hot", True)
    return (
        call.function.name == "weather"
        and city in WEATHER["properties"]["city"]["enum"]
        and type(days) is int
        and 0 <= days <= 99
        and isinstance(hot, bool)
        and not arguments
    )


def test_many_opening_marks_take_no_longer_than_their_text_is_long():
    """They took 6 seconds when each was looked for its end through all of the text: now some hundredths."""
    for mark in ("<tool_call>", '<tool_call>"', '<tool_call>{"'):
        text, began = mark * 12_000, time.perf_counter()
        assert HERMES.reader().read(text, True) == (text, [])
        assert time.perf_counter() - began < 2


def test_a_call_that_must_be_made_fits_its_schema(client):
    names = set()
    for seed in range(8):
        for message, reason in both(client, tools=TOOLS, tool_choice="required", seed=seed, temperature=1.5):
            if reason == "length":  # call after call: those that are whole fit
                assert all(fits(call) for call in message.tool_calls)
                continue
            assert reason == "tool_calls"
            assert message.content is None
            assert all(fits(call) for call in message.tool_calls)
            names |= {call.function.name for call in message.tool_calls}
    assert names == {"weather", "clock"}


@pytest.mark.parametrize("form", ["marked", "bare"])
def test_a_named_function_is_called_once(form, server, bare):
    named = {"type": "function", "function": {"name": "weather"}}
    with serving.client_of(server if form == "marked" else bare) as client:
        for asked in ({"tool_choice": named}, {"tool_choice": "required", "parallel_tool_calls": False}):
            for seed in range(4):
                for message, reason in both(client, tools=TOOLS, seed=seed, temperature=1.5, **asked):
                    (call,) = message.tool_calls
                    assert fits(call)
                    assert (message.content, reason) == (None, "tool_calls")
                    assert call.function.name == "weather" or asked["tool_choice"] == "required"


def test_without_marks_a_call_is_the_whole_answer(bare, says):
    call = '{"name": "weather", "parameters": {"city": "Rom", "days": 1}}'
    cases = [(call, None, [MADE]), (f"\n\n{call}\n", None, [MADE]), (f"So: {call}", f"So: {call}", [])]
    cases += [(call + call, call + call, []), ('{"n": 1}', '{"n": 1}', []), (call[:-1], call[:-1], [])]
    spaced = call.replace('{"name": ', ' \r\n{\t"name" :\n ')
    cases += [(spaced, None, [MADE]), (call.replace('": "w', '":"w'), None, [MADE])]
    with serving.client_of(bare) as client:
        for text, content, calls in cases:
            says(text)
            for message, reason in both(client, tools=TOOLS):
                assert read(message) == (content, calls)
                assert reason == ("tool_calls" if calls else "stop")


def test_a_text_without_marks_is_held_back_no_longer_than_it_may_be_a_call():
    for text in ("S", " {'", '{ "n"', '{"na ', '{"name"}', '\n{ "name": 1', "\u00a0"):
        reader = LLAMA.reader()
        assert [reader.read(part, False) for part in (text[:-1], text[-1])] == [("", []), (text, [])], text
    reader, begun = LLAMA.reader(), ' {\n"name"\t: "f'
    assert all(reader.read(part, False) == ("", []) for part in begun)
    assert reader.read("", True) == (begun, [])


def accepted(tokenizer, text, **asked):
    """(whether a text may begin an answer, whether it may be all of it) by the grammar of a request."""
    body = ChatRequest.model_validate({"messages": USER, **asked})
    grammar, _ = grammar_of(body, tool_use(tokenizer).form, tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    held = grammar.constraint(tokenizer, frozenset([end]), 0)
    ids = tokenizer(text)["input_ids"] if text else []
    begins = all(held.allows(ids[:i], token) for i, token in enumerate(ids))
    return begins, begins and held.allows(ids, end)


STRICT = {"tools": [tool(strict=True), TOOLS[1]]}


@pytest.mark.parametrize("added", [(), MARKS, MARKS[:1]])
def test_what_marked_calls_are_held_to(added):
    tokenizer = tokenizer_of(MARKED, added)
    bad, other = marked("weather", '{"city": "Rom"}'), marked("other", "{}")
    yes, no = (True, True), (False, False)
    for text in ("", "A text.", "1 < 2", "<think>a<think>", f"So: {ONE}", f"{ONE}\n{ONE} <think>and {TWO} so"):
        assert accepted(tokenizer, text, **STRICT) == yes
    assert accepted(tokenizer, marked("clock", '{"a": 1}'), **STRICT) == yes  # which is not strict
    for text in (bad, "So: <tool_call>x", other, f"{ONE}<think>{bad}"):
        assert accepted(tokenizer, text, **STRICT) == no
    assert accepted(tokenizer, "<tool_call>", **STRICT) == (True, False)
    for text in ("", "A <think> text.", f"So: {ONE}", bad):
        assert accepted(tokenizer, text, tools=TOOLS, parallel_tool_calls=False) == yes
    for text in (f"{ONE}\n{ONE}", f"{ONE} and", other):
        assert accepted(tokenizer, text, tools=TOOLS, parallel_tool_calls=False) == no
    for text in (ONE, f"{ONE}\n{TWO}"):
        assert accepted(tokenizer, text, tools=TOOLS, tool_choice="required") == yes
    for text in ("A", bad, f"{ONE}\n{bad}", marked("clock", '{"a": 1}')):
        assert accepted(tokenizer, text, tools=TOOLS, tool_choice="required") == no
    named = {"type": "function", "function": {"name": "weather"}}
    assert accepted(tokenizer, ONE, tools=TOOLS, tool_choice=named) == yes
    for text in (TWO, f"{ONE}\n{ONE}"):
        assert accepted(tokenizer, text, tools=TOOLS, tool_choice=named) == no
    free, _ = grammar_of(ChatRequest.model_validate({"messages": USER, "tools": TOOLS}), HERMES, tokenizer)
    assert free is None


@pytest.mark.parametrize("added", [(), ("<think>",)])
def test_what_calls_without_marks_are_held_to(added):
    tokenizer = tokenizer_of(BARE, added)
    call = '{"name": "weather", "parameters": {"city": "Rom", "days": 1}}'
    for text in ("", "A text.", '{"n": 1}', call, f"So: {call}", "<think>a"):
        assert accepted(tokenizer, text, **STRICT) == (True, True)
    assert accepted(tokenizer, "\n " + call.replace('{"name"', '{ "name"'), **STRICT) == (True, True)
    for text in (call + " ", '{"name": "other"', '{"name": "weather", "parameters": {"a"', '\n{ "name" :"other"'):
        assert accepted(tokenizer, text, **STRICT) == (False, False)
    assert accepted(tokenizer, call, tools=TOOLS, tool_choice="required") == (True, True)
    assert accepted(tokenizer, "A", tools=TOOLS, tool_choice="required") == (False, False)


def test_a_strict_function_may_be_left_uncalled(client, engine):
    got = client.chat.completions.create(tools=[tool(strict=True)], **{**SETTINGS, "max_tokens": 16}).choices[0]
    assert got.message.tool_calls is None
    assert got.message.content


def test_calls_are_not_read_where_none_may_be_made(client, says):
    says(ONE)
    for message, reason in both(client, tools=TOOLS, tool_choice="none"):
        assert (message.content, message.tool_calls, reason) == (ONE, None, "stop")


def test_an_answer_is_taken_back(client, server, engine, says):
    """Every field of the client's dump, of an answer and of a stream, is taken; the template gets all that counts."""
    says(f"Let me look.\n{ONE}\n{TWO}")
    wanted = f"u:hi<|end|>\na:Let me look.\n{ONE}\n{TWO}<|end|>\nt:cold<|end|>\nt:noon<|end|>\na:"
    for message, _ in both(client, tools=TOOLS):
        sent = message.model_dump()
        assert sent["annotations"] is None
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": content}
            for call, content in zip(message.tool_calls, ("cold", "noon"), strict=True)
        ]
        conversation = [*USER, sent, *results]
        told = server.post("/tokenize", {"messages": conversation}).json()["tokens"]
        assert engine.tokenizer.decode(told) == wanted
        client.chat.completions.create(**{**SETTINGS, "messages": conversation}, tools=TOOLS)
        offered = server.post("/tokenize", {"messages": conversation, "tools": TOOLS}).json()["tokens"]
        tools = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in TOOLS)
        assert engine.tokenizer.decode(offered) == f"Tools:{tools}<|end|>\n{wanted}"
    says(ONE)
    for message, _ in both(client, tools=TOOLS):
        sent = message.model_dump()
        assert sent["content"] is None
        told = server.post("/tokenize", {"messages": [*USER, sent]}).json()["tokens"]
        assert engine.tokenizer.decode(told) == f"u:hi<|end|>\na:{ONE}<|end|>\na:"
        assert engine.encode([*USER, sent]) == told  # the Python interface takes the same


def test_an_answer_that_the_client_has_parsed_is_taken_back(client, server, engine, says):
    def written(message):
        told = server.post("/tokenize", {"messages": [*USER, message.model_dump(warnings=False)]}).json()["tokens"]
        return engine.tokenizer.decode(told)

    says(ONE)
    got = client.chat.completions.parse(tools=[tool(strict=True)], **SETTINGS).choices[0].message
    assert got.tool_calls[0].function.parsed_arguments == {"city": "Rom", "days": 1}
    assert written(got) == f"u:hi<|end|>\na:{ONE}<|end|>\na:"
    says('{"city": "Rom"}')
    got = client.chat.completions.parse(response_format=City, **SETTINGS).choices[0].message
    assert got.parsed == City(city="Rom")
    assert written(got) == 'u:hi<|end|>\na:{"city": "Rom"}<|end|>\na:'


def test_roles_and_names(server, engine):
    def written(*messages):
        return engine.tokenizer.decode(server.post("/tokenize", {"messages": messages}).json()["tokens"])

    assert written({"role": "developer", "content": "D"}, *USER) == "s:D<|end|>\nu:hi<|end|>\na:"
    assert written({"role": "user", "content": "x", "name": "ann"}) == "u(ann):x<|end|>\na:"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert written({"role": "user", "content": parts, "refusal": None}) == "u:a\nb<|end|>\na:"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"tools": []}, "tools", "at least 1 item"),
        ({"tools": [tool()] * 129}, "tools", "at most 128 items"),
        ({"tools": {}}, "tools", "a valid list"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "is missing"),
        ({"tools": [tool(name="a b")]}, "tools.0.function.name", "pattern"),
        ({"tools": [tool(name="x" * 65)]}, "tools.0.function.name", "pattern"),
        ({"tools": [tool(parameters="x")]}, "tools.0.function.parameters", "a valid dictionary"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters", "schema of an object"),
        ({"tools": [tool(strict="yes")]}, "tools.0.function.strict", "a valid boolean"),
        ({"tools": [tool(returns={})]}, "tools.0.function.returns", "Unknown field"),
        ({"tools": [tool(), tool()]}, "tools", "two functions of one name"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        ({"tool_choice": "auto"}, "tool_choice", "is for tools"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls", "is for tools"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "a valid boolean"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "without calls"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", "without calls"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "leave out either"),
        (
            {"tools": [tool(parameters={"properties": {"a": {"not": {}}}}, strict=True)]},
            "tools.0.function.parameters",
            "cannot be enforced",
        ),
        ({"functions": []}, "functions", "Unknown field"),
        ({"messages": [{"role": "clown", "content": "x"}]}, "messages.0.role", "'developer'"),
        ({"messages": [{"role": "user"}]}, "messages", "Message 1 of the conversation has no content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "has no content"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages", "has no content"),
        ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages.0.refusal", "Unknown field"),
        ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages.0.audio", "Unknown field"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function", ""),
        (
            {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "messages",
            "only the assistant's",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
            "messages",
            "The arguments of call 1 of message 1 of the conversation",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
            "are not those of a call",
        ),
    ],
)
def test_what_is_refused_is_told_by_name(server, body, param, says):
    answer = server.post(CHAT, {"messages": USER, "max_tokens": 4, **body})
    assert answer.status_code == 400
    told = answer.json()["error"]
    assert told["param"] == param
    assert says in told["message"]


def test_only_messages_have_tools(server):
    for path, body in (
        ("/tokenize", {"prompt": "x", "tools": TOOLS}),
        ("/v1/completions", {"prompt": "x", "tools": TOOLS}),
    ):
        answer = server.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_tools_with_a_form_of_text_where_no_call_is_made(client):
    got = client.chat.completions.create(
        tools=TOOLS, tool_choice="none", response_format={"type": "json_object"}, **SETTINGS
    )
    assert got.choices[0].finish_reason == "length" or json.loads(got.choices[0].message.content) is not None


def test_a_template_without_tools(tmp_path):
    """It is not asked to write what it would leave out."""
    call = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
    cases = (
        ({"messages": USER, "tools": TOOLS}, "tools"),
        ({"messages": [*USER, call]}, "messages.1.tool_calls"),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages.1.role"),
    )
    plain = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}"
    with serving.served(with_template(tmp_path, plain)) as running:
        for path in (CHAT, "/tokenize"):
            for body, param in cases:
                answer = running.post(path, body)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == param
                assert "chat template" in answer.json()["error"]["message"]


def test_a_template_whose_calls_are_not_known(tmp_path):
    with serving.served(with_template(tmp_path, XML)) as running:
        asked = {"messages": USER, "tools": TOOLS, "max_tokens": 4}
        answer = running.post(CHAT, asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert "a form that this server does not read" in answer.json()["error"]["message"]
        assert running.post(CHAT, {**asked, "tool_choice": "none"}).status_code == 200
        assert running.post("/tokenize", {"messages": USER, "tools": TOOLS}).status_code == 200


def test_the_form_of_calls_is_found_from_the_template():
    def use(template, special=()):
        return tool_use(tokenizer_of(template, special=special))

    assert (use(MARKED).form, use(BARE).form, use(XML).form, use(None).form) == (HERMES, LLAMA, None, None)
    assert use({"default": serving.TEMPLATE, "tool_use": MARKED}).form == HERMES
    assert use(BARE.replace('%}{"name"', '%}[{"name"')).form is None
    assert use(MARKED, special=["<tool_call>"]).form is None  # it is not in the text
    assert not use(serving.TEMPLATE).takes
    assert not use(MARKED).drops_calls
    assert not use(MARKED).drops_results


def test_the_python_interface_takes_tool_calls_and_refuses_bad_ones(engine):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    said = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert engine.chat(said, max_new_tokens=2, seed=1).token_ids
    for bad in ("x", [1], [{}], [{"function": {"name": 1}}], [{"function": {"name": "f", "arguments": "1"}}]):
        with pytest.raises(ForetokenError, match="all 1 of message 2 of the conversation"):
            engine.chat([USER[0], {"role": "assistant", "tool_calls": bad}])
