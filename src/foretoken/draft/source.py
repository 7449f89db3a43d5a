"""What a drafter is made of beside a recipe: a model or a head, and how its vocabulary is spelled."""

from dataclasses import dataclass

from foretoken.heads.lm import HeadLM
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint, fingerprint_of_weights
from foretoken.models.translation import Translation


@dataclass(frozen=True)
class Source:
    """kind: of `recipe.KINDS`, the usual one for these weights. vocab_size: columns of the target's logits.

    lm: None where no weights draft. translation: between the target's and the drafter's vocabulary where they differ.
    """

    kind: str
    vocab_size: int
    lm: CausalLM | HeadLM | None = None
    translation: Translation | None = None

    @property
    def model(self) -> CausalLM:
        """The language model that drafts; for kinds that have one."""
        assert isinstance(self.lm, CausalLM), f"{self.kind} has no language model"
        return self.lm

    @property
    def spelling(self) -> Translation:
        """Between the vocabularies; for kinds of two vocabularies."""
        assert self.translation is not None, f"{self.kind} has one vocabulary"
        return self.translation

    def fingerprint(self, kind: str) -> str:
        """Identifier of how it drafts, and of the weights it does so with; without a translation, of them alone.

        kind: how it drafts now, which may be another one of two vocabularies than its usual one.
        """
        if self.lm is None:
            return "" if kind == "none" else kind
        if isinstance(self.lm, HeadLM):
            head = self.lm.head
            about = f"{head.kind} {head.depth} {head.feature_scale} {head.feature_layers}"
            return f"{kind} {fingerprint_of_weights(head, about)}"
        weights = fingerprint(self.lm)
        return weights if self.translation is None else f"{kind} {weights}"
