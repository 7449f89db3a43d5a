"""The walk: from the target's scores of a token tree to the tokens that are emitted."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.random import Random
from foretoken.core.scores import NodeScores, draw
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree

Rule = Callable[[Float[Tensor, " v"], Siblings], Float[Tensor, " v"]]
Probabilities = Callable[[range], Float[Tensor, "m v"]]  # p after each node of a range
Walk = Callable[[TokenTree, NodeScores, Random], tuple[tuple[int, ...], int]]


@runtime_checkable
class PathVerifier(Protocol):
    """A rule that decides over a whole path at once, and so walks the tree itself."""

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: Random) -> tuple[tuple[int, ...], int]:
        """As `walk` below."""
        ...


def walk_of(verifier: Rule) -> Walk:
    """The walk of a rule: its own where it decides over whole paths, else node by node.

    Greedy scores need no rule: every p is one-hot, so that every rule is exact match (docs/losslessness.md, section 3).
    Nor does a tree that is only its root: its token is drawn from p.
    """
    own = verifier.walk if isinstance(verifier, PathVerifier) else partial(_by_node, verifier)

    def of_scores(tree: TokenTree, scores: NodeScores, rng: Random) -> tuple[tuple[int, ...], int]:
        if scores.greedy:
            return follow(tree, scores.argmax())
        if tree.siblings[0] is None:
            return (0,), scores.draw(0, rng)
        return own(tree, scores.p, rng)

    return of_scores


def _by_node(verify: Rule, tree: TokenTree, probabilities: Probabilities, rng: Random) -> tuple[tuple[int, ...], int]:
    return walk(tree, probabilities, verify, rng)


def follow(tree: TokenTree, tokens: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """(path, the token after it) where tokens[i] is the one certain token after node i: the walk at temperature 0."""
    path = [0]
    while (child := tree.child(path[-1], tokens[path[-1]])) is not None:
        path.append(child)
    return tuple(path), tokens[path[-1]]


def walk(tree: TokenTree, probabilities: Probabilities, verify: Rule, rng: Random) -> tuple[tuple[int, ...], int]:
    """The accepted path (node indices, root first) and the one token that follows it.

    At each node the row verify(p, siblings) is drawn from once; if a child carries the token the walk descends, else
    it stops. Accepted, recovered and bonus tokens are this one case. `probabilities` is asked for visited nodes only.
    Children of opaque law, that is without a q, are matched exactly: row = p, which is the optimum for them.
    """
    path = [0]
    while True:
        node = path[-1]
        siblings = tree.siblings[node]
        p = probabilities(range(node, node + 1))[0]
        row = p if siblings is None or siblings.q is None else verify(p, siblings)
        token = draw(row, rng)
        child = tree.child(node, token)
        if child is None:
            return tuple(path), token
        path.append(child)
