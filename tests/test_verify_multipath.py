"""Rule `gbv`: the law of the chosen path, the published algorithm, its ties, and what is wrong without them."""

import random
from collections import defaultdict
from itertools import product
from math import prod
from typing import Literal

import pytest
import torch
from torch import Tensor

from foretoken.audit import decoding
from foretoken.core.laws import IID
from foretoken.core.tree import TokenTree
from foretoken.trees import static
from foretoken.trees.paths import PathTree
from foretoken.verify import VERIFIERS, multipath
from foretoken.verify.multipath import choose
from rates import summed
from tables import table_decoding, trees, walk_law
from thinning import one_in
from whole_texts import Outcomes, Path, Table, add_text, backwards, chance, deviation, table

Ties = Literal["one order", "as published"]
GBV = VERIFIERS["gbv"]


def rows(v: int, depth: int, seed: int) -> Table:
    return table(v, depth, torch.Generator().manual_seed(seed))


def block_verification(p: Table, q: Table, path: Path) -> Outcomes:
    """Sun et al. 2024, arXiv:2403.10444, Algorithm 2, on one path: P(accepted path, token after it)."""
    w, accept, rows = 1.0, [], []
    for i, x in enumerate(path):
        rows.append((w * p[path[:i]] - q[path[:i]]).clamp(min=0))
        mass = float(rows[-1].sum())
        accept.append(mass / (mass + 1 - w) if mass + 1 - w > 0 else 1.0)
        w = min(1.0, w * float(p[path[:i]][x]) / float(q[path[:i]][x]))
    return backwards(path, [*accept, w], [*rows, p[path]])


def published(paths: list[Path], p: Table, q: Table, ties: Ties = "one order") -> Outcomes:
    """Greedy multi-path block verification of K i.i.d. paths, Thomas and Pal 2026, arXiv:2602.16961.

    In the notation of the published code: A is the mass of the paths below the prefix, x its own, y and z those below
    and at each next token. `as published`: p/q is cut at 1, and the running mass takes equal tokens in the order of
    their ids, while the choice takes the one that was drawn first.
    """
    k, length = len(paths), len(paths[0])
    chosen: Path = ()
    joint, up_to = 1.0, 1.0
    skew: Table = {}
    for _ in range(length):
        at_p, at_q = p[chosen], q[chosen]
        ratio = at_p / at_q
        if ties == "as published":
            ratio = ratio.clamp(max=1)
            order = torch.argsort(ratio, stable=True)
        else:
            order = torch.argsort(-ratio, stable=True).flip(0)
        running = torch.empty_like(at_q)
        running[order] = at_q[order].cumsum(0)
        below = up_to - joint
        y, z = joint * (running - at_q), joint * at_q
        mass = (below + y + z) ** k - (below + y) ** k
        skew[chosen] = mass / mass.sum()
        drawn = list(dict.fromkeys(path[len(chosen)] for path in paths if path[: len(chosen)] == chosen))
        if ties == "one order":
            rank = {int(x): i for i, x in enumerate(order)}
            x = max(drawn, key=lambda token: rank[token])
        else:
            x = max(drawn, key=lambda token: float(ratio[token]))  # of equals the first
        up_to = below + joint * float(running[x])
        joint *= float(at_q[x])
        chosen = (*chosen, x)
    return block_verification(p, skew, chosen)


def law_of_published(p: Table, q: Table, v: int, k: int, length: int, ties: Ties) -> dict[Path, float]:
    """The law of the next length + 1 tokens, what comes after the step from the target."""
    law: dict[Path, float] = {}
    for drawn in product(list(product(range(v), repeat=length)), repeat=k):
        for (path, token), prob in published(list(drawn), p, q, ties).items():
            add_text(law, (*path, token), prod(chance(q, each) for each in drawn) * prob, p, length + 1)
    return law


@pytest.mark.parametrize(("v", "k", "length"), [(3, 2, 2), (2, 3, 2), (2, 2, 3), (4, 3, 1)])
def test_the_chosen_path_has_its_law(v: int, k: int, length: int) -> None:
    """Summed over all k paths, the first in the order is a path with the probability that `choose` gives it."""
    p, q = rows(v, length, seed=1), rows(v, length, seed=2)
    expected: dict[Path, float] = defaultdict(float)
    for paths in product(list(product(range(v), repeat=length)), repeat=k):
        expected[min(paths, key=lambda path: [place(p[path[:i]], q[path[:i]], x) for i, x in enumerate(path)])] += prod(
            chance(q, path) for path in paths
        )
    for path in expected:
        found, beta = 1.0, 1.0
        for i, x in enumerate(path):
            _, law, beta = choose(p[path[:i]], q[path[:i]], (x,), k, beta)
            found *= float(law[x])
        assert found == pytest.approx(expected[path], abs=1e-14)


