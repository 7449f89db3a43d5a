"""Tools as they are offered and sent back: conversations with calls, what is refused, and what templates can write."""

import json

import pydantic
import pytest

import serving
from calling import BARE, MARKED, ONE, SETTINGS, TOOLS, TWO, XML, both, tokenizer_of, tool, with_template
from calling import engine as engine
from calling import says as says
from foretoken.core.errors import ForetokenError
from foretoken.serve.calls import HERMES, LLAMA
from foretoken.serve.tools import tool_use
from limited import error
from serving import CHAT, COMPLETION, USER
from serving import client as client  # fixtures
from serving import server as server


class City(pydantic.BaseModel):
    city: str


def written(server, engine, messages, **more):
    """What the chat template writes for a conversation."""
    told = server.post("/tokenize", {"messages": messages, **more}).json()["tokens"]
    return engine.tokenizer.decode(told)


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
        assert written(server, engine, conversation) == wanted
        client.chat.completions.create(**{**SETTINGS, "messages": conversation}, tools=TOOLS)
        tools = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in TOOLS)
        assert written(server, engine, conversation, tools=TOOLS) == f"Tools:{tools}<|end|>\n{wanted}"
    says(ONE)
    for message, _ in both(client, tools=TOOLS):
        sent = message.model_dump()
        assert sent["content"] is None
        assert written(server, engine, [*USER, sent]) == f"u:hi<|end|>\na:{ONE}<|end|>\na:"
        assert engine.tokenizer.decode(engine.encode([*USER, sent])) == f"u:hi<|end|>\na:{ONE}<|end|>\na:"


def test_an_answer_that_the_client_has_parsed_is_taken_back(client, server, engine, says):
    def sent(message):
        return written(server, engine, [*USER, message.model_dump(warnings=False)])

    says(ONE)
    got = client.chat.completions.parse(tools=[tool(strict=True)], **SETTINGS).choices[0].message
    assert got.tool_calls[0].function.parsed_arguments == {"city": "Rom", "days": 1}
    assert sent(got) == f"u:hi<|end|>\na:{ONE}<|end|>\na:"
    says('{"city": "Rom"}')
    got = client.chat.completions.parse(response_format=City, **SETTINGS).choices[0].message
    assert got.parsed == City(city="Rom")
    assert sent(got) == 'u:hi<|end|>\na:{"city": "Rom"}<|end|>\na:'


def test_reasoning_is_sent_back_to_templates_that_read_it(tmp_path):
    template = "{% for m in messages %}{{ m.role[0] + ':' + m.reasoning_content|default('') + m.content }}{% endfor %}"
    with serving.served(serving.toy_engine(tmp_path, tokenizer=serving.toy_tokenizer(template))) as running:
        answer = {"role": "assistant", "content": "x", "reasoning_content": "Hm."}
        told = running.post("/tokenize", {"messages": [*USER, answer]}).json()["tokens"]
        assert running.post("/detokenize", {"tokens": told}).json() == {"prompt": "u:hia:Hm.x"}


def test_roles_and_names(server, engine):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for messages, wanted in (
        ([{"role": "developer", "content": "D"}, *USER], "s:D<|end|>\nu:hi<|end|>\na:"),
        ([{"role": "user", "content": "x", "name": "ann"}], "u(ann):x<|end|>\na:"),
        ([{"role": "user", "content": parts, "refusal": None}], "u:a\nb<|end|>\na:"),
    ):
        assert written(server, engine, messages) == wanted


def calling(arguments, role="assistant"):
    return {"messages": [{"role": role, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]}


IMPOSSIBLE = tool(parameters={"properties": {"a": {"not": {}}}}, strict=True)


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
        ({"tools": [tool(parameters="x")]}, "tools.0.function.parameters", "an object"),
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
        ({"tools": TOOLS, "response_format": {"type": "json_schema"}}, "response_format", "no json_schema"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", "without calls"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "leave out either"),
        ({"tools": [IMPOSSIBLE]}, "tools.0.function.parameters", "cannot be enforced"),
        ({"functions": []}, "functions", "Unknown field"),
        ({"messages": [{"role": "clown", "content": "x"}]}, "messages.0.role", "'developer'"),
        ({"messages": [{"role": "user"}]}, "messages", "Message 1 of the conversation has no content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "has no content"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages", "has no content"),
        ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages.0.audio", "Unknown field"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function", ""),
        (calling("{}", "user"), "messages", "only the assistant's"),
        (calling("[]"), "messages", "The arguments of call 1 of message 1 of the conversation"),
        (calling("{"), "messages", "are not those of a call"),
    ],
)
def test_what_is_refused_is_told_by_name(server, body, param, says):
    told = error(server.post(CHAT, {"messages": USER, "max_tokens": 4, **body}))
    assert told["param"] == param
    assert says in told["message"]


def test_only_messages_have_tools(server):
    for path in ("/tokenize", COMPLETION):
        assert error(server.post(path, {"prompt": "x", "tools": TOOLS}))["param"] == "tools"


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
                told = error(running.post(path, body))
                assert told["param"] == param
                assert "chat template" in told["message"]


def test_a_template_whose_calls_are_not_known(tmp_path):
    with serving.served(with_template(tmp_path, XML)) as running:
        asked = {"messages": USER, "tools": TOOLS, "max_tokens": 4}
        told = error(running.post(CHAT, asked))
        assert told["param"] == "tools"
        assert "a form that this server does not support" in told["message"]
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
