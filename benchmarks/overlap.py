"""How Timor et al. 2025, section 3.2, find the ids of drafted text; benchmarks/vocab.py compares it with ours."""

from collections.abc import Sequence

from foretoken.vocab.strings import incomplete, window
from foretoken.vocab.vocabulary import Vocabulary


def longest_overlap(vocabulary: Vocabulary, ids: Sequence[int], drafted: bytes) -> list[int]:
    """How `vocabulary` goes on after `ids` by the longest run of tokens that the window has both before and after it is
    encoded together with the draft: what comes after that run, the first one of equals.

    Where the run ends before the window does, what comes after it repeats some of the text. Where there is none, the
    draft is encoded alone. Source: Timor et al. 2025, section 3.2.
    """
    drafted = drafted[: len(drafted) - incomplete(drafted)]
    old = list(ids[window(vocabulary, ids) :])
    encoded = vocabulary.encode(vocabulary.spell(old) + drafted)
    longest, end = 0, 0
    runs = [0] * (len(old) + 1)  # runs[i]: of equal tokens that end at old[i - 1] and at the last of `encoded` so far
    for j, token in enumerate(encoded):
        runs = [0, *(runs[i] + 1 if other == token else 0 for i, other in enumerate(old))]
        if max(runs) > longest:
            longest, end = max(runs), j + 1
    return encoded[end:] if longest else vocabulary.encode(drafted)
