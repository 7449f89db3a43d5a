"""A draft head as drafter: its tree grows as a language model's does, from the target's hidden states."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from torch import Tensor

from foretoken.core.interfaces import Path
from foretoken.core.laws import Opaque
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.draft.growth import Growth
from foretoken.draft.lm import LMDrafter, LMDraftSession
from foretoken.heads.lm import HeadLM
from foretoken.heads.rows import HeadRows


class HeadDrafter(LMDrafter):
    """Draws each node's children from a draft head's next-token distribution.

    A tree that is deeper than the head's levels is cut there; this is decided before anything is drawn.
    """

    lm: HeadLM

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.lm.head.feature_layers

    def open(self, batch: int, slots: int) -> "HeadDraftSession":
        return HeadDraftSession(self, self.lm.open(batch, slots))


class HeadDraftSession(LMDraftSession):
    """The head's cache of one batch, and the trees of the present step.

    Where a head scores only some of the target's tokens, its *columns*, q is computed and drawn from over these alone
    (over all, if bias, penalties or processors act). The trees have the target's ids, and q is 0 for all other tokens.
    """

    drafter: HeadDrafter
    rows: HeadRows

    def __init__(self, drafter: HeadDrafter, rows: HeadRows) -> None:
        super().__init__(drafter, rows)
        self._columns = None if rows.columns is None else rows.columns.tolist()

    def learn(self, features: list[Float[Tensor, "_ f"]]) -> None:
        self.rows.learn(features)

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        super().observe(sequences, trees, paths)
        lm = self.drafter.lm
        lm.usefulness.count(trees, paths, lm.name, lm.head.target.name)

    def _deepest(self, seq: Sequence) -> int:
        if len(seq.ids) < 2:  # there is no hidden state before the first token, so nothing to draft from
            return 0
        depth = self.drafter.lm.head.depth
        return seq.depth_left if depth is None else min(seq.depth_left, depth)

    def _score(self, tokens: Seq[Seq[int]], parents: Seq[Seq[int]]) -> list[Float[Tensor, "_ c"]]:
        return self.rows.score_own(tokens, parents)

    def _weights(
        self, seq: Sequence, g: Growth, logits: Float[Tensor, "m c"], suffixes: Iterable[list[int]]
    ) -> Float[Tensor, "m _"]:
        if seq.sampling.moves_scores or seq.shapes_logits:  # which need columns of the target's ids
            logits = self.rows.whole(logits, float("-inf"))
        return self._q(seq, g, logits, suffixes)

    def _of_target(
        self, g: Growth, q: Float[Tensor, "m _"], draws: list[tuple[int, ...]]
    ) -> tuple[Float[Tensor, "m _"], list[tuple[int, ...]]]:
        if self._columns is None or q.shape[1] == self.drafter.vocab_size:
            return q, draws
        whole = q if g.law is Opaque else self.rows.whole(q, 0.0)  # the q of opaque children is not recorded
        return whole, [tuple(self._columns[token] for token in drawn) for drawn in draws]
