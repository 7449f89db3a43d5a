"""Calls that must be made, and strict functions: the text is held to their schemas."""

import json

import pytest

import serving
from calling import BARE, MARKED, MARKS, ONE, TOOLS, TWO, WEATHER, both, marked, tokenizer_of, tool
from calling import bare as bare  # fixtures
from calling import engine as engine
from foretoken.serve.calls import HERMES
from foretoken.serve.schema import ChatRequest
from foretoken.serve.structure import grammar_of
from foretoken.serve.tools import tool_use, wanted_form
from serving import USER
from serving import client as client  # fixtures
from serving import server as server
from thinning import one_in


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


@pytest.mark.parametrize("form", one_in(2, ["marked", "bare"]))
def test_a_named_function_is_called_once(form, server, bare):
    with serving.client_of(server if form == "marked" else bare) as client:
        for asked in ({"tool_choice": NAMED}, {"tool_choice": "required", "parallel_tool_calls": False}):
            for seed in range(4):
                for message, reason in both(client, tools=TOOLS, seed=seed, temperature=1.5, **asked):
                    (call,) = message.tool_calls
                    assert fits(call)
                    assert (message.content, reason) == (None, "tool_calls")
                    assert call.function.name == "weather" or asked["tool_choice"] == "required"


def accepted(tokenizer, text, **asked):
    """(whether a text may begin an answer, whether it may be all of it) by the grammar of a request."""
    body = ChatRequest.model_validate({"messages": USER, **asked})
    grammar, _ = grammar_of(body, wanted_form(body, tool_use(tokenizer)), tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    held = grammar.constraint(tokenizer, frozenset([end]), 0)
    ids = tokenizer(text)["input_ids"] if text else []
    begins = all(held.allows(ids[:i], token) for i, token in enumerate(ids))
    return begins, begins and held.allows(ids, end)


def check(tokenizer, yes=(), no=(), begun=(), **asked):
    """yes, no, begun: answers that a request allows, others, and texts that may only be the beginning of one."""
    for answers, wanted in ((yes, (True, True)), (no, (False, False)), (begun, (True, False))):
        for answer in answers:
            assert accepted(tokenizer, answer, **asked) == wanted, answer


STRICT = {"tools": [tool(strict=True), TOOLS[1]]}
NAMED = {"type": "function", "function": {"name": "weather"}}
ONLY_ONE = {"tools": TOOLS, "parallel_tool_calls": False}


@pytest.mark.parametrize("added", [(), MARKS, MARKS[:1]])
def test_what_marked_calls_are_held_to(added):
    tokenizer = tokenizer_of(MARKED, added)
    bad, other = marked("weather", '{"city": "Rom"}'), marked("other", "{}")
    loose = marked("clock", '{"a": 1}')  # of a function that is not strict
    yes = ("", "A text.", "1 < 2", "<think>a<think>", f"So: {ONE}", f"{ONE}\n{ONE} <think>and {TWO} so", loose)
    check(tokenizer, yes, (bad, "So: <tool_call>x", other, f"{ONE}<think>{bad}"), ("<tool_call>",), **STRICT)
    check(tokenizer, ("", "A <think> text.", f"So: {ONE}", bad), (f"{ONE}\n{ONE}", f"{ONE} and", other), **ONLY_ONE)
    no = ("A", bad, f"{ONE}\n{bad}", loose)
    check(tokenizer, (ONE, f"{ONE}\n{TWO}"), no, tools=TOOLS, tool_choice="required")
    check(tokenizer, (ONE,), (TWO, f"{ONE}\n{ONE}"), tools=TOOLS, tool_choice=NAMED)
    free, _ = grammar_of(ChatRequest.model_validate({"messages": USER, "tools": TOOLS}), HERMES, tokenizer)
    assert free is None


BARE_CALL = '{"name": "weather", "parameters": {"city": "Rom", "days": 1}}'


@pytest.mark.parametrize("added", [(), ("<think>",)])
def test_what_calls_without_marks_are_held_to(added):
    tokenizer = tokenizer_of(BARE, added)
    yes = ["", "A text.", '{"n": 1}', BARE_CALL, f"So: {BARE_CALL}", "<think>a"]
    yes += ["\n " + BARE_CALL.replace('{"name"', '{ "name"')]
    no = (BARE_CALL + " ", '{"name": "other"', '{"name": "weather", "parameters": {"a"', '\n{ "name" :"other"')
    check(tokenizer, yes, no, **STRICT)
    check(tokenizer, (BARE_CALL,), ("A",), tools=TOOLS, tool_choice="required")


BARE_ONE, BARE_TWO = (text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") for text in (ONE, TWO))
SPACED = BARE_ONE.replace('{"name": "weather", ', '{\n  "name" : "weather",\n  ').replace("}}", "}\n}")


def fenced(*calls):
    return "```json\n" + "\n".join(calls) + "\n```"


@pytest.mark.parametrize("added", [(), MARKS])
def test_what_calls_that_lack_their_marks_are_held_to(added):
    tokenizer = tokenizer_of(MARKED, added)
    bad = BARE_ONE.replace("Rom", "rom")
    one = [BARE_ONE, f"\n{SPACED}\n", BARE_TWO, fenced(SPACED), f"```{BARE_ONE}```"]
    several = [f"{BARE_ONE}\n{SPACED}", fenced(BARE_ONE, BARE_TWO), f"{fenced(BARE_ONE)}\n\n{fenced(SPACED)}\n"]
    text = ['{"name": "other", "arguments": {"a"', f"So: {bad}", fenced('{"name": "weather"}'), "```", f"{{}} {ONE}"]
    no = (bad, fenced(bad), BARE_ONE + " so", fenced(BARE_ONE) + " so", f"{BARE_ONE}\n{bad}", f"{bad} {ONE}")
    check(tokenizer, one + several + text, no, (BARE_ONE[:-1], fenced(BARE_ONE)[:-1]), **STRICT)
    check(tokenizer, one + text, several, **ONLY_ONE)
    yes, no = ([each.replace("weather", "get-x")] for each in (BARE_ONE, bad))
    check(tokenizer, yes, no, tools=[tool("get-x", strict=True)])


PERSON = {"type": "object", "properties": {"name": {"enum": ["Ann", "weather"]}, "age": {"enum": [3, 4]}}}
PERSON |= {"required": ["name", "age"], "additionalProperties": False}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ANN, NAMESAKE = '{"name": "Ann", "age": 3}', '{"name": "weather", "age": 3}'


@pytest.mark.parametrize("added", [(), MARKS])
def test_an_answer_with_tools_and_a_form_of_text_is_calls_or_the_text(added):
    tokenizer = tokenizer_of(MARKED, added)
    asked = {**STRICT, "response_format": AS_PERSON}
    one, several = [ONE, TWO, BARE_ONE, BARE_TWO], [f"{ONE}\n{TWO}", f"{BARE_ONE}\n{BARE_TWO}"]
    no = ["A", f"So: {ONE}", f"{ANN}\n{ONE}", f"{ONE}\n{ANN}", BARE_ONE.replace("Rom", "rom"), marked("weather", "{")]
    check(tokenizer, [ANN, NAMESAKE, *one, *several], [*no, fenced(ANN), "{}"], [""], **asked)
    check(tokenizer, [ANN, *one], several, parallel_tool_calls=False, **asked)
    asked["response_format"] = {"type": "json_object"}
    check(tokenizer, (ANN, "{}", f"{ONE}\n{TWO}", BARE_ONE), ("A", "[]", f"So: {ONE}"), **asked)
    check(tokenizer, (ANN, "{}"), ("A", "[]", ONE), tool_choice="none", **asked)
    for choice in ("required", NAMED):  # no text, and so no form of it
        check(tokenizer, (ONE,), (ANN,), tool_choice=choice, **asked)


def test_an_answer_with_a_form_of_text_and_tools_without_marks():
    no = ("A", BARE_CALL.replace("Rom", "rom"), f"{BARE_CALL}\n{BARE_CALL}", ONE)
    check(tokenizer_of(BARE), (ANN, NAMESAKE, BARE_CALL), no, response_format=AS_PERSON, **STRICT)


def test_tools_and_a_form_of_text_are_answered_with_either(engine, server):
    found = set()
    with serving.client_of(server) as client:
        for seed, likely in enumerate(("", "{A", "{wr")):  # letters that lead to either
            bias = {str(engine.tokenizer.convert_tokens_to_ids(letter)): 100 for letter in likely}
            asked = {"tools": [tool(strict=True)], "response_format": AS_PERSON, "seed": seed, "temperature": 1.5}
            for message, reason in both(client, logit_bias=bias, **asked):
                if reason == "length":  # call after call
                    continue
                found.add(reason)
                if reason == "tool_calls":
                    assert message.content is None
                    assert all(fits(call) for call in message.tool_calls)
                else:
                    assert message.content in (ANN, ANN.replace("3", "4"), NAMESAKE, NAMESAKE.replace("3", "4"))
    assert found == {"stop", "tool_calls"}
