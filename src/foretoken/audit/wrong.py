"""Rules and a drafter that are known to be wrong, by which tests of losslessness show that they see a difference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.interfaces import Drafter, DraftSession, Path
from foretoken.core.laws import IID, WithoutReplacement
from foretoken.core.sequence import Sequence as CoreSequence
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree, root_only
from foretoken.draft.wrapped import WrappedDrafter, WrappedSession
from foretoken.verify.rule import Kinds, Rule


@dataclass(frozen=True)
class EachAlone(Rule):
    """A rule that tests each draft token as if it were the only one, and keeps the first that passes.

    row = sum_j a_j prod_{i<j} (1 - a_i) [x_j] + prod_i (1 - a_i) norm((p - q)+), a_j = min(1, p(x_j) / q(x_j)).
    For one draw it is the standard rule. For k >= 2 draws it is lossy: it emits draft tokens too often.
    """

    name: str = "each-alone"
    laws: Kinds = (IID, WithoutReplacement)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        q = siblings.q
        assert q is not None
        row, reach = torch.zeros_like(p), 1.0
        for x in siblings.draws:
            accept = min(1.0, float(p[x]) / float(q[x]))
            row[x] += reach * accept
            reach *= 1 - accept
        residual = (p - q).clamp(min=0)
        total = float(residual.sum())
        return row + reach * (residual / total if total > 0 else p)


@dataclass(frozen=True)
class LikeliestDraft(Rule):
    """A rule that always emits the draft token of the largest p: lossy for k >= 2 draws, even where q is p.

    row = [the x among the draws with the largest p(x)].
    """

    name: str = "likeliest-draft"

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        if not siblings.draws:
            return p
        row = torch.zeros_like(p)
        row[max(siblings.draws, key=lambda x: float(p[x]))] = 1.0
        return row


@dataclass(frozen=True)
class PeekingDrafter(WrappedDrafter[Drafter]):
    """A drafter that looks at what was drawn before it decides whether to draft: lossy for all laws but the opaque one.

    It drops the tree of a step when the first draw is unlikely, and decodes plainly instead. So the draws that are left
    are no longer draws from q.

    least: the q of the first draw below which the tree is dropped.
    """

    least: float = 0.5

    def open(self, batch: int, slots: int) -> "PeekingSession":
        return PeekingSession(self.inner.open(batch, slots), self.least)


class PeekingSession(WrappedSession[DraftSession]):
    """A session of a PeekingDrafter."""

    def __init__(self, inner: DraftSession, least: float) -> None:
        """Wrap the session `inner`; least: as in PeekingDrafter."""
        super().__init__(inner)
        self.least = least
        self.trees: Sequence[TokenTree] = ()

    def propose(self, sequences: Sequence[CoreSequence]) -> list[TokenTree]:
        self.trees = self.inner.propose(sequences)
        return [root_only(tree.tokens[0]) if self._unlikely(tree) else tree for tree in self.trees]

    def _unlikely(self, tree: TokenTree) -> bool:
        siblings = tree.siblings[0]
        return siblings is not None and siblings.q is not None and float(siblings.q[tree.tokens[1]]) < self.least

    def observe(self, sequences: Sequence[CoreSequence], trees: Sequence[TokenTree], paths: Sequence[Path]) -> None:
        self.inner.observe(sequences, self.trees, paths)
