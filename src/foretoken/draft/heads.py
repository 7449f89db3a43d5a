"""A draft head as drafter: its tree grows as a language model's does, on the states of the target's scoring forward."""

from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.draft.lm import LMDrafter, LMDraftSession
from foretoken.draft.rows import DraftRows
from foretoken.heads.lm import HeadLM


class HeadDrafter(LMDrafter):
    """lm: a HeadLM. A tree deeper than the head's levels is cut there, which is decided before anything is drawn."""

    lm: HeadLM

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.lm.feature_layers

    def open(self, batch: int, slots: int) -> "HeadDraftSession":
        return HeadDraftSession(self, self.lm.open(batch, slots))


@runtime_checkable
class LearningRows(DraftRows, Protocol):
    def learn(self, features: Seq[Float[Tensor, "_ f"]]) -> None: ...


class HeadDraftSession(LMDraftSession):
    drafter: HeadDrafter
    rows: LearningRows

    def learn(self, features: list[Float[Tensor, "_ f"]]) -> None:
        self.rows.learn(features)

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        limits = [seq.max_depth for seq in sequences]
        for seq in sequences:
            if len(seq.ids) < 2:  # there is no state before the first token, so nothing to draft from
                seq.max_depth = 0
        try:
            return super().propose(sequences)
        finally:
            for seq, limit in zip(sequences, limits, strict=True):
                seq.max_depth = limit

    def _draw(self, sequences: Seq[Sequence], logits: list[Float[Tensor, "_ v"]], depth: int) -> None:
        super()._draw(sequences, logits, depth)
        if depth == self.drafter.lm.depth:
            for growth in self.growths:
                growth.frontier = []
