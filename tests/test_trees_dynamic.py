"""Dynamic trees: the best nodes and no others, exact at any temperature, and plain text at temperature 0."""

import itertools
import math

import pytest
import torch

from foretoken.audit.enumerate import TOLERANCE
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Opaque
from foretoken.core.limits import MAX_NODES
from foretoken.core.policy import TreePolicy
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.names import tree_policy
from foretoken.trees.budget import BudgetTree
from foretoken.trees.dynamic import DynamicTree, OptTree, RankedTree
from foretoken.verify import VERIFIERS
from models_zoo import tiny
from tables import off_target, table_decoding, tiny_engine
from thinning import one_in

MATCH = VERIFIERS["exact-match"]
MOST_DEPTH = 8


def proposed(policy: TreePolicy, v: int, temperature: float = 1.0):
    case = table_decoding(MATCH, Opaque, policy, v, seed=5)
    session = case.drafter.open(1, 64)
    session.join()
    tree = session.propose([Sequence([0, 1], Sampling(temperature=temperature), seeded(0), MOST_DEPTH + 1)])[0]
    return case, session, tree


@pytest.mark.parametrize("budget", [1, 3, 6, 11])
def test_the_tree_holds_the_likeliest_paths(budget: int) -> None:
    """Wide enough to expand all: then the best of all paths of up to 3 tokens, by brute force."""
    case, _, tree = proposed(DynamicTree(budget, width=27, depth=3), 3)
    table = case.drafter.lm.table

    def score(path):
        ids = [0, 1, *path]
        return math.prod(float(table[ids[i], ids[i + 1], ids[i + 2]]) for i in range(len(path)))

    paths = [path for n in (1, 2, 3) for path in itertools.product(range(3), repeat=n)]
    want = sorted(map(score, paths), reverse=True)[:budget]
    found = [score([tree.tokens[i] for i in tree.path_to(node)[1:]]) for node in range(1, len(tree))]
    assert sorted(found, reverse=True) == pytest.approx(want)
    assert all(tree.parents[i] < i for i in range(1, len(tree)))


def plainly(policy: RankedTree, table: torch.Tensor) -> tuple[list[int], list[int]]:
    """(tokens, parents) of the same tree after the ids 0, 1, a node at a time. A dynamic one is grown as published: the
    best of each level get children, even where none of them can be kept."""
    paths: list[tuple[int, ...]] = [()]
    parents, states, frontier = [-1], [(0.0, 0)], [0]
    while frontier:
        first = len(paths)
        for node in frontier:
            q = table[tuple([0, 1, *paths[node]][-2:])]
            for token in q.topk(min(policy.max_draws, len(q))).indices.tolist():
                paths.append((*paths[node], token))
                parents.append(node)
                states.append((states[node][0] + math.log(max(q[token], 1e-300)), states[node][1] + 1))
        if states[-1][1] == min(policy.depth, MOST_DEPTH):
            break
        if isinstance(policy, DynamicTree):
            level = sorted(range(first, len(paths)), key=lambda node: -states[node][0])
            frontier = sorted(level[: policy.max_draws])
        else:
            frontier = policy.select(states, first)
    kept = policy.keep(states)
    return [paths[node][-1] if node else 1 for node in kept], [kept.index(parents[n]) if n else -1 for n in kept]


@pytest.mark.parametrize("v", [3, 13])
@pytest.mark.parametrize(
    "policy",
    [DynamicTree(32), DynamicTree(7, width=3, depth=4), OptTree(32, threshold=0.01), OptTree(5)],
    ids=["dynamic:32", "dynamic:7", "opt-tree:32", "opt-tree:5"],
)
def test_node_for_node_the_tree_of_the_plain_way(policy: RankedTree, v: int) -> None:
    case, session, tree = proposed(policy, v)
    tokens, parents = plainly(policy, case.drafter.lm.table)
    assert tree.tokens == tuple(tokens)
    assert tree.parents == tuple(parents)
    for node, siblings in enumerate(tree.siblings):
        children = tuple(tokens[i] for i in range(1, len(tree)) if parents[i] == node)
        assert (siblings is None) == (not children)
        assert siblings is None or (siblings.draws, siblings.q, siblings.law) == (children, None, Opaque(len(children)))
    for node, place in session.growths[0].scored.items():  # the scored nodes that were kept are the same in the cache
        assert node == 0 or session.rows.trees[0][0][place] == tree.tokens[node]


