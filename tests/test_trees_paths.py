"""Trees of paths behind a trunk: their shape, the law of their paths, and every rule on them."""

from collections import Counter, defaultdict
from itertools import product
from math import prod

import pytest

from foretoken.audit.decoding import Shape, measure
from foretoken.audit.enumerate import TOLERANCE
from foretoken.core.laws import IID, Opaque, Paths, WithoutReplacement
from foretoken.core.tree import TokenTree
from foretoken.names import tree_policy
from foretoken.trees.paths import PathTree
from foretoken.verify import VERIFIERS
from rates import summed
from tables import table_decoding, trees

RULES = ("rrs", "rrsw", "kseq", "hub", "transport", "block-transport", "traversal", "gbv")
Path = tuple[int, ...]


def paths_of(tree: TokenTree) -> Counter[Path]:
    """How often each path was drawn: the token that n paths share has n draws below it."""
    counts: Counter[Path] = Counter()

    def go(node: int, before: Path, paths: int) -> None:
        siblings = tree.siblings[node]
        if siblings is None:
            counts[before] += paths
            return
        for token, n in Counter(siblings.draws).items():
            child = tree.child(node, token)
            go(child, (*before, token), n)

    go(0, (), 1)
    return counts


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("trunk", "k", "length"), [(0, 2, 2), (0, 3, 2), (1, 2, 1)])
def test_the_paths_are_independent_and_of_one_law(trunk: int, k: int, length: int) -> None:
    """Every set of paths, equal ones counted, has the probability of k independent paths behind one trunk."""
    v = 2
    case = table_decoding(VERIFIERS["rrs"], IID, PathTree(trunk, k, length), v)
    table = case.drafter.lm.table  # pyright: ignore[reportAttributeAccessIssue]

    def chance(tokens: Path, given: Path) -> float:
        ids = (*case.prompt, *given, *tokens)
        first = len(ids) - len(tokens)
        return prod(float(table[ids[i - 2], ids[i - 1], ids[i]]) for i in range(first, len(ids)))

    expected: dict[tuple, float] = defaultdict(float)
    for stem in product(range(v), repeat=trunk):
        for branches in product(product(range(v), repeat=length), repeat=k):
            counts = Counter((*stem, *branch) for branch in branches)
            expected[tuple(sorted(counts.items()))] += chance(stem, ()) * prod(chance(b, stem) for b in branches)
    found = summed((tuple(sorted(paths_of(tree).items())), prob) for tree, _, prob in trees(case))
    assert {key for key, value in expected.items() if value > 0} == set(found)
    assert max(abs(found[key] - expected[key]) for key in found) < 1e-12


def test_the_laws_say_that_they_are_paths() -> None:
    """From the place where they part on; for other laws there is nothing to say."""
    policy = tree_policy("delayed:1+3x2")
    plans = policy.plan([(0, 1), (1, 1), (2, 2)], None, IID)
    assert [plan and plan.law for plan in plans] == [IID(1), Paths(3), Paths(2)]
    plans = policy.plan([(1, 1), (2, 1)], None, WithoutReplacement)
    assert [plan and plan.law for plan in plans] == [WithoutReplacement(3), WithoutReplacement(1)]
    (plan,) = policy.plan([(1, 1)], None, Opaque)  # at temperature 0: one path behind each of the likeliest tokens
    assert plan.law == Opaque(3)


def test_their_sizes() -> None:
    policy = tree_policy("delayed:2+3x2")
    assert policy.max_nodes == 9
    assert policy.max_draws == 3
    assert policy.sizes() == (0, 1, 2, 5, 8)
    assert tree_policy("delayed:2+1x3") == tree_policy("chain:5")


@pytest.mark.parametrize(
    ("tree", "rule", "num_tokens"),
    [*(("delayed:1+2x2", rule, 4) for rule in RULES),
     *(("delayed:0+3x2", rule, 3) for rule in ("rrs", "gbv", "block-transport"))],
)  # fmt: skip
def test_they_have_the_targets_law(tree: str, rule: str, num_tokens: int) -> None:
    for family in VERIFIERS[rule].laws if num_tokens == 4 else (IID,):
        found = measure(VERIFIERS[rule], family, Shape(tree, tree_policy(tree), 2), 3, num_tokens)
        assert found.worst <= TOLERANCE
        assert found.accepted > 0.3
