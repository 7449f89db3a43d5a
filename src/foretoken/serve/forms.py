"""The two shapes of an answer: chat completions and completions, whole and in chunks.

Both have the same methods:

whole: a finished choice.
opening: the first chunk of a choice, if there is one; `before` is the text before it, None where it may have no text.
part: a chunk of a choice; the last one's text is empty.
logprobs: of some tokens; `offset` is the number of characters of the tokens before them.

name, chunk_name: OpenAI's `object`. prefix: of the answer's id.
"""

from collections.abc import Sequence
from typing import Any

from foretoken.serve.calls import Call
from foretoken.serve.jobs import TokenLogprob
from foretoken.serve.logprobs import LEAST, Spelling


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
        """One entry a token."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": spelling.label(token), "logprob": max(logprob, LEAST), "bytes": spelling.bytes_of(token)}

        content = [{**entry(x.token, x.logprob), "top_logprobs": [entry(*top) for top in x.top]} for x in given]
        return {"content": content, "refusal": None}


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
        """Lists side by side."""
        offsets: list[int] = []
        for x in given:
            offsets.append(offset)
            offset += len(spelling.label(x.token))
        return {
            "tokens": [spelling.name_of(x.token) for x in given],
            "token_logprobs": [max(x.logprob, LEAST) for x in given],
            "top_logprobs": [{spelling.name_of(token): max(logprob, LEAST) for token, logprob in x.top} for x in given],
            "text_offset": offsets,
        }


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


Form = ChatForm | CompletionForm
CHAT, COMPLETION = ChatForm(), CompletionForm()
