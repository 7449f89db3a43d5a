"""The grammar that a request holds its texts to: by OpenAI's `response_format` and `tools`, or vLLM's
`structured_outputs`."""

import json
import re
from collections.abc import Mapping, Sequence

from foretoken.core.messages import check_text
from foretoken.models.grammar import Grammar, marks_of
from foretoken.models.text import Tokenizer
from foretoken.serve.calls import BEGIN, BEGINS, END, MARK, CallForm
from foretoken.serve.errors import ApiError, refusing
from foretoken.serve.schema import ChatRequest, ChosenTool, Function, ResponseFormat, Sampled, StructuredOutputs

ANY = r"(.|\n)"  # any character, as a regular expression


def grammar_of(body: Sampled, form: CallForm | None, tokenizer: Tokenizer) -> tuple[Grammar | None, str]:
    """Return (grammar, the field that asks for it) of a request; the grammar is None where none is asked for.

    body: the request.
    form: how tool calls are written in the answer; None where none are read.
    tokenizer: the tokenizer of the model.
    Raises ApiError for a grammar that cannot be enforced, and where two are asked for at once.
    """
    wanted, outputs = body.response_format, body.structured_outputs
    if wanted is not None and wanted.type != "text" and outputs is not None:
        raise ApiError(400, "response_format and structured_outputs mean the same: give one.", "response_format")
    param = "response_format" if outputs is None else "structured_outputs"
    with refusing(param):
        made = _formatted(wanted) if outputs is None else _structured(outputs)
    if form is not None and isinstance(body, ChatRequest):
        if made is not None:
            said = f'{param} is for answers without calls: leave it or tools out, or set tool_choice to "none".'
            raise ApiError(400, said, param)
        made, param = _calls(body, form, tokenizer), "tools"
    if made is not None and body.ignore_eos:
        raise ApiError(400, f"ignore_eos goes on after the end, and {param} has one: leave out either.", "ignore_eos")
    return made, param


def _formatted(wanted: ResponseFormat | None) -> Grammar | None:
    """Return the grammar of a `response_format`; None for one of plain text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar.json_object()
    if wanted.json_schema is None:
        raise ApiError(400, "response_format has no json_schema: give a name and a schema.", "response_format")
    return Grammar.json_schema(wanted.json_schema.of)


def _structured(outputs: StructuredOutputs) -> Grammar:
    """Return the grammar of `structured_outputs`, which must have one field."""
    given = [name for name in type(outputs).model_fields if getattr(outputs, name) is not None]
    if len(given) != 1:
        one = "json, json_object, regex, choice or grammar"
        raise ApiError(400, f"structured_outputs has {len(given)} fields: give one of {one}.", "structured_outputs")
    if outputs.of is not None:
        return Grammar.json_schema(outputs.of)
    if outputs.regex is not None:
        return Grammar.regex(outputs.regex)
    if outputs.choice is not None:
        for number, text in enumerate(outputs.choice, start=1):
            check_text(text, f"Choice {number}")
        return Grammar.regex("|".join(map(re.escape, outputs.choice)))
    return Grammar.json_object() if outputs.grammar is None else Grammar.lark(outputs.grammar)


def _calls(body: ChatRequest, form: CallForm, tokenizer: Tokenizer) -> Grammar | None:
    """Return the grammar of an answer that may have tool calls; None where the model is free.

    There is one where a call is required, where only one call is allowed, and where a function is strict. It holds
    calls to their form and to the functions' names, and to the schemas of functions that must be called or are strict.
    Raises ApiError.
    """
    chosen = body.tool_choice.function.name if isinstance(body.tool_choice, ChosenTool) else None
    forced, single = chosen is not None or body.tool_choice == "required", body.parallel_tool_calls is False
    tools = [(i, tool.function) for i, tool in enumerate(body.tools or ()) if chosen in (None, tool.function.name)]
    if not tools:
        raise ApiError(400, f"tool_choice names {chosen!a}, which is none of the tools.", "tool_choice")
    if not (forced or single or any(function.strict for _, function in tools)):
        return None
    arguments = {f"f{i}": _arguments(function, forced, f"tools.{i}.function.parameters") for i, function in tools}
    with refusing("tools"):
        rules = _rules(form, tools, forced, single or chosen is not None, marks_of(tokenizer))
        return Grammar.lark("\n".join(f"{name}: {rule}" for name, rule in rules.items()), arguments)


def _rules(
    form: CallForm, tools: Sequence[tuple[int, Function]], forced: bool, single: bool, marks: Mapping[str, int]
) -> dict[str, str]:
    """Return the grammar's rules in Lark's form, by name; in them @fi stands for the arguments of tool i.

    tools: (index, function) of each that may be called.
    forced: whether the answer must be a call, or several.
    single: whether it may have only one call.
    marks: what `marks_of` returns. A mark around a call may be written as text or as such a token; all other such
        tokens count as text.
    """
    mark, end = (MARK, END) if form.before else (BEGIN, "")
    tokens = {text: f"<[{token}]>" for text, token in marks.items()}
    calls: list[str] = []
    for i, function in tools:
        head, tail = form.write(function.name, "\0").removeprefix(mark).removesuffix(end).split("\0")
        calls.append(f"{json.dumps(head)} @f{i} {json.dumps(tail)} end")
    if not form.before:
        start = "call" if forced else "call | text"
    elif forced:
        start = "call" if single else 'call ("\\n" call)*'
    else:
        start = "text begin rest | text" if single else "(text begin rest)* text"
    or_mark, or_end = (f" | {tokens[text]}" if text in tokens else "" for text in (mark, end))
    free = not form.before and not forced  # a model that need not call may put white space where it likes
    others = " | ".join(token for text, token in tokens.items() if text not in (mark, end))
    return {
        "start": start,
        "call": "mark rest",
        "mark": f"/{BEGINS}/" if free else json.dumps(mark) + or_mark,
        "begin": "spelled" + or_mark,
        "spelled[lazy]": f"/{ANY}*{re.escape(mark)}/",
        "rest": " | ".join(calls),
        "end": json.dumps(end) + or_end,
        "text": f"FIRST? (({others}) TEXT?)*" if others else "FIRST?",
        "FIRST": f"/{ANY}+/" + ("" if form.before else f" & ~/{BEGINS}{ANY}*/"),
        "TEXT": f"/{ANY}+/",
    }


def _arguments(function: Function, forced: bool, param: str) -> Grammar:
    """Return the grammar of a function's arguments. forced: whether it must be called. param: the field in errors."""
    if not (forced or function.strict):
        return Grammar.json_object()
    if function.parameters is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    else:
        schema = {"type": "object", **function.parameters}
    with refusing(param):
        return Grammar.json_schema(schema)
