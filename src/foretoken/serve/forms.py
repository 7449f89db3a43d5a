"""The two shapes of an answer: chat completions and completions, whole and in chunks."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from foretoken.serve.calls import Call
from foretoken.serve.jobs import TokenLogprob
from foretoken.serve.logprobs import Spelling, chat_logprobs, completion_logprobs


@runtime_checkable
class Form(Protocol):
    """How the choices of an answer are written.

    name, chunk_name: OpenAI's `object`. prefix: of the answer's id.
    """

    name: str
    chunk_name: str
    prefix: str

    def whole(self, text: str, calls: Sequence[Call], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A finished choice."""
        ...

    def opening(self, before: str | None) -> dict[str, Any] | None:
        """The first chunk of a choice, if there is one. before: the text before it; None where it may have no text."""
        ...

    def part(self, text: str, calls: Sequence[Call], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A chunk of a choice; the last one's text is empty."""
        ...

    def logprobs(self, given: Sequence[TokenLogprob], spelling: Spelling, offset: int) -> dict[str, Any]:
        """offset: characters of the tokens before these."""
        ...


class ChatForm:
    """/v1/chat/completions."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def whole(self, text: str, calls: Sequence[Call], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {"message": message, "logprobs": logprobs}

    def opening(self, before: str | None) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": before}, "logprobs": None}

    def part(self, text: str, calls: Sequence[Call], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in calls]
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, given: Sequence[TokenLogprob], spelling: Spelling, offset: int) -> dict[str, Any]:
        return chat_logprobs(given, spelling)


class CompletionForm:
    """/v1/completions."""

    name = chunk_name = "text_completion"
    prefix = "cmpl-"

    def whole(self, text: str, calls: Sequence[Call], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    def opening(self, before: str | None) -> dict[str, Any] | None:
        return {"text": before, "logprobs": None} if before else None

    def part(self, text: str, calls: Sequence[Call], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    def logprobs(self, given: Sequence[TokenLogprob], spelling: Spelling, offset: int) -> dict[str, Any]:
        return completion_logprobs(given, spelling, offset)


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


CHAT, COMPLETION = ChatForm(), CompletionForm()
