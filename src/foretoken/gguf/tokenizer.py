"""The vocabulary of a GGUF file -> a transformers tokenizer, with its chat template and special tokens."""

from typing import cast

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from foretoken.core.errors import ForetokenError
from foretoken.gguf.reader import Reader

SPACE = "▁"
_QWEN2_WORDS = (  # the regular expression that Qwen 2's tokenizer publishes
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_tokenizer(reader: Reader) -> PreTrainedTokenizerFast:
    """The tokenizer in the file.

    Tokens that the file marks as unused (padding of the embedding matrix) are not in it.
    Raises ForetokenError for a kind of tokenizer, or a way of cutting text into words, that is not known.
    """
    kind = reader.metadata("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(reader)
    elif kind == "llama" and not reader.metadata("tokenizer.ggml.add_space_prefix", True):
        tokenizer = _sentencepiece(reader)
    else:
        raise ForetokenError(
            f"The GGUF file's tokenizer ({kind}) is not read: it must be gpt2, or llama without a space prefix."
        )
    tokens, types = _tokens(reader), _types(reader)
    names = {
        name: tokens[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := reader.metadata(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    marked: dict[int, bool] = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}  # whether it is special
    tokenizer.add_tokens(
        [
            AddedToken(token, special=marked[type_], normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in marked
        ]
    )
    if reader.metadata("tokenizer.ggml.add_bos_token", kind == "llama"):
        bos = names["bos"]
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=reader.metadata("tokenizer.chat_template"),
        model_max_length=reader.metadata(f"{reader.metadata('general.architecture', '')}.context_length", 1 << 30),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in names.items()},
    )


def _byte_level(reader: Reader) -> Tokenizer:
    """Byte-level BPE (GPT-2's): the file tells the merges, and by a name how text is cut into words."""
    merges = [cast(tuple[str, str], tuple(merge.split(" "))) for merge in reader.metadata("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(BPE(_vocabulary(reader), merges))
    words = reader.metadata("tokenizer.ggml.pre")
    if words == "smollm":
        cut = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    elif words == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
        cut = [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        raise ForetokenError(
            f"The GGUF file cuts text into words in a way ({words}) that is not known: it must be smollm or qwen2."
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _sentencepiece(reader: Reader) -> Tokenizer:
    """SentencePiece's BPE: bytes for what is not in the vocabulary, and merges that follow from the tokens' scores.

    Two neighbours merge if both and their union are tokens, the union with the best score first. Scores of tokens that
    are always matched whole (runs of spaces, for instance) are not in the file: they come before all others.
    """
    vocabulary = _vocabulary(reader)
    scores = reader.metadata("tokenizer.ggml.scores", [])
    whole = {
        token for token, type_ in zip(_tokens(reader), _types(reader), strict=True) if type_ == TokenType.USER_DEFINED
    }
    merges: list[tuple[float, int, str, str]] = []
    for token, index in vocabulary.items():
        rank = float("-inf") if token in whole else -scores[index]
        for i in range(1, len(token)):
            if token[:i] in vocabulary and token[i:] in vocabulary:
                merges.append((rank, index, token[:i], token[i:]))
    merges.sort(key=lambda merge: (merge[0], merge[1], len(merge[2])))
    unknown = _tokens(reader)[reader.metadata("tokenizer.ggml.unknown_token_id", 0)]
    pairs = [(left, right) for _, _, left, right in merges]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _tokens(reader: Reader) -> list[str]:
    """All tokens, by id; runs of spaces as SentencePiece spells them, which the file does not do."""
    tokens: list[str] | None = reader.metadata("tokenizer.ggml.tokens")
    if not tokens:
        raise ForetokenError("The GGUF file has no vocabulary: it is not whole, get it again.")
    if reader.metadata("tokenizer.ggml.model") != "llama":
        return tokens
    return [SPACE * len(token) if token.isspace() and token.strip(" ") == "" else token for token in tokens]


def _types(reader: Reader) -> list[int]:
    return reader.metadata("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(_tokens(reader))


def _vocabulary(reader: Reader) -> dict[str, int]:
    return {
        token: index
        for index, (token, type_) in enumerate(zip(_tokens(reader), _types(reader), strict=True))
        if type_ != TokenType.UNUSED
    }
