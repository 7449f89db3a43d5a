"""The walk: from the target's probabilities on a token tree to the tokens that are emitted."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.core.laws import draw_iid
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree

Rule = Callable[[Float[Tensor, " v"], Siblings], Float[Tensor, " v"]]
Probabilities = Callable[[range], Float[Tensor, "m v"]]  # p after each node of a range
Walk = Callable[[TokenTree, Probabilities, torch.Generator], tuple[tuple[int, ...], int]]


@runtime_checkable
class PathVerifier(Protocol):
    """A rule that decides over a whole path at once, and so walks the tree itself."""

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: torch.Generator) -> tuple[tuple[int, ...], int]:
        """As `walk` below."""
        ...


def walk_of(verifier: Rule) -> Walk:
    """The rule's own walk where it has one, else the walk below, node by node."""
    if isinstance(verifier, PathVerifier):
        return verifier.walk
    return lambda tree, probabilities, rng: walk(tree, probabilities, verifier, rng)


def draw(row: Float[Tensor, " v"], rng: torch.Generator) -> int:
    """One token from a distribution, with one uniform of `rng` (a CPU generator, on any device)."""
    u = torch.rand(1, 1, generator=rng, dtype=torch.float64)
    return int(draw_iid(row[None], u))


def follow(tree: TokenTree, tokens: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """(path, the token after it) where tokens[i] is the one certain token after node i: the walk at temperature 0."""
    path = [0]
    while (child := tree.child(path[-1], tokens[path[-1]])) is not None:
        path.append(child)
    return tuple(path), tokens[path[-1]]


def walk(
    tree: TokenTree,
    probabilities: Probabilities,
    verify: Rule,
    rng: torch.Generator,
) -> tuple[tuple[int, ...], int]:
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
