"""The target itself as drafter: its own weights in fewer bits, in its own slot cache.

Nothing is trained and no text is read twice: the quantised model drafts behind the keys and values that the target
computed for the text. The target then scores the draft tokens, and so overwrites the drafter's keys and values with its
own.

Source: Zhao et al. 2024, QSpec, arXiv:2410.11305: drafting by quantised arithmetic in the cache of the exact one.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foretoken.core.interfaces import TargetSession
from foretoken.core.policy import TreePolicy
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree
from foretoken.core.verifier import LawFamily
from foretoken.draft.lm import LMDrafter, LMDraftSession
from foretoken.draft.source import Source
from foretoken.draft.wrapped import WrappedSession
from foretoken.models.causal_lm import CausalLM
from foretoken.models.fused_rows import GuestRows
from foretoken.models.target import LMTargetSession


@dataclass(frozen=True)
class OwnDrafter(LMDrafter):
    """Draws each node's children from the target's own model with quantised weights, which is `lm`."""

    def open(self, batch: int, slots: int) -> "OwnDraftSession":
        return OwnDraftSession(self)


def own(source: Source, policy: TreePolicy, law: LawFamily) -> OwnDrafter:
    """Return the drafter of the target's quantised weights; source, policy, law: as in `recipe.Kind`."""
    return OwnDrafter(source.model, policy, law, source.vocab_size)


class OwnDraftSession(WrappedSession[LMDraftSession]):
    """A session that drafts in the cache of the target's session, which `share` receives."""

    def __init__(self, drafter: OwnDrafter) -> None:
        """drafter: whose trees are drafted."""
        self._drafter = drafter

    def share(self, target: TargetSession) -> None:
        assert isinstance(self._drafter.lm, CausalLM)
        assert isinstance(target, LMTargetSession)
        self._target = target
        super().__init__(LMDraftSession(self._drafter, GuestRows(self._drafter.lm, target.rows)))

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        self._target.catch_up(sequences)
        return super().propose(sequences)
