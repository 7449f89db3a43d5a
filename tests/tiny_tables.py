"""Two table models with two real tokenizers over two letters, and their decoding, enumerated from the first draw on."""

import tokenizers_zoo as zoo
from foretoken.audit.decoding import Decoding, Ids, deviation, own_law
from foretoken.audit.table import TableLM, random_table
from foretoken.core.sampling import Sampling
from foretoken.models.target import LMTarget
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import vocabulary
from rates import summed
from tables import decodings

EOS = zoo.EOS
# Ids differ, one splits "ab" and the other "ba", and the end of text stands elsewhere.
TARGET = zoo.letters([EOS, "a", "b", "ab"], [("a", "b")])
DRAFTER = zoo.letters(["b", "ba", "a", EOS], [("b", "a")])
CONTAINED = zoo.letters([EOS, "b", "a"])
WIDER = zoo.letters(["a", "c", "b", "ab", "ca", EOS], [("a", "b"), ("c", "a")])  # "c" is not the target's
WIDER_LETTERS = zoo.letters(["a", "c", "b", EOS])
APART = zoo.letters(["c", "d"], eos=False)


def translation(drafter=DRAFTER, target=TARGET) -> Translation:
    return Translation(vocabulary(target, "T"), vocabulary(drafter, "D"))


def lms(drafter=DRAFTER, target=TARGET, seed=0) -> tuple[TableLM, TableLM]:
    """Tables; the drafter's rows may be padded beyond its tokenizer."""
    return (
        TableLM("T", random_table(len(target), seed)),
        TableLM("D", random_table(len(drafter), seed + 1)),
    )


def deviates(lm: TableLM, drafter, verifier, **sampling) -> float:
    """How far the law of two tokens is from the target's own."""
    case = Decoding(LMTarget(lm), drafter, verifier, (1, 2), 2, Sampling(**sampling), frozenset({0}))
    return deviation(law_of(lm, drafter, verifier, 2, **sampling), own_law(case))


def law_of(lm: TableLM, drafter, verifier, num_tokens: int, prompt: Ids = (1, 2), **sampling) -> dict[Ids, float]:
    """{ids: probability} of the text that a real Decoder emits."""

    whole = decodings(lambda: drafter, LMTarget(lm), verifier, num_tokens, prompt, Sampling(**sampling), frozenset({0}))
    return summed((ids, prob) for (ids, _), prob in whole.items())
