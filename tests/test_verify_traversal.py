"""Rule `traversal` beside the published algorithm, transcribed on its own, on every tree of small shapes."""

from collections import defaultdict
from itertools import product

import pytest
import torch
from torch import Tensor

from foretoken.audit.decoding import deviation
from foretoken.core.laws import IID, WithoutReplacement
from foretoken.core.tree import TokenTree
from foretoken.core.verifier import LawFamily
from foretoken.trees.static import StaticTree
from foretoken.verify import VERIFIERS
from tables import table_decoding, trees, walk_law
from thinning import one_in
from whole_texts import table

Outcomes = dict[tuple[tuple[int, ...], int], float]
V = 3
SHAPES = {
    "chain:3": (-1, 0, 1, 2),
    "kary:2x2": (-1, 0, 0, 1, 1, 2, 2),
    "uneven": (-1, 0, 0, 1, 1, 2),
    "one path longer": (-1, 0, 0, 1, 3, 3),
    "three children": (-1, 0, 0, 0, 2, 2),
}


def published(tree: TokenTree, p: list[Tensor], q: list[Tensor]) -> Outcomes:
    """Traversal verification, Weng et al. 2025, arXiv:2505.12398: P(accepted path, token after it) given the tree.

    The names are the paper's: M_b is the target, M_s the drafter, p_alpha the acceptance rate of a chain that ends at a
    node. The algorithm goes from leaf to root and deletes what it rejects.
    """
    below: list[list[int]] = [[] for _ in tree.tokens]
    for node, siblings in enumerate(tree.siblings):
        for token in dict.fromkeys(siblings.draws if siblings is not None else ()):
            child = tree.child(node, token)
            below[node].append(child)
    m_b, m_s, p_alpha = list(p), list(q), [1.0] * len(tree)

    def rates_below(node: int) -> None:
        for child in below[node]:
            x = tree.tokens[child]
            p_alpha[child] = min(p_alpha[node] * float(m_b[node][x]) / float(m_s[node][x]), 1.0)
            rates_below(child)

    rates_below(0)
    found: Outcomes = defaultdict(float)
    reached = 1.0
    while True:
        leaf = 0
        while below[leaf]:
            leaf = below[leaf][0]
        for x in range(len(p[0])):
            found[tree.path_to(leaf), x] += reached * p_alpha[leaf] * float(m_b[leaf][x])
        reached *= 1 - p_alpha[leaf]
        if leaf == 0 or reached == 0:
            return found
        parent = tree.parents[leaf]
        below[parent].remove(leaf)
        residual = (p_alpha[parent] * m_b[parent] - m_s[parent]).clamp(min=0)
        total = float(residual.sum())
        p_alpha[parent] = total / (total + 1 - p_alpha[parent])
        m_b[parent] = residual / total if total > 0 else residual
        rest = m_s[parent].clone()
        rest[tree.tokens[leaf]] = 0.0
        m_s[parent] = rest / rest.sum() if float(rest.sum()) > 0 else rest
        rates_below(parent)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "law", "seed"),
    one_in(5, product(SHAPES, [WithoutReplacement, IID], range(3))),
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_it_is_the_published_algorithm(name: str, law: LawFamily, seed: int) -> None:
    """Given the draws, each accepted path and the token after it have the same probability to 1e-12."""
    rng = torch.Generator().manual_seed(seed)
    p_of = table(V, 4, rng)
    rule = VERIFIERS["traversal"]
    drafted = trees(table_decoding(rule, law, StaticTree(SHAPES[name]), V, seed))
    for tree, _, _ in drafted:
        p = [p_of[tuple(tree.tokens[i] for i in tree.path_to(node)[1:])] for node in range(len(tree))]
        expected = published(tree, p, [torch.empty(0) if s is None or s.q is None else s.q for s in tree.siblings])
        found = walk_law(rule, tree, p.__getitem__)
        assert deviation(found, expected) < 1e-12
    assert len(drafted) >= 8
