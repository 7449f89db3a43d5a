"""What a drafter with another vocabulary than the target's is made of."""

from dataclasses import dataclass

from foretoken.draft.source import Source
from foretoken.vocab.translation import Translation


@dataclass(frozen=True)
class TranslatedSource(Source):
    """translation: from the target's vocabulary to the drafter's."""

    translation: Translation

    def fingerprint(self, kind: str) -> str:
        return f"{kind} {super().fingerprint(kind)}"

    @property
    def has_common_tokens(self) -> bool:
        """Whether the drafter can say any token of the target's, without which there is no tli."""
        return any(token < self.model.vocab_size for token in self.translation.pairs.values())
