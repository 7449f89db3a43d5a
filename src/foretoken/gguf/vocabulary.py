"""What a GGUF file says of its tokens: their texts and types, and which of them begin, end, fill or stand for text."""

from dataclasses import dataclass

from gguf import TokenType

from foretoken.core.errors import ForetokenError
from foretoken.gguf.reader import Reader

# Tokens that end a text or a turn in the chat formats of these models; llama.cpp stops at them too. Those in CERTAIN do
# so whatever type the file gives them, since some converters mark them as ordinary text; the others only where the file
# marks them as control tokens, since Gemma has </s> as an HTML tag.
CERTAIN = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>")
END_TOKENS = (*CERTAIN, "<eos>", "</s>")
SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding")
OF_SENTENCEPIECE = {"bos": 1, "eos": 2, "unknown": 0}  # ids where a file with such a tokenizer names no token


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file.

    tokens: their texts by id, as the file spells them.
    types: constants of gguf.TokenType, likewise; a token that ends a turn is a control token, whatever the file says.
    special: the ids of those among SPECIAL that the file names and has.
    """

    tokens: list[str]
    types: list[int]
    special: dict[str, int]

    @property
    def ends(self) -> list[int]:
        """The ids of all tokens that end a text: the file's own, then those of known chat formats."""
        control = {token: i for i, token in enumerate(self.tokens) if self.types[i] == TokenType.CONTROL}
        own = [self.special[name] for name in ("eos", "eot", "eom") if name in self.special]
        return list(dict.fromkeys([*own, *(control[token] for token in END_TOKENS if token in control)]))


def vocabulary_of(reader: Reader) -> Vocabulary:
    """Return the tokens of the file in `reader`; there are none where the file has no vocabulary.

    Raises ForetokenError where the file does not have a type for each token.
    """
    tokens: list[str] = reader.metadata("tokenizer.ggml.tokens", [])
    types: list[int] = reader.metadata("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ForetokenError(
            f"The GGUF file has {len(tokens)} tokens and the types of {len(types)}: it is damaged, get it again."
        )
    usual = OF_SENTENCEPIECE if reader.metadata("tokenizer.ggml.model") == "llama" else {}
    special: dict[str, int] = {}
    for name in SPECIAL:
        named = (reader.metadata(f"tokenizer.ggml.{name}_token_id"), usual.get(name))
        known = [index for index in named if index is not None and 0 <= index < len(tokens)]
        if known:
            special[name] = known[0]
    types = [TokenType.CONTROL if token in CERTAIN else type_ for token, type_ in zip(tokens, types, strict=True)]
    return Vocabulary(tokens, types, special)
