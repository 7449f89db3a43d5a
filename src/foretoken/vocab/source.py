"""The source of a drafter whose vocabulary is not the target's."""

from dataclasses import dataclass

from foretoken.draft.source import Source
from foretoken.vocab.translation import Translation


@dataclass(frozen=True)
class TranslatedSource(Source):
    """The weights of a drafter with another vocabulary, and the way from one vocabulary to the other.

    translation: from the target's vocabulary to the drafter's.
    """

    translation: Translation

    def fingerprint(self, kind: str) -> str:
        return f"{kind} {super().fingerprint(kind)}"

    @property
    def has_common_tokens(self) -> bool:
        """Whether any token of the target's is also one of the drafter's, as vocab tli requires."""
        return any(token < self.model.vocab_size for token in self.translation.pairs.values())
