"""A causal LM in the role of the target: it catches up with the committed ids, then scores trees."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.interfaces import Path
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows

MOST_TEMPERED = 1 << 20  # numbers of p made at once; of a larger tree, chains aside, only what the rule looks at
NO_DRAW = torch.zeros(1, 1, dtype=torch.float64)


@dataclass(frozen=True)
class LMTarget:
    lm: CausalLM

    @property
    def name(self) -> str:
        return self.lm.name

    @property
    def vocab_size(self) -> int:
        """Columns of its logits; may exceed the tokenizer's vocabulary."""
        return self.lm.vocab_size

    def open(self, batch: int, slots: int) -> "LMTargetSession":
        return LMTargetSession(self.lm.open(batch, slots))

    def open_with_features(self, batch: int, slots: int, layers: tuple[int, ...]) -> "LMTargetSession":
        return LMTargetSession(self.lm.open(batch, slots, layers))


class LMTargetSession:
    """Invariant between steps: a row's cache holds all its committed ids but the last, which is the next root."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def join(self) -> None:
        self.rows.join()

    def leave(self, row: int) -> None:
        self.rows.leave(row)

    def catch_up(self, sequences: Seq[Sequence]) -> None:
        for row, seq in enumerate(sequences):
            if self.rows.lengths[row] < len(seq.ids) - 1:
                self.rows.extend(row, seq.ids[self.rows.lengths[row] : -1])

    def features(self, sequences: Seq[Sequence]) -> list[Float[Tensor, "_ f"]]:
        self.catch_up(sequences)
        return [self.rows.features(row) for row in range(len(sequences))]

    def score(self, sequences: Seq[Sequence], trees: Seq[TokenTree]) -> list[Float[Tensor, "_ v"]]:
        self.catch_up(sequences)
        return self.rows.score([tree.tokens for tree in trees], [tree.parents for tree in trees])

    def sample(self, sequence: Sequence) -> int | None:
        # Caught up before the question: sliding windows are another for a long prompt.
        if not self._tempers(sequence) or not self.rows.drafts_chains(0, 1):
            return None
        temperature = sequence.sampling.temperature
        u = sequence.uniforms(1, 1) if temperature > 0 else NO_DRAW
        (token,), _ = self.rows.draft_chain(0, sequence.ids[-1:], u, temperature)
        return token

    def tempered(self, sequence: Sequence, tree: TokenTree) -> Float[Tensor, "n v"] | None:
        if not self._tempers(sequence) or not self.rows.scores_trees:
            return None
        if max(tree.depths) + 1 < len(tree) and len(tree) * self.rows.vocab_size > MOST_TEMPERED:
            return None
        return self.rows.score_tree(0, tree.tokens, tree.parents, sequence.sampling.temperature)

    def _tempers(self, sequence: Sequence) -> bool:
        """Whether p is the softmax of the tempered logits, or greedy; it has caught up then."""
        sampling = sequence.sampling
        greedy = sampling.temperature == 0 and not sampling.moves_scores
        if not (greedy or sampling.tempers_only) or sequence.shapes_logits:
            return False
        self.catch_up([sequence])
        return True

    def keep(self, paths: Seq[Path]) -> None:
        self.rows.keep(paths)
