"""Drafting for one sequence in compiled calls that do what the level-by-level way does, bit for bit, in less time."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.core.policy import ShapePolicy, TreePolicy
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.softmax import TINY
from foretoken.core.tree import Siblings, TokenTree, chain
from foretoken.draft.growth import Growth
from foretoken.draft.rows import ChainRows, DraftRows, TreeRows

Pending = Callable[[], list[int]]  # the committed ids that the drafter has not read, the root last


class Fused:
    """Both calls return None where there is no compiled call for what is asked; nothing was drawn or scored then."""

    def grow(self, seq: Sequence, g: Growth, pending: Pending) -> TokenTree | None:
        """The whole tree of a sequence, whose growth `g` has just begun."""
        return None

    def weights(self, seq: Sequence, g: Growth, tokens: Seq[int], parents: Seq[int]) -> Float[Tensor, "n v"] | None:
        """q after new nodes, as `LMDraftSession._weights` has it."""
        return None


class FusedScores(Fused):
    """Scores the nodes of a level and makes their probabilities in one call."""

    def __init__(self, rows: TreeRows) -> None:
        self._trees = rows

    def weights(self, seq: Sequence, g: Growth, tokens: Seq[int], parents: Seq[int]) -> Float[Tensor, "n v"] | None:
        sampling, weighs = seq.sampling, g.policy.weighs
        if sampling.moves_scores or seq.shapes_logits:
            return None
        if g.law is Opaque and not (weighs and sampling.temperature > 0):
            scores = self._trees.score_tree(0, tokens, parents, 0.0)
            return scores.softmax(-1) if weighs and scores is not None else scores
        return self._trees.score_tree(0, tokens, parents, sampling.temperature) if sampling.tempers_only else None


class FusedChain(Fused):
    """Drafts a chain in one call. scores: how nodes are scored where that cannot be."""

    def __init__(self, rows: ChainRows, floor: float, scores: Fused) -> None:
        """floor: a chain ends where the drafter is less sure of it than this."""
        self._chains, self._floor, self._scores = rows, floor, scores

    def weights(self, seq: Sequence, g: Growth, tokens: Seq[int], parents: Seq[int]) -> Float[Tensor, "n v"] | None:
        return self._scores.weights(seq, g, tokens, parents)

    def grow(self, seq: Sequence, g: Growth, pending: Pending) -> TokenTree | None:
        u, sampling, opaque = g.uniforms, seq.sampling, g.law is Opaque
        if not isinstance(u, Tensor) or sampling.moves_scores or seq.shapes_logits:
            return None
        if not opaque and not (g.law in (IID, WithoutReplacement) and sampling.temperature >= TINY):
            return None
        if opaque and self._floor > 0 and sampling.temperature > 0:
            return None  # the likeliest tokens, and their probabilities at the temperature too
        ids = pending()
        if not self._chains.drafts_chains(0, len(ids) + len(u) - 1):
            return None
        temperature, one = 0.0 if opaque else sampling.temperature, g.law(1)
        tokens, q = self._chains.draft_chain(0, ids, u, temperature, self._floor, sampling.truncation)
        rows = [None] * len(tokens) if opaque else q.unbind()
        records = [Siblings((token,), row, one) for token, row in zip(tokens, rows, strict=True)]
        g.num_pending, g.scored = len(ids), {node: len(ids) - 1 + node for node in range(len(tokens))}
        return chain([seq.ids[-1], *tokens], [*records, None])


def fused(rows: DraftRows, policy: TreePolicy) -> Fused:
    """What compiled calls these rows have for the trees of a policy, asked once per session."""
    scores = FusedScores(rows) if isinstance(rows, TreeRows) and rows.scores_trees else Fused()
    if isinstance(policy, ShapePolicy) and policy.chain_depth > 0 and isinstance(rows, ChainRows):
        return FusedChain(rows, policy.floor, scores)
    return scores
