"""The most that any joint rule can accept on a tree of sampled drafts, by a linear program over all its outcomes.

A rule is given the drawn tree, accepts the path down to one of its nodes, and draws the token after it; what follows
has the target's law. Let m(T, x) be the probability that T is drawn and the path x accepted, and a(x) the probability
that the accepted path begins with x: the sum of m(T, y) over all trees and all y that begin with x. Then

    sum over x of m(T, x) = P(T),    m(T, x) = 0 where x is no path of T,    a(x z) <= a(x) p(z | x)

are necessary and sufficient for a lossless rule (docs/theory.md, Theorem 21), and it accepts the sum of a(x) over the
x that are not empty.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretoken.audit import decoding
from foretoken.audit.branching import outcomes
from foretoken.audit.table import TableLM
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID
from foretoken.core.policy import TreePolicy
from foretoken.core.random import Random
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence as Running
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.core.verifier import Verifier
from foretoken.core.walk import ReadyScores, walk_of
from foretoken.models.target import LMTarget

Path = tuple[int, ...]  # tokens below the root
PROMPT = (0, 1)
MOST_TREES = 100_000


@dataclass(frozen=True)
class Drawn:
    """Every tree that may be drawn behind one prompt, and the target's law.

    trees: each with its probability.
    depth: of the deepest.
    p: the target's distribution after the prompt and a path [v].
    """

    trees: Sequence[tuple[TokenTree, float]]
    depth: int
    p: Callable[[Path], Float[Tensor, " v"]]


@dataclass(frozen=True)
class Optimum:
    """accepted: the largest acceptance length. through: a(x) of every path x of any tree, the empty one included."""

    accepted: float
    through: dict[Path, float]


def drawn(policy: TreePolicy, v: int, seed: int) -> Drawn:
    """Draw i.i.d. children by the real drafter, in every way, for two random tables over v tokens.

    Raises ForetokenError where there are too many trees.
    """
    target, drafter = decoding.table_pair(policy, IID, v, seed)
    depth = len(policy.sizes()) - 1

    def run(rng: Random) -> TokenTree:
        session = drafter.open(1, policy.max_nodes + len(PROMPT))
        session.join()
        return session.propose([Running(list(PROMPT), Sampling(), rng, depth + 1)])[0]

    trees = []
    for outcome in outcomes(run):
        trees.append(outcome)
        if len(trees) > MOST_TREES:
            raise ForetokenError(f"More than {MOST_TREES} trees of {v} tokens: take fewer tokens or a smaller tree.")
    table = _table(target)
    return Drawn(trees, depth, lambda path: table[(*PROMPT, *path)[-2], (*PROMPT, *path)[-1]])


def _table(target: LMTarget) -> Float[Tensor, "v v v"]:
    assert isinstance(target.lm, TableLM)
    return target.lm.table


def paths_of(tree: TokenTree) -> list[Path]:
    """The path of every node of a tree, in the order of the nodes."""
    return [tuple(tree.tokens[i] for i in tree.path_to(node)[1:]) for node in range(len(tree))]


def accepted(rule: Verifier, case: Drawn) -> float:
    """Draft tokens that a rule accepts a step, on average over all trees and all that its walk may draw."""
    walk, total = walk_of(rule), 0.0
    for tree, prob in case.trees:
        scores = ReadyScores(torch.stack([case.p(path) for path in paths_of(tree)]))
        kept = outcomes(lambda rng, tree=tree, scores=scores: len(walk(tree, scores, rng)[0]) - 1)
        total += prob * sum(number * chance for number, chance in kept)
    return total


def optimum(case: Drawn) -> Optimum:
    """Solve the program; trees of the same paths are one."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    chances: dict[frozenset[Path], float] = defaultdict(float)
    for tree, prob in case.trees:
        chances[frozenset(paths_of(tree))] += prob
    ends = [(i, path) for i, paths in enumerate(chances) for path in paths]  # the variables m(T, x)
    places = {path: i for i, path in enumerate(sorted(set().union(*chances), key=len))}
    begins = [(places[x[:n]], j) for j, (_, x) in enumerate(ends) for n in range(len(x) + 1)]
    ones = np.ones(len(begins))
    through = csr_array((ones, np.array(begins).T), shape=(len(places), len(ends)))
    below = [path for path in places if path]
    above = np.array([places[path[:-1]] for path in below])
    p = np.array([float(case.p(path[:-1])[path[-1]]) for path in below])
    of_tree = csr_array((np.ones(len(ends)), ([i for i, _ in ends], range(len(ends)))), shape=(len(chances), len(ends)))
    found = linprog(
        -np.array([len(path) for _, path in ends]),
        A_ub=through[[places[path] for path in below]] - through[above].multiply(p[:, None]),
        b_ub=np.zeros(len(below)),
        A_eq=of_tree,
        b_eq=np.array(list(chances.values())),
        method="highs",
    )
    if found.status != 0:
        raise ForetokenError(f"The linear program was not solved: {found.message}")
    a = through @ found.x
    return Optimum(-float(found.fun), {path: float(a[i]) for path, i in places.items()})
