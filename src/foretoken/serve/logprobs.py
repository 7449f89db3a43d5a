"""How an answer writes single tokens beside their log probabilities."""

from foretoken.core.errors import ForetokenError
from foretoken.models.text import Tokenizer
from foretoken.trace.page import labels_of
from foretoken.vocab.vocabulary import vocabulary

LEAST = -9999.0  # stands for -inf, which JSON lacks


class Spelling:
    """How single tokens are written: as text, in which a sign stands for a part of a character, and as exact bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.label = labels_of(tokenizer)
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
