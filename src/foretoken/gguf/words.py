"""The ways in which byte-level tokenizers cut text into words, by the names that GGUF files have for them."""

from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Regex, pre_tokenizers

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CAPITAL, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _letters(ending: str) -> str:
    """Return the expression of words whose capitals stand in front; ending: what may follow them."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{CAPITAL}*{SMALL}+{ending}|{before}{CAPITAL}+{SMALL}*{ending}"


def _usual(digits: str, breaks: str = r"[\r\n]*") -> str:
    """Return the expression of Llama 3 and Qwen2; digits: that of a number. breaks: that of what ends symbols."""
    return rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{breaks}|{REST}"


@dataclass(frozen=True)
class Words:
    """How a byte-level tokenizer cuts text into words, and what else belongs to tokenizers that do so.

    expressions: one after the other, each makes words of its own of all that it matches, as these tokenizers publish
        them.
    digits: whether each digit then is a word.
    gpt2: whether GPT-2's expression cuts what remains.
    whole: whether words that are tokens need no merges.
    composed: whether characters are composed first (NFC).
    begins: whether texts begin with a token where the file does not say.
    """

    expressions: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    whole: bool = False
    composed: bool = False
    begins: bool = False

    def pre_tokenizer(self) -> Any:
        """Return the pre-tokenizer that cuts text so, and spells its bytes as characters."""
        cut: list[Any] = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in self.expressions]
        if self.digits:
            cut.append(pre_tokenizers.Digits(individual_digits=True))
        return pre_tokenizers.Sequence([*cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])


_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_DIGITS = Words(digits=True, gpt2=True)
_QWEN2 = Words((_usual(r"\p{N}"),), composed=True)
_LLAMA3 = Words((_usual(r"\p{N}{1,3}"),), whole=True, begins=True)
WORDS = {
    "gpt-2": Words(gpt2=True),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2"), _LLAMA3),
    "smaug-bpe": replace(_LLAMA3, begins=False),  # SmolLM3's
    "seed-coder": Words((_usual(r"\p{N}", breaks=""),)),
    "dbrx": Words(_LLAMA3.expressions),  # Phi-4's
    "gpt-4o": Words((rf"{_letters(ENDINGS + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}|{REST}",)),  # Phi-4-mini's
    "tekken": Words((rf"{_letters('')}|\p{{N}}|{_SYMBOLS}|{REST}",), whole=True, begins=True),  # Mistral Nemo's
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+"), digits=True),
}
