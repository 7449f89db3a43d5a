"""The prompts that a command is given: on the command line, on stdin, or in a file of many."""

import json
import sys
from typing import Any

from foretoken.cli import options
from foretoken.core.errors import ForetokenError
from foretoken.core.files import read_text
from foretoken.core.messages import Message, check_messages, check_text

Prompt = str | list[Message]  # a text to continue, or a conversation to answer
ONE = "The conversation"  # what errors call the only one


def given(
    prompt: str | None, batch_file: str | None, is_demo: bool, chat: bool, system: str | None
) -> dict[str, Prompt]:
    """Return the prompts of `foretoken generate`, checked, by what errors call them; this imports no torch.

    prompt: a text; "-" reads it from stdin; None takes the demo prompt if the target `is_demo`, unless `chat`.
    batch_file: a JSONL file of many prompts, in place of `prompt`; "-" reads it from stdin.
    chat: whether a text is a user's message, to be answered.
    system: the system message before it, if any.
    Raises ForetokenError where there is no prompt, or one that cannot be used.
    """
    if batch_file is not None:
        if prompt is not None:
            raise ForetokenError("Both a prompt and --batch-file were given: give one of them.")
        prompts = read_batch(batch_file)
    elif prompt is not None:
        prompts: dict[str, Prompt] = {ONE: _stdin("prompt") if prompt == "-" else prompt}
    elif not is_demo or chat:
        raise ForetokenError("No prompt was given: write one, or - to read it from stdin.")
    else:
        text = options.heldout_prompts()[0]["prompt"]
        last = text.rstrip("\n").rsplit("\n", 1)[-1].strip()
        print(f"foretoken: no prompt named; the text begins with a demo prompt, up to {last!r}.\n", file=sys.stderr)
        prompts = {ONE: text}
    check_prompts([] if chat else list(prompts.values()))
    return {which: _asked(each, system) if chat else each for which, each in prompts.items()}


def check_prompts(prompts: list[Prompt]) -> None:
    """Refuse, before models are loaded, `prompts` that are empty or are not valid text."""
    for number, prompt in enumerate(prompts, start=1):
        which = f"Prompt {number}" if len(prompts) > 1 else "The prompt"
        if not prompt:
            raise ForetokenError(f"{which} is empty: give at least one token.")
        if isinstance(prompt, str):
            check_text(prompt, which)


def system_message(text: str | None) -> list[Message]:
    """Return a conversation of one system message that says `text`; an empty one without a text."""
    if text is not None:
        check_text(text, "The system message")
    return [{"role": "system", "content": text}] if text else []


def _asked(prompt: Prompt, system: str | None) -> list[Message]:
    """Return a prompt as a conversation, which begins with the system message unless it has one of its own."""
    if isinstance(prompt, str):
        check_text(prompt, "The prompt")
        prompt = [{"role": "user", "content": prompt}]
    return prompt if prompt[0]["role"] == "system" else [*system_message(system), *prompt]


def _stdin(what: str) -> str:
    """Return the text on stdin; what: what the errors call it."""
    if sys.stdin is None:
        raise ForetokenError(f"The {what} is - and stdin is closed: name the {what} itself, or open stdin.")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ForetokenError(f"The {what} on stdin is not UTF-8: {error.reason} at byte {error.start + 1}.") from None


def read_batch(path: str) -> dict[str, Prompt]:
    """Return the prompts of the JSONL file `path`, of stdin where that is "-", by what errors call them.

    Each line is {"prompt": "..."}, {"messages": [...]}, or a text by itself, as a JSON string.
    """
    if path == "-":
        text, path = _stdin("batch file").removeprefix("\ufeff"), "stdin"
    else:
        text = read_text(path, "batch file", "utf-8-sig")  # with the mark that some editors put first
    lines = [(f"{i} of {path}", line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    prompts = {f"The conversation of line {at}": _prompt_of(line, at) for at, line in lines}
    if not prompts:
        raise ForetokenError(f"Batch file {path} has no prompts.")
    return prompts


def _prompt_of(line: str, at: str) -> Prompt:
    """Return the prompt of a line of a file. at: its number and file for errors, such as "2 of FILE"."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    given: Any = record if isinstance(record, dict) else {"prompt": record}
    if "messages" in given and "prompt" not in given:
        check_messages(given["messages"], f"The conversation of line {at}")
        return given["messages"]
    prompt = None if "messages" in given else given.get("prompt")
    if not isinstance(prompt, str):
        raise ForetokenError(
            f'Line {at} is not a prompt: write {{"prompt": "..."}} or {{"messages": [...]}} on each line.'
        )
    check_text(prompt, f"The prompt of line {at}")
    return prompt
