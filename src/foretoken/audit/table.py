"""A language model that is a table, p(next | last two tokens): small enough to enumerate whole decodings of it.

It takes the place of `models.CausalLM` behind the real LMTarget, LMDrafter, trees, walk and decoder. Its rows hold the
ids that were kept, so that a path which is kept wrongly changes the scores.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.core.tree import path_to
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows

START = 0  # the token before the first


class TableLM(CausalLM):
    """A language model that looks the next token's distribution up in a table."""

    def __init__(self, name: str, table: Float[Tensor, "v v v"]) -> None:
        """Make the model.

        name: for messages.
        table: table[a, b] is the distribution of the token after a, b, float64 [v, v, v].
        """
        self.name = name
        self.table = table
        self.vocab_size = table.shape[2]
        self.context = None

    @property
    def device(self) -> torch.device:
        return self.table.device

    def open(self, batch: int, slots: int, layers: tuple[int, ...] = ()) -> "TableRows":
        return TableRows(self)


class TableRows(Rows):
    """The rows of a TableLM: `join`, `leave`, `extend`, `score`, `keep`, `cut`, `lengths`, as those of a CausalLM.

    table: that of the model.
    ids: the committed ids of each row.
    trees: of each row the nodes since its last `keep`: token ids, and parents as in `Rows.score`.
    """

    def __init__(self, lm: TableLM) -> None:
        """Open rows of `lm`, as many and as long as needed."""
        self.table = lm.table
        self.ids: list[list[int]] = []
        self.trees: list[tuple[list[int], list[int]]] = []

    @property
    def lengths(self) -> list[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return list(map(len, self.ids))

    def join(self) -> int:
        self.ids.append([])
        self.trees.append(([], []))
        return len(self.ids) - 1

    def leave(self, row: int) -> None:
        self.ids[row], self.trees[row] = self.ids[-1], self.trees[-1]
        self.ids.pop()
        self.trees.pop()

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.ids[row] += tokens

    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "n v"]]:
        """Return the exact log probabilities as logits; see `Rows.score`."""
        scores = []
        for ids, (known, known_above), new, above in zip(self.ids, self.trees, tokens, parents, strict=True):
            first = len(known)
            known += new
            known_above += above
            paths = ([known[i] for i in path_to(known_above, node)] for node in range(first, len(known)))
            seen = [[START, START, *ids, *path][-2:] for path in paths]
            scores.append(
                torch.stack([self.table[a, b] for a, b in seen]).log() if seen else self.table[0, 0, None][:0]
            )
        return scores

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        for row, path in enumerate(paths):
            self.ids[row] += [self.trees[row][0][node] for node in path]
            self.trees[row] = ([], [])

    def cut(self, row: int, length: int) -> None:
        del self.ids[row][length:]


def random_table(v: int, seed: int) -> Float[Tensor, "v v v"]:
    """Return random distributions [v, v, v], float64; in about a quarter of them token 0 has probability 0.

    v: the number of tokens.
    seed: of the numbers.
    """
    rng = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(v, v, v, generator=rng, dtype=torch.float64)
    zero = torch.rand(v, v, generator=rng) < 0.25
    logits[..., 0] = logits[..., 0].masked_fill(zero, float("-inf"))
    return logits.softmax(-1)
