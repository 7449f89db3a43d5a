"""What a request wants its text to be, as a grammar: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

import re

from foretoken.core.errors import ForetokenError
from foretoken.models.grammar import Grammar
from foretoken.serve.errors import ApiError
from foretoken.serve.schema import ResponseFormat, Sampled, StructuredOutputs


def grammar_of(body: Sampled) -> Grammar | None:
    """The grammar of a request; None where it asks for none.

    Raises ApiError for one that cannot be enforced, or two at once.
    """
    wanted, outputs = body.response_format, body.structured_outputs
    if wanted is not None and wanted.type != "text" and outputs is not None:
        raise ApiError(400, "response_format and structured_outputs mean the same: give one.", "response_format")
    param = grammar_field(body)
    try:
        made = _formatted(wanted) if outputs is None else _structured(outputs)
    except ForetokenError as error:
        raise ApiError(400, str(error), param) from error
    if made is not None and body.ignore_eos:
        raise ApiError(400, f"ignore_eos goes on after the end, and {param} has one: leave out either.", "ignore_eos")
    return made


def grammar_field(body: Sampled) -> str:
    """The field by which a request asks for a grammar, if it does."""
    return "response_format" if body.structured_outputs is None else "structured_outputs"


def _formatted(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar.json_object()
    if wanted.json_schema is None:
        raise ApiError(400, "response_format has no json_schema: give a name and a schema.", "response_format")
    return Grammar.json_schema(wanted.json_schema.of)


def _structured(outputs: StructuredOutputs) -> Grammar:
    given = [name for name in type(outputs).model_fields if getattr(outputs, name) is not None]
    if len(given) != 1:
        one = "json, json_object, regex, choice or grammar"
        raise ApiError(400, f"structured_outputs has {len(given)} fields: give one of {one}.", "structured_outputs")
    if outputs.of is not None:
        return Grammar.json_schema(outputs.of)
    if outputs.regex is not None:
        return Grammar.regex(outputs.regex)
    if outputs.choice is not None:
        return Grammar.regex("|".join(map(re.escape, outputs.choice)))
    return Grammar.json_object() if outputs.grammar is None else Grammar.lark(outputs.grammar)
