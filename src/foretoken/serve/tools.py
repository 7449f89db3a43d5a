"""The tools that a request offers: what the chat template can do with them, and how the answer's calls are read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.models.text import ANSWER, Tokenizer, rendered
from foretoken.serve.calls import HERMES, LLAMA, CallForm
from foretoken.serve.errors import ApiError
from foretoken.serve.schema import ChatMessage, ChatRequest, Tool

PROBE = "foretoken_probe"  # stands for a function where a template is asked what it writes
OFFERED = [{"type": "function", "function": {"name": PROBE, "description": "", "parameters": {"type": "object"}}}]
ASKED = [{"role": "user", "content": "0"}]
CALL = {"id": "probe0000", "type": "function", "function": {"name": PROBE, "arguments": {"x": 1}}}
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
RESULT = {"role": "tool", "content": ANSWER, "tool_call_id": "probe0000", "name": PROBE}


@dataclass(frozen=True)
class ToolUse:
    """What a chat template can do with tools, found by what it writes for a probe.

    Where it fails on a probe, nothing is assumed: its error is reported when a request makes it fail.

    takes: whether it writes the tools.
    drops_calls, drops_results: whether it leaves out the calls of earlier answers, and their results.
    form: how it writes a call; None where it writes none, or in a form that is not known here.
    """

    takes: bool
    drops_calls: bool
    drops_results: bool
    form: CallForm | None


def tool_use(tokenizer: Tokenizer) -> ToolUse:
    """Return what the chat template of a tokenizer can do with tools; without a template, nothing."""
    takes = PROBE in (rendered(tokenizer, ASKED, OFFERED) or "")
    calls, results = rendered(tokenizer, CALLED), rendered(tokenizer, [*CALLED, RESULT])
    return ToolUse(
        takes,
        calls is not None and PROBE not in calls,
        results is not None and ANSWER not in results,
        _form(tokenizer) if takes else None,
    )


def _form(tokenizer: Tokenizer) -> CallForm | None:
    """Return the form in which the chat template writes calls, None where it is none of those that are known."""
    called = rendered(tokenizer, CALLED, OFFERED) or ""
    for form in (HERMES, LLAMA):
        call = form.write(PROBE, '{"x": 1}')
        begun = "" if form.before else rendered(tokenizer, ASKED, OFFERED, prompt=True)
        if begun is None or begun + call not in called:
            continue
        ids = tokenizer(call, add_special_tokens=False)["input_ids"]
        if call in tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
            return form
    return None


def check_history(messages: Sequence[ChatMessage], use: ToolUse) -> None:
    """Raise ApiError for messages that the chat template would leave out. use: what it can do with tools."""
    for i, message in enumerate(messages):
        for param, dropped in (
            (f"messages.{i}.tool_calls", bool(message.tool_calls) and use.drops_calls),
            (f"messages.{i}.role", message.role == "tool" and use.drops_results),
        ):
            if dropped:
                raise ApiError(400, f"{param}: this model's chat template leaves out calls or their results.", param)


def for_template(tools: Sequence[Tool] | None, use: ToolUse) -> list[dict[str, Any]] | None:
    """Return the tools of a request as chat templates take them; None where it has none.

    use: what the template can do with tools.
    Raises ApiError where the template would leave them out, or they are not what they must be.
    """
    if tools is None:
        return None
    if not use.takes:
        said = "tools cannot be used with this model: its chat template does not write them. Leave them out."
        raise ApiError(400, said, "tools", "unsupported_parameter")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools has two functions of one name: give each a name of its own.", "tools")
    for i, tool in enumerate(tools):
        if (tool.function.parameters or {}).get("type", "object") != "object":
            param = f"tools.{i}.function.parameters"
            raise ApiError(400, f"{param} must be the JSON schema of an object.", param)
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


def wanted_form(body: ChatRequest, use: ToolUse) -> CallForm | None:
    """Return the form in which calls are read in the answer; None where none are read.

    body: the request.
    use: what the chat template can do with tools.
    Raises ApiError for fields that do not go together, and where the template writes calls in an unknown form.
    """
    if body.tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(body, name) not in (None, "none"):
                raise ApiError(400, f"{name} is for tools: give some, or leave it out.", name)
    if body.tools is None or body.tool_choice == "none":
        return None
    if use.takes and use.form is None:
        said = (
            'tools cannot be used with this model but with tool_choice "none": its chat template writes calls in a '
            "form that this server does not support."
        )
        raise ApiError(400, said, "tools", "unsupported_parameter")
    if use.form is None or not use.form.before or body.tool_choice not in (None, "auto"):
        return use.form
    alone = body.response_format is not None and body.response_format.type != "text"
    return replace(use.form, names=frozenset(tool.function.name for tool in body.tools), alone=alone)
