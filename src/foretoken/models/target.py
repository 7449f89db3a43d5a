"""A causal LM in the role of the target: it catches up with the committed ids, then scores trees."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.interfaces import Path, Saved
from foretoken.core.random import Random
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.core.walk import LogitScores, NodeScores, ReadyScores
from foretoken.models.causal_lm import CausalLM
from foretoken.models.chains import ChainDraws
from foretoken.models.fused_rows import FusedRows
from foretoken.models.rows import Rows

# The most probabilities, nodes x vocabulary, that are computed for a whole tree at once. In a larger tree that is not a
# chain, p is computed only at the nodes that the rule looks at.
MOST_TEMPERED = 1 << 20
NO_DRAW = torch.zeros(1, 1, dtype=torch.float64)


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


class RootScores(LogitScores):
    """The scores of a tree of the root alone, by a kernel's compiled call.

    The forward, p and the draw from it are one call, which runs when `argmax` or `draw` is called.
    """

    def __init__(self, model: str, rows: FusedRows, sequence: Sequence, tree: TokenTree) -> None:
        """Keep what the forward takes; it does not run yet.

        model: the target's name, for errors.
        rows: those of the one sequence; they have read all its committed ids but the last.
        sequence: the text that the tree continues.
        tree: the root alone.
        """
        self._model, self._rows, self._sequence, self._tree = model, rows, sequence, tree
        self._token: int | None = None
        self._p: Tensor | None = None

    def argmax(self) -> list[int]:
        self._token, _ = self._forward(NO_DRAW)
        return [self._token]

    def p(self, nodes: range) -> Tensor:
        if self._token is not None:
            return torch.nn.functional.one_hot(torch.tensor([self._token]), self._rows.vocab_size).float()
        if self._p is None:
            (self.logits,) = self._rows.score([self._tree.tokens], [self._tree.parents])
            self._p = super().p(range(1))
        return self._p[nodes.start : nodes.stop]

    def draw(self, node: int, rng: Random) -> int:
        if self._p is not None:
            return super().draw(node, rng)
        u = rng.uniforms(1, 1)
        assert isinstance(u, Tensor)
        token, self._p = self._forward(u)
        return token

    def _forward(self, u: Float[Tensor, "1 1"]) -> tuple[int, Tensor]:
        """Return (the token drawn by the uniform u, p [1, v]); at temperature 0 (the likeliest token, no rows)."""
        drawn = self._rows.draft_chain(0, self._tree.tokens, ChainDraws(u, self._sequence.sampling.temperature))
        return drawn.tokens[0], drawn.q


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
        if tree.siblings[0] is None and sequence.rng.gives_numbers and rows.drafts_chains(0, 1):
            return RootScores(self.name, rows, sequence, tree)
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

    def read(self, row: int, ids: Seq[int]) -> None:
        self.rows.extend(row, ids[self.rows.lengths[row] :])

    def save(self, row: int, start: int, end: int) -> Saved | None:
        return self.rows.save(row, start, end)

    def restore(self, row: int, saved: Saved) -> None:
        self.rows.restore(row, saved)
