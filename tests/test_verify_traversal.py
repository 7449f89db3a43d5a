"""Rule `traversal` beside the published algorithm, transcribed on its own, on every tree of small shapes."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from foretoken.audit.branching import outcomes
from foretoken.core.laws import IID, WithoutReplacement
from foretoken.core.laws import outcomes as all_draws
from foretoken.core.tree import Siblings, TokenTree, TreeBuilder
from foretoken.core.verifier import LawFamily
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from tables import each

Outcomes = dict[tuple[tuple[int, ...], int], float]
SHAPES = {
    "chain:3": ((-1, 0, 1, 2), 2),
    "kary:2x2": ((-1, 0, 0, 1, 1, 2, 2), 3),
    "uneven": ((-1, 0, 0, 1, 1, 2), 3),
    "one path longer": ((-1, 0, 0, 1, 3, 3), 2),
    "three children": ((-1, 0, 0, 0, 2, 2), 3),
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
            assert child is not None
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


def drafted(parents: tuple[int, ...], q_of: Callable[[tuple[int, ...]], Tensor], law: LawFamily) -> Iterator[TokenTree]:
    """Every tree that the shape can give. q_of: q after the tokens of a path from the root."""
    shape = static.StaticTree(parents)

    def grown(nodes: list[tuple[int, tuple[int, ...]]], records: list[Siblings | None]) -> Iterator[TokenTree]:
        """Nodes: (place in the shape, path) in order; records: those that are drawn already."""
        if len(records) == len(nodes):
            builder = TreeBuilder(0)
            for node, siblings in enumerate(records):
                if siblings is not None:
                    builder.add(node, siblings)
            yield builder.build()
            return
        place, path = nodes[len(records)]
        (plan,) = shape.plan([(place, 1.0)], None, law)
        if plan is None:
            yield from grown(nodes, [*records, None])
            return
        for draws, _ in all_draws(plan.law, q_of(path)):
            states = [state[0] for state in shape.grow([plan], None, [draws])[0]]
            first = [(states[draws.index(x)], (*path, x)) for x in dict.fromkeys(draws)]
            yield from grown([*nodes, *first], [*records, Siblings(draws, q_of(path), plan.law)])

    yield from grown([(0, ())], [])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("law", [WithoutReplacement, IID], ids=lambda law: law.name)
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_published_algorithm(name: str, law: LawFamily, seed: int) -> None:
    """Given the draws, each accepted path and the token after it have the same probability to 1e-12."""
    parents, v = SHAPES[name]
    rng = torch.Generator().manual_seed(seed)
    paths = [path for depth in range(5) for path in itertools.product(range(v), repeat=depth)]
    p_of, q_of = (
        {path: torch.softmax(1.5 * torch.randn(v, generator=rng, dtype=torch.float64), 0) for path in paths}
        for _ in range(2)
    )
    num_trees = 0
    for tree in drafted(parents, q_of.__getitem__, law):
        num_trees += 1
        at = [tuple(tree.tokens[i] for i in tree.path_to(node)[1:]) for node in range(len(tree))]
        expected = published(tree, [p_of[path] for path in at], [q_of[path] for path in at])
        found: Outcomes = defaultdict(float)
        scores = each([p_of[path] for path in at].__getitem__)
        for outcome, prob in outcomes(partial(VERIFIERS["traversal"].walk, tree, scores)):
            found[outcome] += prob
        assert max(abs(found[key] - expected[key]) for key in found.keys() | expected.keys()) < 1e-12
        if num_trees == 60:
            break
    assert num_trees >= 8
