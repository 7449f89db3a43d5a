"""Clocks on a draft head: its forwards by their place in the step."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.heads.rows import HeadRows
from foretoken.measure.clocks import Clock, record

# Gumiho's parallel part is its later levels; a whole chain is one compiled call for all of them.
PARTS = ("prefill", "1st level", "2nd level", "later levels", "whole chain")


def record_parts(rows: HeadRows, clocks: dict[str, Clock]) -> None:
    """From now on the clocks, one for each of PARTS, run during what runs the head."""
    level, score_own, keep = 0, rows.score_own, rows.keep

    def score_by_level(tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ c"]]:
        nonlocal level
        level += 1
        with clocks[PARTS[min(level, 3)]]:
            return score_own(tokens, parents)

    def keep_and_begin(paths: Sequence[Sequence[int]]) -> None:
        nonlocal level
        level = 0
        keep(paths)

    own: dict[str, Any] = {"score_own": score_by_level, "keep": keep_and_begin}
    vars(rows).update(own)
    for name, part in (("extend", "prefill"), ("draft_chain", "whole chain"), ("parallel_scores", "later levels")):
        record(rows, (name,), clocks[part])
