"""What a GGUF file says of its tokens, and the transformers tokenizer that is made of it, with its chat template."""

import re
from dataclasses import dataclass
from typing import cast

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from foretoken.core.errors import ForetokenError
from foretoken.gguf.reader import Reader
from foretoken.gguf.words import WORDS

SPACE = "▁"  # how SentencePiece writes a space
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's special tokens that do not swallow white space behind them
# Tokens that end a text or a turn in the chat formats of these models; llama.cpp stops at them too. Those in CERTAIN do
# so whatever type the file gives them, since some converters mark them as ordinary text; the others only where the file
# marks them as control tokens, since Gemma has </s> as an HTML tag.
CERTAIN = (
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>",
    "<end_of_utterance>",
)  # fmt: skip
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


def gguf_tokenizer(reader: Reader) -> PreTrainedTokenizerFast:
    """Return the tokenizer in the file of `reader`.

    Tokens that the file marks as unused (padding of the embedding matrix) are not in it.
    Raises ForetokenError for a kind of tokenizer, or a way of cutting text into words, that is not known, and for a
    description that is incomplete.
    """
    try:
        return _described(reader)
    except ForetokenError:
        raise
    except Exception as error:  # the tokenizers library raises no class of its own
        raise ForetokenError(f"The GGUF file does not describe its tokenizer ({error}): get it again.") from error


def _described(reader: Reader) -> PreTrainedTokenizerFast:
    kind = reader.metadata("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ForetokenError(
            "The GGUF file has no tokenizer: it is not whole, get it again."
            if kind is None
            else f"The GGUF file's tokenizer ({kind}) is not supported: it must be gpt2 or llama."
        )
    found = vocabulary_of(reader)
    tokens = found.tokens
    if not tokens:
        raise ForetokenError("The GGUF file has no vocabulary: it is not whole, get it again.")
    if kind == "llama":  # runs of spaces as SentencePiece spells them, which the file does not do
        tokens = [SPACE * len(token) if token.isspace() and token.strip(" ") == "" else token for token in tokens]
    known = [(token, index, type_) for index, (token, type_) in enumerate(zip(tokens, found.types, strict=True))]
    vocabulary = {token: index for token, index, type_ in known if type_ != TokenType.UNUSED}
    if kind == "gpt2":
        tokenizer = _byte_level(reader, vocabulary)
    else:
        whole = {token for token, _, type_ in known if type_ == TokenType.USER_DEFINED}
        unknown = tokens[found.special.get("unknown", 0)]
        tokenizer = _sentencepiece(reader, vocabulary, whole, unknown)
    names = {
        name: tokens[found.special[key]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if key in found.special
    }
    phi3 = reader.metadata("general.architecture") == "phi3"
    marked: dict[int, bool] = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}  # whether it is special
    tokenizer.add_tokens(
        [
            AddedToken(token, special=special, normalized=False, rstrip=phi3 and special and token not in UNSTRIPPED)
            for token, _, type_ in known
            if (special := marked.get(type_)) is not None
        ]
    )
    # A token that the file adds behind texts (add_eos_token) is for whole ones, as embedding models read them, and for
    # training: text goes on behind a prompt.
    begins = kind == "llama" or WORDS[reader.metadata("tokenizer.ggml.pre")].begins
    if (bos := names.get("bos")) is not None and reader.metadata("tokenizer.ggml.add_bos_token", begins):
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, found.special["bos"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_templates(reader),
        model_max_length=reader.of_model("context_length", 1 << 30),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in names.items()},
    )


def _templates(reader: Reader) -> str | dict[str, str] | None:
    """Return the chat template in the file, or the templates by name where some have names; None where it has none."""
    texts = {"default": reader.metadata("tokenizer.chat_template")}
    for key in reader.fields:
        if named := re.fullmatch(r"tokenizer\.chat_template\.([\w-]{1,64})", key, re.ASCII):  # such as tool_use
            texts[named[1]] = reader.metadata(key)
    texts = {name: text for name, text in texts.items() if isinstance(text, str) and text}
    return texts.get("default") if texts.keys() <= {"default"} else texts


def _byte_level(reader: Reader, vocabulary: dict[str, int]) -> Tokenizer:
    """Return a byte-level BPE tokenizer (GPT-2's).

    The file has the merges, and a name for the way in which text is cut into words, see words.py.
    """
    if not (lines := reader.metadata("tokenizer.ggml.merges")):
        raise ForetokenError("The GGUF file does not describe its tokenizer (it has no merges): get it again.")
    merges = [cast(tuple[str, str], tuple(merge.split(" "))) for merge in lines]
    name = reader.metadata("tokenizer.ggml.pre")
    if name not in WORDS:
        raise ForetokenError(
            f"The GGUF file cuts text into words in a way ({name}) that is not known: it must be one of "
            f"{', '.join(WORDS)}."
            if name is not None
            else "The GGUF file does not say how it cuts text into words, like files of before May 2024: get a newer "
            "one."
        )
    words = WORDS[name]
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=words.whole))
    if words.composed:
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = words.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _sentencepiece(reader: Reader, vocabulary: dict[str, int], whole: set[str], unknown: str) -> Tokenizer:
    """Return SentencePiece's BPE tokenizer: text that is not in the vocabulary becomes bytes.

    The merges follow from the scores of the tokens. Two neighbours merge if both and their union are tokens, the union
    with the best score first. Tokens that are always matched whole (runs of spaces, for instance) have no score in the
    file: they come before all others.

    whole: the tokens that are always matched whole.
    unknown: the token that stands for text that is no token.
    """
    if not (scores := reader.metadata("tokenizer.ggml.scores")):
        raise ForetokenError("The GGUF file does not describe its tokenizer (it has no scores): get it again.")
    merges: list[tuple[float, int, str, str]] = []
    for token, index in vocabulary.items():
        rank = float("-inf") if token in whole else -scores[index]
        for i in range(1, len(token)):
            if token[:i] in vocabulary and token[i:] in vocabulary:
                merges.append((rank, index, token[:i], token[i:]))
    merges.sort(key=lambda merge: (merge[0], merge[1], len(merge[2])))
    pairs = [(left, right) for _, _, left, right in merges]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # A space is added before the text and behind every special token, and the decoder removes it again.
    prefixed = reader.metadata("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend(SPACE)] if prefixed else []
    after = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [*before, normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer
