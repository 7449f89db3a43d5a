"""Rows over the kernel, whose compiled calls also compute the probabilities after scored nodes, and draw from them.

A guest's rows are those of a model that works in the slot cache of another model, its host, whose keys and values have
the same shape. The guest uses the host's keys and values of the committed text, so that no text is read twice. Its own
stand behind the committed text. When the host scores and keeps nodes, it overwrites the guest's keys and values with
its own; it reads no slot that it has not written itself.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from foretoken.core.errors import ForetokenError, NotFiniteError
from foretoken.core.shapes import Float
from foretoken.models.cache import Place
from foretoken.models.chains import ChainDraws, DrawnChain
from foretoken.models.growing_tree import GrowingTree, NewNodes
from foretoken.models.llama_kernel import KernelRows, LlamaKernel
from foretoken.models.rows import Rows

if TYPE_CHECKING:
    from foretoken.models.causal_lm import CausalLM


class FusedRows(Rows):
    """Rows of a model that the kernel runs. Results are those of `score`, `softmax` and a draw, bit for bit."""

    cache: KernelRows  # pyright: ignore[reportIncompatibleVariableOverride]

    def drafts_chains(self, row: int, nodes: int) -> bool:
        """Whether `draft_chain` can be called so that it scores `nodes` nodes of the row with index `row`."""
        if self._features is not None:
            return False
        used = self.lengths[row] + nodes
        return all(window is None or used <= window for window in self._windows.values())

    def draft_chain(self, row: int, tokens: Sequence[int], draws: ChainDraws, past: Sequence[int] = ()) -> DrawnChain:
        """Read `tokens` after a row's committed text, draw the next token, read that, and so on; return the chain.

        All tokens that were read become scored nodes of the row, that is all but the last one drawn.

        row: the index of the row, whose tree must be empty.
        tokens: ids that follow its committed tokens, at least one.
        draws: how tokens are drawn, and how many at most.
        past: ids of the text, whose last ones are `tokens`. Guesses of the next tokens are looked up in it, which saves
            forwards and changes no result. Empty: nothing is looked up.

        Raises NotFiniteError where logits have NaN or +inf, or nothing finite.
        """
        nodes, start = len(tokens) + len(draws.u) - 1, self.lengths[row]
        assert not len(self._trees[row])
        assert self.drafts_chains(row, nodes)
        self._check_room(row, nodes)
        self._lm.check_position(start + nodes - 1)
        drawn, _ = self.cache.draft_chain(row, past, tokens, start, draws)
        if not drawn.tokens:
            raise NotFiniteError(f"Model {self._lm.name} gave NaN or infinite logits: check its weights and dtype.")
        self._trees[row].grow(range(-1, len(tokens) + len(drawn.tokens) - 2))
        return drawn

    def score_tree(
        self, row: int, tokens: Sequence[int], parents: Sequence[int], temperature: float
    ) -> Float[Tensor, "n v"] | None:
        """Append nodes to the tree of one row and return softmax(logits / temperature) after each of them [n, v].

        row: the index of the row.
        tokens, parents: the ids of the nodes and their parents, as in `score` for one row.
        temperature: >= 0; at 0 the logits themselves are returned.

        Returns None where some probability is not finite; then no node was appended.
        """
        self._check_room(row, len(tokens))
        tree, length, out = self._trees[row], self.lengths[row], None
        first = len(tree)
        try:
            tree.grow(parents)
            positions = [length + depth for depth in tree.depths[first:]]
            self._lm.check_position(max(positions))
            self.cache.place(Place(slice(row, row + 1), length + first, len(tokens), length + first + len(tokens)))
            masks = self._masks(NewNodes([tree], [length], [first]))
            out = self.cache.score_tree(np.array(tokens), np.array(positions), masks, temperature, self._features)
        finally:
            if out is None:
                tree.drop(first)
        return out


class GuestRows(FusedRows):
    """The trees of a guest model over the rows of its host, which keeps the committed text.

    lengths: the host's list of the numbers of committed tokens; only the host changes it.
    """

    def __init__(self, lm: "CausalLM", host: Rows) -> None:
        """Share the cache of `host`, rows of a model that the kernel runs, none of them in use yet; lm: the guest."""
        assert isinstance(lm.backend, LlamaKernel)
        assert isinstance(host.cache, KernelRows)
        assert not len(host)
        batch, slots = host._batch, host._slots
        super().__init__(lm, batch, slots, cache=KernelRows(lm.backend, batch, slots, host.cache))
        self.lengths = host.lengths

    def join(self) -> int:
        """Add a tree for the row that joined the host last, and return the row's index."""
        self._trees.append(GrowingTree(self._low))
        return len(self._trees) - 1

    def leave(self, row: int) -> None:
        """Forget the tree of the row with index `row`, which left the host; the last tree takes its place."""
        self._trees[row] = self._trees[-1]
        self._trees.pop()

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Raise ForetokenError: only the host commits text."""
        raise ForetokenError(f"{self._lm.name} reads in the cache of its host, which commits the text: extend that.")

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Forget the trees; paths: ignored, since the host commits them."""
        for tree in self._trees:
            tree.clear()
