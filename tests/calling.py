"""Models that call tools: chat templates that write calls, tools to offer, and what a client reads of an answer."""

import json
import re

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from tokenizers import AddedToken

import serving
from foretoken.models.grammar import Grammar
from foretoken.serve import requests
from serving import USER

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
