"""How an answer writes the tokens whose log probabilities it reports."""

from foretoken.core.errors import ForetokenError
from foretoken.models.text import Tokenizer
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
        known = self._bytes[token] if self._bytes is not None and token < len(self._bytes) else None
        try:
            return self.label(token) if known is None else known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known or b"")
