"""What a drafting session asks of the rows that score its trees."""

from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.core.truncated import Truncation
from foretoken.kernel.sizes import ALL


@runtime_checkable
class DraftRows(Protocol):
    """What a session calls of the rows of a model (models.rows.Rows) or of a head (heads.rows.HeadRows)."""

    @property
    def lengths(self) -> list[int]: ...

    def join(self) -> int: ...

    def leave(self, row: int) -> None: ...

    def extend(self, row: int, tokens: Seq[int]) -> None: ...

    def score(self, tokens: Seq[Seq[int]], parents: Seq[Seq[int]]) -> list[Float[Tensor, "_ v"]]: ...

    def keep(self, paths: Seq[Seq[int]]) -> None: ...


@runtime_checkable
class ChainRows(DraftRows, Protocol):
    """Rows that may draft a chain in one call."""

    def drafts_chains(self, row: int, nodes: int) -> bool: ...

    def draft_chain(
        self, row: int, tokens: Seq[int], u: Float[Tensor, "n 1"], temperature: float, floor: float = 0.0,
        truncation: Truncation = ALL,
    ) -> tuple[list[int], Float[Tensor, "_ v"]]: ...  # fmt: skip


@runtime_checkable
class TreeRows(DraftRows, Protocol):
    """Rows that may score a lone sequence's nodes and temper the scores in one call."""

    @property
    def scores_trees(self) -> bool: ...

    def score_tree(
        self, row: int, tokens: Seq[int], parents: Seq[int], temperature: float
    ) -> Float[Tensor, "_ v"] | None: ...
