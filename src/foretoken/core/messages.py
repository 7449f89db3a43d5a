"""Checks of texts and conversations that a user gives; they need no torch and no tokenizer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.core.errors import ForetokenError

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, and what else the chat template reads
SHAPE = '{"role": "user", "content": "..."}'
CALL = '{"type": "function", "id": "...", "function": {"name": "...", "arguments": "{...}"}}'


def check_text(text: str, which: str) -> None:
    """Refuse a text with lone surrogates, by which Python keeps bytes that are not UTF-8, and half characters.

    text: the text.
    which: what the error calls it, such as "The prompt".

    Raises ForetokenError.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ForetokenError(
            f"{which} is not valid Unicode: character {error.start + 1} is the lone surrogate "
            f"U+{ord(text[error.start]):04X}, which stands for a byte that is not UTF-8 or for half a character; "
            "remove it, or convert the text to UTF-8."
        ) from None


def check_messages(messages: object, which: str = "The conversation") -> None:
    """Refuse what is no list of messages, each with a text as role and a text as content.

    messages: what was given. An assistant's message may have `tool_calls` in OpenAI's form instead of, or beside, its
        content.
    which: what the error calls it.

    Raises ForetokenError.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes, bytearray)):
        raise ForetokenError(f"{which} is a {type(messages).__name__}: give a list of messages, {SHAPE} each.")
    if not messages:
        raise ForetokenError(f"{which} is empty: give at least one message, {SHAPE}.")
    for number, message in enumerate(messages, start=1):
        name = f"Message {number} of {which[0].lower()}{which[1:]}"
        if not isinstance(message, Mapping):
            raise ForetokenError(f"{name} is a {type(message).__name__}: write {SHAPE}.")
        calls = message.get("tool_calls")
        if calls is not None:
            _check_calls(calls, message.get("role"), name)
        for key in ("role", "content"):
            if key == "content" and calls and message.get(key) is None:
                continue
            if key not in message:
                raise ForetokenError(f"{name} has no {key}: write {SHAPE}.")
            if not isinstance(message[key], str):
                raise ForetokenError(f"The {key} of {name[0].lower()}{name[1:]} is no text: write {SHAPE}.")
            check_text(message[key], f"The {key} of {name[0].lower()}{name[1:]}")


def call_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tool call as a dict.

    function: the call's `function`; its `arguments` are a dict, or in OpenAI's form JSON text, which may be empty.

    Raises ValueError for arguments that are no JSON object.
    """
    given = function.get("arguments")
    read = (json.loads(given) if given else {}) if isinstance(given, str) else given
    if not isinstance(read, Mapping):
        raise ValueError("they are no object")
    return dict(read)


def as_templates_read(message: Message, template: str) -> dict[str, Any]:
    """Return a message as chat templates expect it: the arguments of calls as dicts, and a missing content as "".

    A developer's message, which most templates would drop, becomes the system's if the template does not name the role.

    message: one that `check_messages` accepts.
    template: the source of the chat template.
    """
    read = {"content": "", **{key: value for key, value in message.items() if value is not None}}
    if read["role"] == "developer" and "developer" not in template:
        read["role"] = "system"
    if calls := read.get("tool_calls"):
        read["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": call_arguments(call["function"])}} for call in calls
        ]
    return read


def _check_calls(calls: object, role: object, name: str) -> None:
    """Refuse tool calls that no template could write; role, name: the message's role, and what the error calls it."""
    if role != "assistant":
        raise ForetokenError(f"{name} has tool_calls, which only the assistant's messages may have: leave them out.")
    for number, call in enumerate(calls if isinstance(calls, Sequence) else [calls], start=1):
        which = f"call {number} of {name[0].lower()}{name[1:]}"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ForetokenError(f"C{which[1:]} has no function with a name: write {CALL}.")
        try:
            call_arguments(function)
        except (ValueError, RecursionError) as error:
            raise ForetokenError(f"The arguments of {which} are not those of a call ({error}): write {CALL}.") from None


def is_conversation(prompt: object) -> bool:
    """Whether `prompt` is meant as a list of messages: a sequence that begins with a mapping, well formed or not."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
