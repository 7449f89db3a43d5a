"""A wrong tree mask, which the comparisons of the tests and of the audit must see."""

import numpy as np
import pytest

from foretoken.models.growing_tree import GrowingTree


def leak(monkeypatch: pytest.MonkeyPatch, node: int, other: int) -> None:
    """From now on a node of every tree sees another one that is not its ancestor.

    node, other: their numbers in the tree; smaller trees stay as they are.
    """
    rows_of = GrowingTree.rows

    def leaky(self: GrowingTree, first: int) -> np.ndarray:
        seen = rows_of(self, first).copy()
        if first == 0 and len(seen) > max(node, other):
            seen[node, other] = 0.0
        return seen

    monkeypatch.setattr(GrowingTree, "rows", leaky)
