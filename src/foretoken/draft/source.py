"""The source of a drafter: the language model or the head that drafts, or neither of them."""

from dataclasses import dataclass, field

from foretoken.draft.store import Store
from foretoken.heads.lm import HeadLM
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint, fingerprint_of_weights


@dataclass(frozen=True)
class Source:
    """The weights that draft, if any do. See vocab/source.py for a model with another vocabulary than the target's.

    kind: the usual kind of drafter for these weights, a name in `recipe.KINDS`.
    vocab_size: the number of columns of the target's logits.
    lm: the weights; None where the drafter has none.
    first: the kind of the lookup that drafts before these weights, None where there is none.
    store: the texts of earlier requests; None where they are not looked up.
    """

    kind: str
    vocab_size: int
    lm: CausalLM | HeadLM | None
    first: str | None = field(default=None, kw_only=True)
    store: Store | None = field(default=None, kw_only=True)

    @property
    def model(self) -> CausalLM:
        """The language model that drafts; only for kinds that have one."""
        assert isinstance(self.lm, CausalLM), f"{self.kind} has no language model"
        return self.lm

    def fingerprint(self, kind: str) -> str:
        """Return an identifier of the weights that draft, and of how they draft where there are several ways.

        kind: that of the drafter, which between two vocabularies may be another one than the usual one.
        """
        if self.lm is None:
            return "" if kind == "none" else kind
        first = "" if self.first is None else f"{self.first}+"
        if isinstance(self.lm, CausalLM):
            return first + fingerprint(self.lm)
        head = self.lm.head
        about = f"{head.kind} {head.depth} {head.feature_scale} {head.feature_layers}"
        return f"{first}{kind} {fingerprint_of_weights(head, about)}"
