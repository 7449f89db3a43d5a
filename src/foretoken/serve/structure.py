"""The grammar that a request holds its texts to: by OpenAI's `response_format` and `tools`, or vLLM's
`structured_outputs`."""

import json
import re
from collections.abc import Mapping, Sequence

from foretoken.core.messages import check_text
from foretoken.models.grammar import Grammar, marks_of
from foretoken.models.text import Tokenizer
from foretoken.serve.calls import BEGIN, BEGINS, END, FENCE, LANGUAGE, MARK, SPACE, CallForm
from foretoken.serve.errors import ApiError, refusing
from foretoken.serve.schema import ChatRequest, ChosenTool, Function, ResponseFormat, Sampled, StructuredOutputs

ANY = r"(.|\n)"  # any character, as a regular expression
OPENING = f"{SPACE}{FENCE}({SPACE}{LANGUAGE})?"  # the beginning of a fence, likewise


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
        if outputs is not None:
            said = f'{param} is for answers without calls: leave it or tools out, or set tool_choice to "none".'
            raise ApiError(400, said, param)
        made, param = _calls(body, form, tokenizer, made), "tools"
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


def _calls(body: ChatRequest, form: CallForm, tokenizer: Tokenizer, answer: Grammar | None) -> Grammar | None:
    """Return the grammar of an answer that may have tool calls; None where the model is free.

    There is one where a call is required, where only one call is allowed, where a function is strict, and where the
    text has a grammar. It holds calls to their form and to the functions' names, and to the schemas of functions that
    must be called or are strict.

    body, form, tokenizer: as for `grammar_of`.
    answer: the grammar of an answer without calls, None where it is free; it counts for nothing where a call must come.
    Raises ApiError.
    """
    chosen = body.tool_choice.function.name if isinstance(body.tool_choice, ChosenTool) else None
    forced, single = chosen is not None or body.tool_choice == "required", body.parallel_tool_calls is False
    tools = [(i, tool.function) for i, tool in enumerate(body.tools or ()) if chosen in (None, tool.function.name)]
    if not tools:
        raise ApiError(400, f"tool_choice names {chosen!a}, which is none of the tools.", "tool_choice")
    held = None if forced else answer
    if not (forced or single or held is not None or any(function.strict for _, function in tools)):
        return None
    parts = {f"f{i}": _arguments(function, forced, f"tools.{i}.function.parameters") for i, function in tools}
    if held is not None:
        parts["answer"] = held
    with refusing("tools"):
        rules = _rules(form, tools, forced, single or chosen is not None, held is not None, marks_of(tokenizer))
        return Grammar.lark("\n".join(f"{name}: {rule}" for name, rule in rules.items()), parts)


def _rules(
    form: CallForm,
    tools: Sequence[tuple[int, Function]],
    forced: bool,
    single: bool,
    answered: bool,
    marks: Mapping[str, int],
) -> dict[str, str]:
    """Return the grammar's rules in Lark's form, by name; in them @fi stands for the arguments of tool i.

    tools: (index, function) of each that may be called.
    forced: whether the answer must be a call, or several.
    single: whether it may have only one call.
    answered: whether an answer without calls is held to a grammar, @answer.
    marks: what `marks_of` returns. A mark around a call may be written as text or as such a token; all other such
        tokens count as text.
    """
    mark, end = (MARK, END) if form.before else (BEGIN, "")
    tokens = {text: f"<[{token}]>" for text, token in marks.items()}
    calls: list[str] = []
    for i, function in tools:
        head, tail = form.write(function.name, "\0").removeprefix(mark).removesuffix(end).split("\0")
        calls.append(f"{json.dumps(head)} @f{i} {json.dumps(tail)} end")
    if answered:
        start = "objects | @answer" + (" | calls" if form.before else "")
    elif forced:
        start = "calls"
    elif form.before:
        start = "text begin rest | text" if single else "(text begin rest)* text"
        start += " | plain | fenced" if form.names else ""
    else:
        start = "call | text"
    free = start == "call | text"  # a model that need not call may put white space where it likes
    or_mark, or_end = (f" | {tokens[text]}" if text in tokens else "" for text in (mark, end))
    others = " | ".join(token for text, token in tokens.items() if text not in (mark, end))
    heads = "|".join(_head(form, function) for _, function in tools)
    begins = f"({OPENING})?({heads})" if form.before else BEGINS
    but = f" & ~/{begins}{ANY}*/" if form.names or not form.before else ""  # what begins as a call is no text
    return {
        "start": start,
        "calls": "call" if single or not form.before else 'call ("\\n" call)*',
        "call": "mark rest",
        "mark": f"/{BEGINS}/" if free else json.dumps(mark) + or_mark,
        "begin": "spelled" + or_mark,
        "spelled[lazy]": "SPELLED",
        "SPELLED": f"/{ANY}*{re.escape(mark)}/{but}",
        "rest": " | ".join(calls),
        "end": json.dumps(end) + or_end,
        "text": f"FIRST? (({others}) TEXT?)*" if others else "FIRST?",
        "FIRST": f"/{ANY}+/{but}",
        "TEXT": f"/{ANY}+/",
        **(_objects(form, tools, single) if answered else _unmarked(form, tools, single) if form.names else {}),
    }


def _objects(form: CallForm, tools: Sequence[tuple[int, Function]], single: bool) -> dict[str, str]:
    """Return the rules of calls without marks beside @answer: their tokens are those of JSON, as @answer's are."""
    found: list[str] = []
    for i, function in tools:
        tokens = [token + " " * (token in ",:") for token in form.head(function.name)]
        found.append(" ".join(map(json.dumps, tokens)) + f' @f{i} "}}"')
    more = "" if single or not form.before else ' ("\\n" object)*'
    return {"objects": f"object{more}", "object": " | ".join(found)}


def _unmarked(form: CallForm, tools: Sequence[tuple[int, Function]], single: bool) -> dict[str, str]:
    """Return the rules of calls without marks beside free text, which may not begin as they do."""
    heads = {f"HEAD{i}": f"/{_head(form, function)}{SPACE}/" for i, function in tools}
    fenced = {f"FENCED{i}": f"/{OPENING}{_head(form, function)}{SPACE}/" for i, function in tools}
    return {
        "plain": ("one" if single else "one+") + " WHITE?",
        "fenced": "first SHUT" if single else "(first one* SHUT)+",
        "one": " | ".join(f"HEAD{i} @f{i} CLOSE" for i, _ in tools),
        "first": " | ".join(f"FENCED{i} @f{i} CLOSE" for i, _ in tools),
        **heads,
        **fenced,
        "CLOSE": f"/{SPACE}\\}}/",
        "SHUT": f"/{SPACE}{FENCE}{SPACE}/",
        "WHITE": "/[ \\t\\n\\r]+/",
    }


def _head(form: CallForm, function: Function) -> str:
    """Return the regular expression of a call of `function` up to its arguments."""
    return "".join(SPACE + re.escape(token) for token in form.head(function.name))


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
