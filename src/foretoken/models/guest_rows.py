"""Rows of a model that works in the slot cache of another model, whose keys and values have the same shape.

The guest uses the host's keys and values of the committed text, so that no text is read twice. Its own stand behind the
committed text. When the host scores and keeps nodes, it overwrites the guest's keys and values with its own; it reads
no slot that it has not written itself.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foretoken.core.errors import ForetokenError
from foretoken.models.fused_rows import FusedRows
from foretoken.models.growing_tree import GrowingTree
from foretoken.models.llama_kernel import KernelRows, LlamaKernel
from foretoken.models.rows import Rows

if TYPE_CHECKING:
    from foretoken.models.causal_lm import CausalLM


class GuestRows(FusedRows):
    """The trees of a guest model over the rows of its host, which keeps the committed text.

    lengths: the host's list of the numbers of committed tokens; only the host changes it.
    """

    def __init__(self, lm: "CausalLM", host: Rows) -> None:
        """Share the cache of a host.

        lm: the guest model.
        host: rows of a model that the kernel runs, none of them in use yet.
        """
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
