"""The comparison of two vocabularies, with advice on the method by which a drafter with the other one should draft."""

from collections import Counter
from dataclasses import asdict, dataclass
from operator import eq
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.models.text import Tokenizer, same_vocabulary
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import vocabulary

PREFIX = 100  # characters of a stretch, as in Timor et al. 2025, appendix F
MOST_PREFIXES = 1000  # stretches of a text that are looked at
ENOUGH = 0.9  # share of the target's tokens that the drafter has too, from which on TLI loses little by the others


@dataclass(frozen=True)
class Overlap:
    """What two vocabularies have in common (Timor et al. 2025, Tables 8-11). Shares are in [0, 1], None without a text.

    target, drafter: names of the tokenizers.
    num_target, num_drafter: numbers of tokens, special ones included.
    num_common: the number of tokens in the intersection.
    longest: the length of the drafter's longest token, in bytes.
    in_text: of all token occurrences of the target in a text, the share in the intersection (Table 10).
    in_text_types: the same share of the different tokens that occur (Table 10).
    target_injective, drafter_injective: of the text's 100-character stretches, the share that survives encoding and
        decoding by each tokenizer (Table 11).
    method: the advice, "same", "tli" or "slem".
    why: the reason, in words.
    """

    target: str
    drafter: str
    num_target: int
    num_drafter: int
    num_common: int
    longest: int
    in_text: float | None
    in_text_types: float | None
    target_injective: float | None
    drafter_injective: float | None
    method: str
    why: str

    @property
    def of_target(self) -> float:
        """The share of the target's tokens that are in the intersection."""
        return self.num_common / self.num_target if self.num_target else 0.0

    @property
    def of_drafter(self) -> float:
        """The share of the drafter's tokens that are in the intersection."""
        return self.num_common / self.num_drafter if self.num_drafter else 0.0

    def json(self) -> dict[str, Any]:
        """Return all fields and the two shares, as plain values."""
        return asdict(self) | {"of_target": self.of_target, "of_drafter": self.of_drafter}

    def text(self) -> str:
        """Return the comparison as lines for a terminal."""
        lines = [
            f"target   {self.target}: {self.num_target} tokens",
            f"drafter  {self.drafter}: {self.num_drafter} tokens, the longest {self.longest} bytes",
            f"common   {self.num_common}: {self.of_target:.1%} of the target's, {self.of_drafter:.1%} of the drafter's",
        ]
        if self.in_text is not None:
            lines += [
                f"in text  {self.in_text:.1%} of the target's token occurrences are common, "
                f"{self.in_text_types:.1%} of its different tokens",
                f"survive  encoding and decoding: {self.target_injective:.1%} of {PREFIX}-character stretches in the "
                f"target's tokenizer, {self.drafter_injective:.1%} in the drafter's",
            ]
        return "\n".join([*lines, f"advice   {self.method}: {self.why}"])


def compare(target: Tokenizer, drafter: Tokenizer, text: str | None = None) -> Overlap:
    """Compare two tokenizers by the bytes of their tokens, and on a text if there is one.

    target, drafter: the tokenizers of the two models.
    text: an example of what will be generated; None for a comparison of the vocabularies alone.

    Raises ForetokenError for an empty text, and for a tokenizer from which the bytes of its tokens cannot be read.
    """
    if text is not None and not text.strip():
        raise ForetokenError("The text to compare the tokenizers on is empty: give some lines of what you generate.")
    source, dest = vocabulary(target), vocabulary(drafter)
    translation = Translation(source, dest)
    pairs = translation.pairs
    sizes = len(source), len(dest), len(pairs), dest.longest
    in_text = types = None
    survive = None, None
    if text is not None:
        counts = Counter(source.encode(text.encode()))
        in_text = sum(n for i, n in counts.items() if i in pairs) / max(counts.total(), 1)
        types = sum(i in pairs for i in counts) / max(len(counts), 1)
        survive = injective(target, text), injective(drafter, text)
    share = common(translation) if in_text is None else in_text
    tokens = "the target's tokens" if in_text is None else "the text's tokens"
    if same_vocabulary(target, drafter):
        method, why = "same", "the tokenizers are equal, so the drafter serves as it is"
    elif (method := advised(share)) == "tli":
        why = f"{share:.0%} of {tokens} are the drafter's too, and any tree and verifier fits"
    else:
        why = f"only {share:.0%} of {tokens} are the drafter's too, so strings are matched, not tokens"
    return Overlap(source.name, dest.name, *sizes, in_text, types, *survive, method, why)


def common(translation: Translation) -> float:
    """Return the share of the target's tokens that the drafter has too; translation: between their vocabularies."""
    return len(translation.pairs) / max(len(translation.source), 1)


def advised(share: float) -> str:
    """Return the name of the method for two vocabularies; share: of the target's tokens, those that both have."""
    return "tli" if share >= ENOUGH else "slem"


def injective(tokenizer: Tokenizer, text: str) -> float:
    """Return the share of a text's stretches s with decode(encode(s)) == s (Timor et al. 2025, appendix F).

    tokenizer: encodes and decodes.
    text: a text that is not empty; its first 1000 stretches of 100 characters are looked at.
    """
    stretches = [text[i : i + PREFIX] for i in range(0, len(text), PREFIX)][:MOST_PREFIXES]
    encoded = (tokenizer(stretch, add_special_tokens=False)["input_ids"] for stretch in stretches)
    decoded = [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in encoded]
    return sum(map(eq, decoded, stretches)) / len(stretches)
