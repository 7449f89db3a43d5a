"""Sequoia: the static tree of a given size with the largest expected number of accepted tokens (Chen et al. 2024).

a_b is the UNCONDITIONAL probability that the b-th child of a node is the accepted one, measured for one verifier, law
and temperature at the largest number of children. T[m][l] is the best expected number of tokens of a tree of m nodes on
at most l levels below the root, where the root counts as 1. B[m][l][b] is the same where the root has b children at
most, and y the number of nodes of the subtree of its last child:

    B[m][l][b] = max over y of  B[m - y][l][b - 1] + a_b T[y][l - 1],    B[m][l][0] = 1,    T[m][l] = max over b of B
"""

import numpy as np

from foretoken.trees.forms import check_acceptance
from foretoken.trees.static import StaticTree

LEVELS = 24  # the largest depth of a tree


def sequoia(acceptance: list[float], budget: int, levels: int = LEVELS) -> StaticTree:
    """Return the static tree with the largest expected number of accepted tokens. O(budget^2 levels children).

    acceptance: for each child of a node, in draw order, the probability a_b that it is the accepted one [children].
    budget: the largest number of nodes besides the root.
    levels: the largest depth.

    Raises ForetokenError where `acceptance` cannot be such probabilities.
    """
    check_acceptance(acceptance)
    nodes, levels, k = budget + 1, min(levels, budget), len(acceptance)
    best = np.full((levels + 1, k + 1, nodes + 1), -np.inf)  # B [l, b, m]: with at most m nodes
    taken = np.zeros((levels + 1, k + 1, nodes + 1), np.int64)
    best[:, :, 1:] = 1.0
    for level in range(1, levels + 1):
        for b in range(1, k + 1):
            best[level, b] = best[level, b - 1]
            for m in range(2, nodes + 1):
                y = np.arange(1, m)
                value = best[level, b - 1, m - y] + acceptance[b - 1] * best[level - 1, k, y]
                pick = int(value.argmax())
                if value[pick] > best[level, b, m]:
                    best[level, b, m], taken[level, b, m] = value[pick], pick + 1
    parents = [-1]

    def add(node: int, level: int, size: int) -> None:
        """Append what is below `node` to `parents`: `size` nodes, `node` included, on at most `level` levels."""
        sizes, left = [], size
        for b in range(k, 0, -1):
            if taken[level, b, left]:
                sizes.append(int(taken[level, b, left]))
                left -= sizes[-1]
        for below in reversed(sizes):
            parents.append(node)
            add(len(parents) - 1, level - 1, below)

    add(0, levels, nodes)
    return StaticTree(tuple(parents))
