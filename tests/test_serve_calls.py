"""Calls of tools are read out of what the model writes: whole, from a stream, with and without marks."""

import random
import re
import time
from dataclasses import replace

import pytest

import serving
from calling import MADE, MADE_TWO, ONE, SETTINGS, TOOLS, TWO, both, marked, read
from calling import bare as bare  # fixtures
from calling import engine as engine
from calling import says as says
from foretoken.serve.calls import HERMES, LLAMA
from serving import client as client  # fixtures
from serving import server as server


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


def outcome_of(form, parts):
    """The text and the calls of an answer that comes in parts."""
    reader, text, calls = form.reader(), "", []
    for i, part in enumerate(parts):
        said, made = reader.read(part, last=i == len(parts) - 1)
        text, calls = text + said, calls + made
    assert [call.index for call in calls] == list(range(len(calls)))
    return text, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("form", [HERMES, LLAMA])
def test_how_the_text_is_cut_changes_nothing(form):
    chosen = random.Random(0)
    pieces = ["<tool_call>", "</tool_call>", "\n", " ", '"', "{}", "<", "a", '{"name": "f", "arguments": {"a": "']
    pieces += ['"}}', ONE, TWO, '{"name": "f", "parameters": {}}', '\n{ "name" :"f", "parameters": {}}']
    num_calls = 0
    for _ in range(2000):
        text = "".join(chosen.choices(pieces, k=chosen.randrange(8)))
        cuts = sorted(chosen.choices(range(len(text) + 1), k=6))
        whole = outcome_of(form, [text])
        assert outcome_of(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
        assert outcome_of(form, [*text, ""]) == whole
        num_calls += len(whole[1])
        if not whole[1]:
            assert whole[0] == text
    assert num_calls > 30


WEATHER_CALL = '{"name": "weather", "arguments": {"city": "Rom", "days": 1}}'
CLOCK_CALL = '{\n  "name" : "clock",\n  "arguments": {}\n}'
UNMARKED = [
    (WEATHER_CALL, [MADE]),
    (f"\n{WEATHER_CALL}\n{CLOCK_CALL} \n", [MADE, MADE_TWO]),
    (f"```json\n{CLOCK_CALL}\n```", [MADE_TWO]),
    (f"```\n{WEATHER_CALL}```\n", [MADE]),
    (f"```json\n{WEATHER_CALL}\n{CLOCK_CALL}\n```", [MADE, MADE_TWO]),
    (f"```json\n{WEATHER_CALL}\n```\n\n```json\n{CLOCK_CALL}\n```", [MADE, MADE_TWO]),
    (
        '{"name":"clock","arguments":{"a\\"":["}",-1.5e+3,true,null,{"b":"\\ud83d\\u00e9```"}]}}',
        [("clock", '{"a\\"":["}",-1.5e+3,true,null,{"b":"\\ud83d\\u00e9```"}]}')],
    ),
]  # fmt: skip
NO_CALLS = [
    "",
    " ",
    "A text.",
    f"So: {WEATHER_CALL}",
    f"{WEATHER_CALL} is a call.",
    f"{WEATHER_CALL}\u00a0",
    f"```json\n{WEATHER_CALL}\n```\nThis calls it.",
    f"```json\n{WEATHER_CALL}\n",
    f"```python\n{WEATHER_CALL}\n```",
    "```json\n```",
    f"[{WEATHER_CALL}]",
    f"`{WEATHER_CALL}`",
    WEATHER_CALL[:-1],
    WEATHER_CALL + "}",
    WEATHER_CALL.replace("weather", "weathers"),
    WEATHER_CALL.replace("weather", "Weather"),
    WEATHER_CALL.replace("arguments", "parameters"),
    '{"name": "weather", "arguments": "{}"}',
    '{"name": "weather", "arguments": [1]}',
    '{"name": "weather", "arguments": {"a": NaN}}',
    '{"name": "weather", "arguments": {"a" 1}}',
    '{"name": "weather", "arguments": {}, "id": 1}',
    '{"arguments": {}, "name": "weather"}',
    '{"name": "weather"}',
    '{"city": "Rom"}',
    '{"name": "weather", "arguments": {"a": ' * 4000,
    '{"name": "weather", "arguments": ' + '{"a": ' * 4000,
]  # fmt: skip
OPEN = replace(HERMES, names=frozenset({"weather", "clock"}))


def cut_everywhere(text):
    """A text whole, in two parts cut at every place, and in single characters."""
    yield [text]
    yield from ([text[:i], text[i:]] for i in range(0, len(text) + 1, 1 + len(text) // 300))
    yield [*text[:500], text[500:], ""]


@pytest.mark.parametrize("alone", [False, True])
def test_a_whole_answer_of_calls_without_marks_is_read(alone):
    form = replace(OPEN, alone=alone)
    for text, calls in UNMARKED:
        for parts in cut_everywhere(text):
            assert outcome_of(form, parts) == ("", calls), parts
        reader = form.reader()
        assert all(reader.read(part, False) == ("", []) for part in text), text
    for text in NO_CALLS:
        for parts in cut_everywhere(text):
            assert outcome_of(form, parts) == (text, []), parts
    for text, _ in UNMARKED:
        assert outcome_of(HERMES, [text]) == (text, [])


def test_calls_with_marks_are_read_beside_those_without():
    for before in ("", "So: ", '{"a": 1} ', "```json\n{}\n``` ", f"{WEATHER_CALL} "):
        for parts in cut_everywhere(f"{before}{ONE}\n{TWO}"):
            assert outcome_of(OPEN, parts) == (before.rstrip(), [MADE, MADE_TWO]), parts


def test_where_text_and_calls_are_apart_no_call_is_read_out_of_the_text():
    text = f'{{"a": "{TWO}"}}'
    for parts in cut_everywhere(text):
        assert outcome_of(replace(OPEN, alone=True), parts) == (text, [])
    for parts in cut_everywhere(f"{ONE}\n{TWO}"):
        assert outcome_of(replace(OPEN, alone=True), parts) == ("", [MADE, MADE_TWO])


def test_an_answer_with_a_form_of_text_is_calls_or_text(client, says):
    for text, outcome in ((f"{ONE}\n{TWO}", (None, [MADE, MADE_TWO])), (f"[{ONE}]", (f"[{ONE}]", []))):
        says(text)
        for message, reason in both(client, tools=TOOLS, response_format={"type": "json_object"}):
            assert read(message) == outcome
            assert reason == ("tool_calls" if outcome[1] else "stop")


def comes_at_the_last_character(form, text):
    reader = form.reader()
    assert [reader.read(part, False) for part in (text[:-1], text[-1], "b")] == [("", []), (text, []), ("b", [])], text


def test_text_that_cannot_be_calls_without_marks_comes_at_once():
    cases = ("S", " {'", '{ "nb', '{"na-', '{"name"}', '{"name": "wo', '{"name": "clock"}', "`a", "``` ja")
    cases += ('{"name": "clock", "p', '{"name": "clock", "arguments": [', '{"name": "clock", "arguments": {,')
    cases += (f"{CLOCK_CALL} a", f"```\n{CLOCK_CALL} a", f"```\n{CLOCK_CALL}\n```\na", f"```{CLOCK_CALL}\n``a")
    for text in cases:
        comes_at_the_last_character(OPEN, text)


def test_many_calls_without_marks_take_no_longer_than_their_text_is_long():
    """Calls that are complete are not read again with each piece."""
    text, began = f"{WEATHER_CALL}\n" * 1000, time.perf_counter()
    assert outcome_of(OPEN, [text[i : i + 5] for i in range(0, len(text), 5)]) == ("", [MADE] * 1000)
    assert time.perf_counter() - began < 10


def test_calls_without_marks_are_answered_as_those_with_marks(client, says):
    for text, calls in UNMARKED[1::2]:
        says(text)
        for message, reason in both(client, tools=TOOLS):
            assert (read(message), reason) == ((None, calls), "tool_calls")
            assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in message.tool_calls)
    says(f"So: {WEATHER_CALL}")
    for message, reason in both(client, tools=TOOLS):
        assert (read(message), reason) == ((f"So: {WEATHER_CALL}", []), "stop")
    says(WEATHER_CALL)
    for asked, kept in (({"max_tokens": 20}, WEATHER_CALL[:20]), ({"tool_choice": "none"}, WEATHER_CALL)):
        for message, _ in both(client, tools=TOOLS, **asked):
            assert read(message) == (kept, [])
    got = [client.chat.completions.create(tools=TOOLS, **SETTINGS) for say in (ONE, WEATHER_CALL) if not says(say)]
    assert [each.usage.completion_tokens for each in got] == [len(WEATHER_CALL) + 5, len(WEATHER_CALL) + 1]


def test_many_opening_marks_take_no_longer_than_their_text_is_long():
    """An end is not looked for through all of the text behind each of them."""
    for mark in ("<tool_call>", '<tool_call>"', '<tool_call>{"'):
        text, began = mark * 12_000, time.perf_counter()
        assert HERMES.reader().read(text, True) == (text, [])
        assert time.perf_counter() - began < 2


def test_without_marks_a_call_is_the_whole_answer(bare, says):
    call = '{"name": "weather", "parameters": {"city": "Rom", "days": 1}}'
    spaced = call.replace('{"name": ', ' \r\n{\t"name" :\n ')
    for text in (call, f"\n\n{call}\n", spaced, call.replace('": "w', '":"w')):
        for parts in cut_everywhere(text):
            assert outcome_of(LLAMA, parts) == ("", [MADE]), parts
    for text in (f"So: {call}", call + call, '{"n": 1}', call[:-1]):
        for parts in cut_everywhere(text):
            assert outcome_of(LLAMA, parts) == (text, []), parts
    with serving.client_of(bare) as client:
        for text, content, calls in ((spaced, None, [MADE]), (f"So: {call}", f"So: {call}", [])):
            says(text)
            for message, reason in both(client, tools=TOOLS):
                assert (read(message), reason) == ((content, calls), "tool_calls" if calls else "stop")


def test_a_text_without_marks_is_held_back_no_longer_than_it_may_be_a_call():
    for text in ("S", " {'", '{ "n"', '{"na ', '{"name"}', '\n{ "name": 1', "\u00a0"):
        comes_at_the_last_character(LLAMA, text)
    reader, begun = LLAMA.reader(), ' {\n"name"\t: "f'
    assert all(reader.read(part, False) == ("", []) for part in begun)
    assert reader.read("", True) == (begun, [])


def test_calls_are_not_read_where_none_may_be_made(client, says):
    says(ONE)
    for message, reason in both(client, tools=TOOLS, tool_choice="none"):
        assert (message.content, message.tool_calls, reason) == (ONE, None, "stop")
