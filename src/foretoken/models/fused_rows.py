"""Rows over the kernel, whose compiled calls also make the probabilities of what they score, and draw from them."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from foretoken.core.errors import NotFiniteError
from foretoken.core.shapes import Float
from foretoken.models.chains import ChainDraws, DrawnChain
from foretoken.models.llama_kernel import KernelRows
from foretoken.models.recorder import FORWARD, SCORING, recorded
from foretoken.models.rows import Rows


class FusedRows(Rows):
    """Rows of a model that the kernel runs; each call gives what `score`, `softmax` and a draw would, bit for bit."""

    cache: KernelRows  # pyright: ignore[reportIncompatibleVariableOverride]

    def drafts_chains(self, row: int, nodes: int) -> bool:
        """Whether `draft_chain` can be called where it scores so many nodes."""
        if self._features is not None:
            return False
        used = self.lengths[row] + nodes
        return all(window is None or used <= window for window in self._windows.values())

    @recorded(SCORING)
    @recorded(FORWARD)
    def draft_chain(self, row: int, tokens: Sequence[int], draws: ChainDraws, past: Sequence[int] = ()) -> DrawnChain:
        """Read `tokens` after a row's committed text, draw the next, read that, and so on.

        What was read are scored nodes of the row, whose tree was empty. Next tokens are looked up in `past`, whose last
        ones are `tokens`: that saves forwards, and changes nothing else.

        NotFiniteError where logits have NaN or +inf, or nothing finite.
        """
        nodes, start = len(tokens) + len(draws.u) - 1, self.lengths[row]
        assert not len(self._trees[row])
        assert self.drafts_chains(row, nodes)
        self._check_room(row, nodes)
        self._lm.check_position(start + nodes - 1)
        drawn = self.cache.draft_chain(row, past, tokens, start, draws)
        if not drawn.tokens:
            raise NotFiniteError(f"Model {self._lm.name} gave NaN or infinite logits: check its weights and dtype.")
        self._trees[row].grow(range(-1, len(tokens) + len(drawn.tokens) - 2))
        return drawn

    @recorded(SCORING)
    def score_tree(
        self, row: int, tokens: Sequence[int], parents: Sequence[int], temperature: float
    ) -> Float[Tensor, "n v"] | None:
        """Append nodes to the tree of a row, as `score` does: softmax(logits / temperature) after each, at temperature
        0 the logits.

        None where some p is not finite, and nothing was scored.
        """
        self._check_room(row, len(tokens))
        tree, length, first, out = self._trees[row], self.lengths[row], len(self._trees[row]), None
        try:
            tree.grow(parents)
            positions = [length + depth for depth in tree.depths[first:]]
            self._lm.check_position(max(positions))
            self._place(slice(row, row + 1), length + first, len(tokens), length + len(tree))
            masks = self._masks([tree], [length], [first], len(tokens), length + len(tree))
            out = self._probabilities(tokens, positions, masks, temperature)
        finally:
            if out is None:
                tree.drop(first)
        return out

    @recorded(FORWARD)
    def _probabilities(
        self, tokens: Sequence[int], positions: list[int], masks: dict[str, np.ndarray | None], temperature: float
    ) -> Float[Tensor, "n v"] | None:
        """The compiled call of `score_tree`."""
        return self.cache.score_tree(np.array(tokens), np.array(positions), masks, temperature, self._features)
