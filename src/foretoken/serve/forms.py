"""The two shapes of an answer, chat completions and completions, and how both write single tokens."""

from collections.abc import Sequence
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.models.text import Tokenizer
from foretoken.serve.calls import Call
from foretoken.serve.jobs import TokenLogprob
from foretoken.trace.page import labels_of
from foretoken.vocab.vocabulary import vocabulary

LEAST = -9999.0  # stands for -inf, which JSON lacks


class Spelling:
    """How single tokens are written: as text, in which a sign stands for a part of a character, and as exact bytes.

    tokenizer: the tokenizer of the model.
    label: returns the text of a token id.
    silent: ids of special tokens, which leave no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.label = labels_of(tokenizer)
        self.silent = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        try:
            self._bytes = vocabulary(tokenizer).tokens
        except ForetokenError:  # a kind of tokenizer that hides the bytes of its tokens: OpenAI's field may be null
            self._bytes = None

    def bytes_of(self, token: int) -> list[int] | None:
        """Return the bytes of a token; those of its label for a special token, None where the tokenizer hides them.

        token: its id.
        """
        if self._bytes is None:
            return None
        known = self._bytes[token] if token < len(self._bytes) else None
        return list(self.label(token).encode() if known is None else known)

    def name_of(self, token: int) -> str:
        """Return the text of a token; for a part of a character, whose text many tokens share, "bytes:" and its bytes.

        token: its id.
        """
        known = self.bytes_of(token)
        try:
            return self.label(token) if known is None else bytes(known).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known or ())


class ChatForm:
    """The form of the answers of /v1/chat/completions, whole and in chunks.

    name, chunk_name: OpenAI's `object`, of a whole answer and of a chunk.
    prefix: what the answer's id begins with.
    """

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def whole(self, text: str, calls: Sequence[Call], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return a finished choice as JSON, without its index and finish reason.

        text: its text, without calls.
        calls: its tool calls.
        logprobs: what `logprobs` returns for its tokens; None where the request does not ask for them.
        """
        message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {"message": message, "logprobs": logprobs}

    def opening(self, before: str | None) -> dict[str, Any] | None:
        """Return the first chunk of a choice, before any of its tokens; None where this form has none.

        before: text that stands before the choice's own, such as the prompt; None where the choice may be calls alone.
        """
        return {"delta": {"role": "assistant", "content": before}, "logprobs": None}

    def part(self, text: str, calls: Sequence[Call], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return a chunk of a choice as JSON, without its index and finish reason.

        text: what it adds to the choice's text; the last chunk of a choice adds nothing.
        calls: the tool calls that it adds.
        logprobs: what `logprobs` returns for its tokens; None where the request does not ask for them.
        """
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in calls]
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, given: Sequence[TokenLogprob], spelling: Spelling, offsets: Sequence[int]) -> dict[str, Any]:
        """Return log probabilities as JSON.

        given: the log probabilities of each token.
        spelling: how single tokens are written.
        offsets: the number of characters of the choice's text before each token.
        """

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            assert logprob is not None  # it is of the answer
            return {"token": spelling.label(token), "logprob": max(logprob, LEAST), "bytes": spelling.bytes_of(token)}

        content = [{**entry(x.token, x.logprob), "top_logprobs": [entry(*top) for top in x.top]} for x in given]
        return {"content": content, "refusal": None}


class CompletionForm:
    """The form of the answers of /v1/completions, with the methods and fields of `ChatForm`."""

    name = chunk_name = "text_completion"
    prefix = "cmpl-"

    def whole(self, text: str, calls: Sequence[Call], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    part = whole

    def opening(self, before: str | None) -> dict[str, Any] | None:
        return {"text": before, "logprobs": None} if before else None

    def logprobs(self, given: Sequence[TokenLogprob], spelling: Spelling, offsets: Sequence[int]) -> dict[str, Any]:
        """Return lists with one entry per token; the token itself is always among the top ones."""

        def top(x: TokenLogprob) -> dict[str, float] | None:
            if x.logprob is None:
                return None
            pairs = (*x.top, (x.token, x.logprob)) if x.top else ()
            return {spelling.name_of(token): max(logprob, LEAST) for token, logprob in pairs}

        return {
            "tokens": [spelling.name_of(x.token) for x in given],
            "token_logprobs": [None if x.logprob is None else max(x.logprob, LEAST) for x in given],
            "top_logprobs": [top(x) for x in given],
            "text_offset": list(offsets),
        }


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


Form = ChatForm | CompletionForm
CHAT, COMPLETION = ChatForm(), CompletionForm()
