"""The two shapes of an answer: chat completions and completions, whole and in chunks."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

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

    def whole(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A finished choice."""
        ...

    def opening(self, echoed: str) -> dict[str, Any] | None:
        """The first chunk of a choice, if there is one. echoed: the text before it."""
        ...

    def part(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
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

    def whole(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}

    def opening(self, echoed: str) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}, "logprobs": logprobs}

    def logprobs(self, given: Sequence[TokenLogprob], spelling: Spelling, offset: int) -> dict[str, Any]:
        return chat_logprobs(given, spelling)


class CompletionForm:
    """/v1/completions."""

    name = chunk_name = "text_completion"
    prefix = "cmpl-"

    def whole(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    def opening(self, echoed: str) -> dict[str, Any] | None:
        return {"text": echoed, "logprobs": None} if echoed else None

    def part(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    def logprobs(self, given: Sequence[TokenLogprob], spelling: Spelling, offset: int) -> dict[str, Any]:
        return completion_logprobs(given, spelling, offset)


CHAT, COMPLETION = ChatForm(), CompletionForm()
