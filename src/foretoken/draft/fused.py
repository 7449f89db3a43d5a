"""Drafting for one sequence in compiled calls that do what growing level by level does, bit for bit, in less time."""

from collections.abc import Sequence as Seq

from torch import Tensor

from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.core.policy import ShapePolicy, TreePolicy
from foretoken.core.sampling import TINY
from foretoken.core.sequence import Sequence
from foretoken.core.tree import Siblings, TokenTree, chain
from foretoken.draft.growth import Growth
from foretoken.heads.serial import SerialRows
from foretoken.models.fused_rows import FusedRows

LOOKED_UP = 4096  # tokens of a text in which its next ones are looked up: 60 microseconds of each step


class FusedChain:
    """The call that drafts a whole chain."""

    def __init__(self, rows: FusedRows | SerialRows, floor: float) -> None:
        """floor: a chain ends where the drafter is less sure of it than this."""
        self._rows, self._floor = rows, floor

    def suits(self, seq: Sequence, g: Growth) -> bool:
        """Whether the call draws as the sequence's sampling and law ask."""
        if not isinstance(g.uniforms, Tensor) or seq.sampling.moves_scores or seq.shapes_logits:
            return False
        if g.law is Opaque:  # with a floor it takes the likeliest tokens and their probabilities at one temperature
            return self._floor == 0 or seq.sampling.temperature == 0
        return g.law in (IID, WithoutReplacement) and seq.sampling.temperature >= TINY

    def draft(self, seq: Sequence, g: Growth, pending: Seq[int]) -> TokenTree | None:
        """The chain of a sequence that it suits; None where its nodes do not fit the rows, and nothing was done.

        pending: the committed ids that the drafter has not read, the root last.
        """
        u, opaque = g.uniforms, g.law is Opaque
        assert isinstance(u, Tensor)
        if not self._rows.drafts_chains(0, len(pending) + len(u) - 1):
            return None
        temperature, one = 0.0 if opaque else seq.sampling.temperature, g.law(1)
        past = seq.ids[-LOOKED_UP:] if len(u) > 1 else ()
        tokens, q = self._rows.draft_chain(0, pending, u, temperature, self._floor, seq.sampling.truncation, past)
        of_nodes = [None] * len(tokens) if opaque else q.unbind()
        records = [Siblings((token,), of_node, one) for token, of_node in zip(tokens, of_nodes, strict=True)]
        g.num_pending, g.scored = len(pending), {node: len(pending) - 1 + node for node in range(len(tokens))}
        return chain([seq.ids[-1], *tokens], [*records, None])


def fused_chain(rows: object, policy: TreePolicy) -> FusedChain | None:
    """The call for the chains of a policy; None where these rows have none, or its trees are no chains."""
    if isinstance(policy, ShapePolicy) and policy.chain_depth > 0 and isinstance(rows, FusedRows | SerialRows):
        return FusedChain(rows, policy.floor)
    return None