def test_opt_tree_stops_where_depth_does_not_pay() -> None:
    assert len(proposed(OptTree(6, threshold=0.0), 3)[2]) == 7
    assert max(proposed(OptTree(6, threshold=0.0), 3)[2].depths) > 1
    assert max(proposed(OptTree(6, threshold=5.0), 3)[2].depths) == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("policy", [DynamicTree(3, width=2, depth=3), OptTree(3)], ids=["dynamic", "opt-tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_whole_decodings_have_the_targets_law(policy: TreePolicy, temperature: float) -> None:
    """The drafter's cache included: nodes that were scored and then left out are forgotten."""
    case = table_decoding(MATCH, Opaque, policy, 3, sampling=Sampling(temperature=temperature), num_tokens=4)
    worst, accepted = off_target(case)
    assert worst <= TOLERANCE
    assert accepted > 0.1


def test_the_drafter_keeps_the_accepted_path_of_a_ranked_tree() -> None:
    _, session, tree = proposed(DynamicTree(4, width=3, depth=3), 3)
    leaf = max(range(len(tree)), key=tree.depths.__getitem__)
    path = tree.path_to(leaf)
    session.observe([], [tree], [path])
    known = [tree.tokens[i] for i in path if i in session.growths[0].scored]
    assert session.rows.ids[0] == [0, 1, *known[1:]]


def test_only_the_best_of_a_level_and_of_all_nodes_get_children() -> None:
    states = [(0.0, 0), *[(-float(i), 1) for i in range(10)], *[(-float(i), 2) for i in range(100)]]
    assert DynamicTree(60).select(states, 11) == list(range(11, 21))
    assert DynamicTree(12).select(states, 11) == list(range(11, 17))  # the best twelve: six of each level
    assert DynamicTree(60, depth=2).select(states, 11) == []


def test_fewer_nodes_than_the_budget_are_all_taken_up_to_the_width() -> None:
    policy, states = DynamicTree(60, width=2), [(0.0, 0), (-3.0, 1), (-1.0, 1), (-2.0, 1)]
    assert policy.select(states[:1], 0) == [0]
    assert policy.select(states, 1) == [2, 3]
    assert policy.keep(states) == [0, 1, 2, 3]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tree", one_in(2, ["dynamic:12", "opt-tree:5", "kary:2x2", "chain:4"]))
def test_a_seed_gives_the_text_that_it_gives_without_drafts(tree: str) -> None:
    """Nothing is drawn for the children, and each token takes one uniform, drafted or not."""
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3]]
    options = {"max_new_tokens": 12, "temperature": 0.9, "seed": 7}
    plain = tiny_engine(drafter="none", tree="chain:1").generate(prompts, **options)
    engine = tiny_engine(tree=tree, verifier="exact-match", law="opaque", drafter=tiny("llama"))
    fast = engine.generate(prompts, **options)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    assert sum(r.stats.num_accepted for r in fast) > 1


def test_budget_at_temperature_zero_is_dynamic() -> None:
    assert BudgetTree(9).at(Opaque, 0.0) == DynamicTree(9)
    assert BudgetTree(9).laws(IID) != BudgetTree(9).laws(Opaque)
    trees = [proposed(policy, 3, temperature=0.0)[2] for policy in (BudgetTree(9), DynamicTree(9))]
    assert trees[0].tokens == trees[1].tokens
    assert trees[0].parents == trees[1].parents


@pytest.mark.parametrize("kind", ["dynamic", "opt-tree", "product"])
def test_larger_trees_than_fit_are_refused(kind: str) -> None:
    assert tree_policy(f"{kind}:{MAX_NODES}").max_nodes > MAX_NODES
    with pytest.raises(ForetokenError, match=f"A tree of {MAX_NODES + 1} nodes has more than {MAX_NODES}: make it"):
        tree_policy(f"{kind}:{MAX_NODES + 1}")


@pytest.mark.usefixtures("unchecked")
def test_so_are_those_of_a_budget() -> None:
    with pytest.raises(ForetokenError, match="A tree of 100000 nodes"):
        tiny_engine(tree="budget:100000", verifier=None).generate([3, 1, 4], max_new_tokens=2)
