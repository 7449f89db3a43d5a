"""Rows of a model that works in the slot cache of another model, whose keys and values have the same shape.

So it reads what the host read, and no text is read twice. What it writes stands behind the committed text. The host
puts its own keys and values in the place of all that it keeps, and reads nothing behind it.
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

    lengths: those of the host's rows, which it changes.
    """

    def __init__(self, lm: "CausalLM", host: Rows) -> None:
        """lm: the guest. host: rows of a model that the kernel runs, none of them in use yet."""
        assert isinstance(lm.backend, LlamaKernel)
        assert isinstance(host.cache, KernelRows)
        assert not len(host)
        batch, slots = host._batch, host._slots
        super().__init__(lm, batch, slots, cache=KernelRows(lm.backend, batch, slots, host.cache))
        self.lengths = host.lengths

    def join(self) -> int:
        """Take up the row that joined the host last; returns its index."""
        self._trees.append(GrowingTree(self._low))
        return len(self._trees) - 1

    def leave(self, row: int) -> None:
        """Forget the tree of a row that left the host; the last row moves into its place."""
        self._trees[row] = self._trees[-1]
        self._trees.pop()

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        raise ForetokenError(f"{self._lm.name} reads in the cache of its host, which commits the text: extend that.")

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Forget the trees; the host keeps their paths."""
        for tree in self._trees:
            tree.clear()
