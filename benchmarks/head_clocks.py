"""Draft heads with clocks around them: their forwards by their place in the step."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.heads.lm import HeadLM
from foretoken.heads.rows import HeadRows
from foretoken.heads.serial_rows import SerialRows
from foretoken.measure.clocks import Clock

# Gumiho's parallel part is its later levels; a whole chain is one compiled call for all of them.
PARTS = ("prefill", "1st level", "2nd level", "later levels", "whole chain")


class TimedHeadLM(HeadLM):
    """The same head; `clocks` has one clock for each of PARTS."""

    clocks: dict[str, Clock]

    def __init__(self, lm: HeadLM, clocks: dict[str, Clock]) -> None:
        super().__init__(lm.head, lm.name, lm.kernel)
        object.__setattr__(self, "clocks", clocks)  # HeadLM is frozen

    def open(self, batch: int, slots: int) -> Any:
        return TimedHeadRows(super().open(batch, slots), self.clocks)


class TimedHeadRows:
    """The rows, with clocks around what runs the head."""

    def __init__(self, rows: HeadRows, clocks: dict[str, Clock]) -> None:
        self._rows, self._clocks, self._level = rows, clocks, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self._clocks["prefill"].time(self._rows.extend, row, tokens)

    def score_own(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[Float[Tensor, "_ c"]]:
        self._level += 1
        return self._clocks[PARTS[min(self._level, 3)]].time(self._rows.score_own, tokens, parents)

    def drafts_chains(self, row: int, nodes: int) -> bool:
        return isinstance(self._rows, SerialRows) and self._rows.drafts_chains(row, nodes)

    def draft_chain(self, *args: Any, **kwargs: Any) -> tuple[list[int], Float[Tensor, "_ v"]]:
        assert isinstance(self._rows, SerialRows)
        return self._clocks["whole chain"].time(self._rows.draft_chain, *args, **kwargs)

    def parallel_scores(self, pairs: Sequence[tuple[int, int]]) -> Float[Tensor, "n m v"]:
        return self._clocks["later levels"].time(self._rows.parallel_scores, pairs)  # pyright: ignore[reportAttributeAccessIssue]

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        self._level = 0
        self._rows.keep(paths)
