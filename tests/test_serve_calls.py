"""Calls of tools are read out of what the model writes: whole, from a stream, with and without marks."""

import random
import re
import time

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


@pytest.mark.parametrize("form", [HERMES, LLAMA])
def test_how_the_text_is_cut_changes_nothing(form):
    chosen = random.Random(0)
    pieces = ["<tool_call>", "</tool_call>", "\n", " ", '"', "{}", "<", "a", '{"name": "f", "arguments": {"a": "']
    pieces += ['"}}', ONE, TWO, '{"name": "f", "parameters": {}}', '\n{ "name" :"f", "parameters": {}}']

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


def test_many_opening_marks_take_no_longer_than_their_text_is_long():
    """They took 6 seconds when each was looked for its end through all of the text: now some hundredths."""
    for mark in ("<tool_call>", '<tool_call>"', '<tool_call>{"'):
        text, began = mark * 12_000, time.perf_counter()
        assert HERMES.reader().read(text, True) == (text, [])
        assert time.perf_counter() - began < 2


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


def test_calls_are_not_read_where_none_may_be_made(client, says):
    says(ONE)
    for message, reason in both(client, tools=TOOLS, tool_choice="none"):
        assert (message.content, message.tool_calls, reason) == (ONE, None, "stop")
