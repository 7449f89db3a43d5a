"""Small tokenizers of every family, built here, and two-letter ones for enumeration."""

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import foretoken
import tiny

EOS = "<|end|>"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [
    ("Ġ", "t"),
    ("h", "e"),
    ("Ġt", "he"),
    ("Ã", "©"),
    ("e", "r"),
    ("l", "l"),
    ("ll", "o"),
    ("he", "llo"),
    ("Ġ", "Ġ"),
]
TEXTS = [
    "the hello ther",
    "  two  spaces   three",
    "\n\n\ttabs\nand lines \n",
    "héllo wörld, 日本語 🙂 é",
    "",
    " ",
    "a<|end|>b",  # a special token's name in a text is text
    "x" * 50,
]


def wrap(core: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **special)


def byte_level(merges: list[tuple[str, str]] = MERGES, shuffled: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE. shuffled: ids in an order that is not that of the vocabulary's dict."""
    symbols = [EOS, *ALPHABET, *("".join(m) for m in merges)]
    n = len(symbols)
    vocab = {s: (i * 11 + 3) % n if shuffled else i for i, s in enumerate(symbols)}
    assert len(set(vocab.values())) == n
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    return wrap(core, eos_token=EOS)


def byte_only() -> PreTrainedTokenizerFast:
    return byte_level([])


SENTENCE = ["▁", "t", "h", "e", "l", "o", "r", "▁t", "he", "▁the", "ll", "hello", "é", "a", "x", "▁▁"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def sentencepiece_bpe() -> PreTrainedTokenizerFast:
    """As Llama 2: a space before the text, byte fallback, begin-of-text first."""
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("▁", "▁")]
    symbols = ["<unk>", "<s>", "</s>", *BYTES, *dict.fromkeys([*SENTENCE, *("".join(m) for m in merges)])]
    core = Tokenizer(
        models.BPE(
            vocab={s: i for i, s in enumerate(symbols)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken(s, special=True) for s in ("<unk>", "<s>", "</s>")])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return wrap(core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram() -> PreTrainedTokenizerFast:
    """As T5 and its like, with byte fallback."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((s, -float(i + 1)) for i, s in enumerate(SENTENCE))]
    pieces += [(b, -50.0) for b in BYTES]
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(replacement="▁")])
    core.add_special_tokens([AddedToken(s, special=True) for s in ("<unk>", "</s>")])
    return wrap(core, eos_token="</s>", unk_token="<unk>")


def wordpiece() -> PreTrainedTokenizerFast:
    """As BERT: lower case, no spaces, no bytes."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    symbols = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{c}" for c in letters), "the", "hello", "##llo", ","]
    core = Tokenizer(models.WordPiece(vocab={s: i for i, s in enumerate(symbols)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return wrap(core, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]")


def word_level() -> PreTrainedTokenizerFast:
    """Whose tokens' spaces nobody knows."""
    core = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrap(core, unk_token="[UNK]")


def byt5() -> ByT5Tokenizer:
    return ByT5Tokenizer()


BYTE_COMPLETE = {
    "byte-level": byte_level,
    "shuffled": lambda: byte_level(shuffled=True),
    "bytes": byte_only,
    "sentencepiece": sentencepiece_bpe,
    "unigram": unigram,
    "byt5": byt5,
}
FAMILIES = {**BYTE_COMPLETE, "wordpiece": wordpiece}
# Drafters' tokenizers beside a target's of `byte_level`.
DRAFTERS = {"bytes": byte_only, "few": lambda: byte_level(MERGES[:5]), "sentencepiece": sentencepiece_bpe}


@cache
def byte_pair() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A target of `byte_level` and a drafter of `byte_only`, whose vocabulary is contained in it."""
    return tiny.llama(0, vocab=len(byte_level()), context=1024), tiny.llama(1, vocab=257, context=1024)


def load_bytes(**options: Any) -> foretoken.Engine:
    """The pair with its tokenizers; options: of `load`, also other models or tokenizers."""
    target, drafter = byte_pair()
    tokenizers = {"tokenizer": byte_level(), "drafter_tokenizer": byte_only()}
    return foretoken.load(**{"target": target, "drafter": drafter, **tokenizers, "device": "cpu", **options})


def letters(tokens: list[str], merges: list[tuple[str, str]] = [], eos: bool = True) -> PreTrainedTokenizerFast:  # noqa: B006
    """A byte-level BPE of just these tokens, ids in this order; <|end|> where it stands, or nowhere."""
    core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return wrap(core, **({"eos_token": EOS} if eos else {}))
