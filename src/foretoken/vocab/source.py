"""The source of a drafter whose vocabulary is not the target's."""

from dataclasses import dataclass

from foretoken.core.errors import ForetokenError
from foretoken.draft.source import Source
from foretoken.models.causal_lm import CausalLM
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

    @property
    def rewound(self) -> CausalLM:
        """The weights, for drafters that forget tokens of the text which are now split otherwise.

        Raises ForetokenError for a model that keeps recurrent states, which cannot go back.
        """
        if self.model.recurrent:
            raise ForetokenError(
                f"Drafter {self.model.name} keeps recurrent states, which can follow another vocabulary by vocab tli "
                "alone: choose that, or a drafter without such states."
            )
        return self.model
