"""A causal LM in the role of the target: it catches up with the committed ids, then scores trees."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from foretoken.core.interfaces import Path, Saved
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.core.walk import LogitScores, NodeScores, ReadyScores
from foretoken.models.causal_lm import CausalLM
from foretoken.models.fused_rows import FusedRows
from foretoken.models.rows import Rows

# The most probabilities, nodes x vocabulary, that are computed for a whole tree at once. In a larger tree that is not a
# chain, p is computed only at the nodes that the rule looks at.
MOST_TEMPERED = 1 << 20


@dataclass(frozen=True)
class LMTarget:
    """A language model as a `Target`. lm: the model."""

    lm: CausalLM

    @property
    def name(self) -> str:
        return self.lm.name

    @property
    def vocab_size(self) -> int:
        """The number of columns of its logits, which may exceed the tokenizer's vocabulary."""
        return self.lm.vocab_size

    def open(self, batch: int, slots: int, layers: tuple[int, ...] = ()) -> "LMTargetSession":
        return LMTargetSession(self.name, self.lm.open(batch, slots, layers))


class LMTargetSession:
    """The session of a language model as the target.

    Between steps, the cache of a row holds all committed ids of its sequence but the last, which is the next root.
    """

    def __init__(self, name: str, rows: Rows) -> None:
        """Start an empty batch; name: of the model, for errors; rows: none of them in use yet."""
        self.name, self.rows = name, rows

    def join(self) -> None:
        self.rows.join()

    def leave(self, row: int) -> None:
        self.rows.leave(row)

    def catch_up(self, sequences: Seq[Sequence]) -> None:
        """Read the committed ids, without the last, that a row has not read yet; sequences: those of all rows."""
        for row, seq in enumerate(sequences):
            if self.rows.lengths[row] < len(seq.ids) - 1:
                self.rows.extend(row, seq.ids[self.rows.lengths[row] : -1])

    def features(self, sequences: Seq[Sequence]) -> list[Float[Tensor, "_ f"]]:
        self.catch_up(sequences)
        return [self.rows.features(row) for row in range(len(sequences))]

    def score(self, sequences: Seq[Sequence], trees: Seq[TokenTree]) -> list[NodeScores]:
        self.catch_up(sequences)
        if len(sequences) == 1 and (fused := self._fused(sequences[0], trees[0])) is not None:
            return [fused]
        logits = self.rows.score([tree.tokens for tree in trees], [tree.parents for tree in trees])
        return [LogitScores(self.name, *each) for each in zip(sequences, trees, logits, strict=True)]

    def _fused(self, sequence: Sequence, tree: TokenTree) -> NodeScores | None:
        """Return the scores of one sequence's tree by one compiled call, None where there is none for them."""
        rows = self.rows
        if not (isinstance(rows, FusedRows) and sequence.softmax_only) or sequence.shows_logits:
            return None
        large = max(tree.depths) + 1 < len(tree) and len(tree) * rows.vocab_size > MOST_TEMPERED
        if large:
            return None
        temperature = sequence.sampling.temperature
        scores = rows.score_tree(0, tree.tokens, tree.parents, temperature)
        if scores is None:  # some p is not finite; the walk may never come to that node
            return None
        return ReadyScores(scores) if temperature > 0 else LogitScores(self.name, sequence, tree, scores)

    def keep(self, paths: Seq[Path]) -> None:
        self.rows.keep(paths)

    def read(self, row: int, sequence: Sequence, end: int) -> None:
        self.rows.extend(row, sequence.ids[self.rows.lengths[row] : end])

    def save(self, row: int, start: int, end: int) -> Saved | None:
        return self.rows.save(row, start, end)

    def restore(self, row: int, saved: Saved) -> None:
        self.rows.restore(row, saved)
