"""Log probabilities in the two shapes that OpenAI's clients read."""

from collections.abc import Sequence
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.models.text import Tokenizer
from foretoken.serve.jobs import TokenLogprob
from foretoken.trace.page import Labels
from foretoken.vocab.vocabulary import vocabulary

LEAST = -9999.0  # stands for -inf, which JSON lacks


class Spelling:
    """How single tokens are written: as text, in which a sign stands for a part of a character, and as exact bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.label = Labels(tokenizer)
        try:
            self._bytes = vocabulary(tokenizer).tokens
        except ForetokenError:  # a family whose bytes nobody knows: OpenAI's field may be null
            self._bytes = None

    def bytes_of(self, token: int) -> list[int] | None:
        """None where the tokenizer does not tell them; those of its name for a special token."""
        if self._bytes is None:
            return None
        known = self._bytes[token] if token < len(self._bytes) else None
        return list(self.label(token).encode() if known is None else known)

    def name_of(self, token: int) -> str:
        """Its text; of a part of a character, whose text many tokens share, its bytes as OpenAI writes them."""
        known = self._bytes[token] if self._bytes is not None and token < len(self._bytes) else None
        try:
            return self.label(token) if known is None else known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known or b"")


def chat_logprobs(given: Sequence[TokenLogprob], spelling: Spelling) -> dict[str, Any]:
    """Of chat completions: one entry a token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spelling.label(token), "logprob": max(logprob, LEAST), "bytes": spelling.bytes_of(token)}

    content = [{**entry(x.token, x.logprob), "top_logprobs": [entry(*top) for top in x.top]} for x in given]
    return {"content": content, "refusal": None}


def completion_logprobs(given: Sequence[TokenLogprob], spelling: Spelling, offset: int) -> dict[str, Any]:
    """Of completions: lists side by side. offset: characters of the tokens before them."""
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