def place(p: Tensor, q: Tensor, token: int) -> tuple[float, int]:
    """Where a token stands in the order."""
    return -float(p[token] / q[token]), token


def test_equal_ratios_are_ordered_by_their_ids() -> None:
    p, q = torch.tensor([0.2, 0.4, 0.4]).double(), torch.tensor([0.1, 0.2, 0.7]).double()
    for draws in ((1, 0), (0, 1), (2, 1, 0)):
        assert choose(p, q, draws, 2, 1.0)[0] == 0
    _, law, _ = choose(p, q, (0,), 2, 1.0)
    assert law.tolist() == pytest.approx([1 - 0.9**2, 0.9**2 - 0.7**2, 0.7**2])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("k", "length", "seed"), one_in(4, [(*size, seed) for size in [(2, 2), (3, 2), (2, 3)] for seed in range(3)])
)
def test_it_is_the_published_algorithm(k: int, length: int, seed: int) -> None:
    """Given the drawn paths, each accepted path and the token after it have the same probability to 1e-12."""
    v = 2
    p_of, case = rows(v, length, seed), table_decoding(GBV, IID, PathTree(0, k, length), v, seed)
    for tree, _, _ in trees(case):
        tokens = [tuple(tree.tokens[i] for i in tree.path_to(node)[1:]) for node in range(len(tree))]
        q = {path: s.q for path, s in zip(tokens, tree.siblings, strict=True) if s is not None and s.q is not None}
        expected = published(drawn_paths(tree, k), p_of, q)
        law = walk_law(GBV, tree, lambda node, at=tokens: p_of[at[node]])
        found = summed(((tokens[path[-1]], token), prob) for (path, token), prob in law.items())
        assert decoding.deviation(found, expected) < 1e-12


def drawn_paths(tree: TokenTree, k: int) -> list[Path]:
    """The paths of a tree of k paths, in some order."""
    open_ = [((), 0)] * k
    while (siblings := tree.siblings[open_[0][1]]) is not None:
        waiting = defaultdict(list)
        for node in {node for _, node in open_}:
            siblings = tree.siblings[node]
            waiting[node] = list(siblings.draws)
        open_ = [((*path, x := waiting[node].pop()), tree.child(node, x)) for path, node in open_]
    return [path for path, _ in open_]


@pytest.mark.parametrize("k", [2, 3])
def test_ties_as_published_are_lossy(k: int) -> None:
    """p/q cut at 1 leaves ties among the tokens likelier to the target, which the published code orders in two ways."""
    worst = {
        ties: max(
            deviation(law_of_published(rows(3, 2, seed), rows(3, 2, 100 + seed), 3, k, 1, ties), rows(3, 2, seed))
            for seed in range(4)
        )
        for ties in ("one order", "as published")
    }
    assert worst["one order"] < 1e-12
    assert worst["as published"] > 0.02


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [PathTree(0, 2, 2), static.kary(2, 2)], ids=["paths", "kary"])
def test_the_law_of_single_draws_is_caught(shape: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that was chosen among several, verified as if it were the only one, is lossy."""

    def unskewed(p, q, draws, k, beta):
        token, _, beta = choose(p, q, draws, k, beta)
        return token, q.double(), beta

    monkeypatch.setattr(multipath, "choose", unskewed)
    assert decoding.measure(GBV, IID, decoding.Shape("wrong", shape, 2), 3).worst > 0.01


@pytest.mark.usefixtures("unchecked")
def test_paths_taken_for_draws_of_each_node_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every node has draws of its own, what was chosen above says nothing of them; the paths' law is lossy."""
    assert decoding.measure(GBV, IID, decoding.Shape("kary", static.kary(2, 2), 2), 0).exact
    monkeypatch.setattr(multipath, "Paths", IID)
    assert decoding.measure(GBV, IID, decoding.Shape("kary", static.kary(2, 2), 2), 0).worst > 0.01


def test_rows_on_the_way_of_deep_paths_stay_distributions() -> None:
    """The share of a path falls to nothing on the way down, and q~ goes to q."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    beta = 1.0
    for _ in range(40):
        p, q = (torch.softmax(4 * torch.randn(1000, generator=generator), 0) for _ in range(2))
        _, law, beta = choose(p, q, tuple(rng.choices(range(1000), q.tolist(), k=8)), 8, beta)
        assert float(law.min()) >= 0
        assert float(law.sum()) == pytest.approx(1, abs=1e-12)
        assert 0 <= beta <= 1
    assert float((law - q.double() / q.double().sum()).abs().sum()) < 1e-6
