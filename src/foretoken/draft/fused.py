"""Drafting a chain for one sequence in one compiled call, which gives bit for bit what growing level by level gives."""

from collections.abc import Sequence as Seq

from torch import Tensor

from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.core.sampling import COLDEST
from foretoken.core.sequence import Sequence
from foretoken.core.tree import Siblings, TokenTree, chain
from foretoken.draft.growth import Growth
from foretoken.heads.serial import SerialRows
from foretoken.models.chains import ChainDraws
from foretoken.models.fused_rows import FusedRows

LOOKED_UP = 4096  # the last tokens of a text in which its next ones are looked up, in 60 microseconds per step


def suits(seq: Sequence, g: Growth) -> bool:
    """Whether the compiled call for a whole chain draws as the sampling of `seq` and the law of its tree `g` ask."""
    if not isinstance(g.uniforms, Tensor) or seq.sampling.moves_scores or seq.shapes_logits:
        return False
    if not g.needs_probabilities(seq.sampling):
        return True
    return g.law in (IID, WithoutReplacement, Opaque) and seq.sampling.temperature >= COLDEST


def fused_chain(rows: FusedRows | SerialRows, seq: Sequence, g: Growth, pending: Seq[int]) -> TokenTree | None:
    """Draft a chain and return its tree; None, and nothing is changed, where its nodes do not fit the rows.

    rows: the drafter's cache of a batch of one.
    seq: the sequence, which `suits`.
    g: its tree, which has the root alone; its `num_pending` and `scored` are set.
    pending: the committed ids that the drafter has not read, the root last.
    """
    u, opaque = g.uniforms, g.law is Opaque
    assert isinstance(u, Tensor)
    if not rows.drafts_chains(0, len(pending) + len(u) - 1):
        return None
    one = g.law(1)
    past = seq.ids[-LOOKED_UP:] if len(u) > 1 else ()
    floors = [g.floor_at(depth) for depth in range(len(u))] if g.asks else ()
    draws = ChainDraws(u, seq.sampling.temperature, seq.sampling.truncation, opaque, floors)
    drawn = rows.draft_chain(0, pending, draws, past)
    of_nodes = [None] * len(drawn.tokens) if opaque else drawn.q.unbind()
    records = [Siblings((token,), of_node, one) for token, of_node in zip(drawn.tokens, of_nodes, strict=True)]
    g.num_pending, g.scored = len(pending), {node: len(pending) - 1 + node for node in range(len(drawn.tokens))}
    return chain([seq.ids[-1], *drawn.tokens], [*records, None], (1.0, *drawn.sure) if g.floors else None)
