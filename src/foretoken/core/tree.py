"""A token tree, and the record of how each node's children were drawn."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Law, Opaque
from foretoken.core.shapes import Float


@dataclass(frozen=True, eq=False)
class Siblings:
    """The record of how the children of one node were drawn; a verifier needs all three parts together.

    draws: the drawn token ids, of the target's vocabulary, in draw order; a token drawn twice stands twice.
    q: the very weights that the draws were made from, over the target's vocabulary [v]; None where the law is opaque.
    law: how the children were drawn.

    Raises ForetokenError where q is None under another law than the opaque one, or given under the opaque one.
    """

    draws: tuple[int, ...]
    q: Float[Tensor, " v"] | None
    law: Law

    def __post_init__(self) -> None:
        if (self.q is None) != (self.law.name == "opaque"):
            raise ForetokenError(
                f"Siblings with law {self.law.name} "
                + ("need the q they were drawn from." if self.q is None else "have no q: pass None.")
            )


@dataclass(frozen=True, eq=False)
class PricedSiblings(Siblings):
    """One draw, or none, from a distribution that is too large to write down, but of which each entry can be computed.

    draws: the drawn token; empty where the draw is no token of the target.
    q: None.
    law: the opaque one, so that exact-match accepts it.
    psi: psi(token) is the exact probability that the draw is `token`; each new token costs time of the drafter. The
        probabilities may sum to less than 1: the rest is the probability that the draw is no token.
    """

    psi: Callable[[int], float]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """The tokens that the target scores in one forward. Node 0 is the root: the last committed token.

    tokens: the token id of each node, of the target's vocabulary.
    parents: the parent of each node, an index below the node's own; parents[0] = -1.
    siblings: per node the record of its children, None where it has none. Equal draws share one node.
    sure: per node the product of the drafter's q from the root down to it, 1 at the root; None where it is not needed.

        tokens   A B C D      parents -1 0 0 1        A -> B -> D
                                                      A -> C
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    siblings: tuple[Siblings | None, ...]
    sure: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """The number of nodes besides the root."""
        return len(self.tokens) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node: the number of edges from the root."""
        depths = [0] * len(self.tokens)
        for i in range(1, len(depths)):
            depths[i] = depths[self.parents[i]] + 1
        return tuple(depths)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {(self.parents[i], self.tokens[i]): i for i in range(1, len(self.tokens))}

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` whose id is `token`, None where there is none."""
        return self._children.get((node, token))

    def path_to(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to `node`, both included."""
        return tuple(path_to(self.parents, node))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the first one down to `node`, both included; none for -1.

    parents: the parent of each node, -1 for one that has none.
    """
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


class TreeBuilder:
    """A token tree that grows; equal draws at one node become one child. Its lists are those of a TokenTree so far."""

    def __init__(self, root: int) -> None:
        """Begin with the node whose id is `root`."""
        self.tokens, self.parents = [root], [-1]
        self.siblings: list[Siblings | None] = [None]

    def add(self, node: int, siblings: Siblings) -> dict[int, int]:
        """Add the children of a node, with their record.

        node: the index of the parent, which has no children yet.
        siblings: its draws, which may repeat, and how they were drawn.

        Returns {the index of each token's first draw: its new node}, in draw order.
        """
        self.siblings[node] = siblings
        distinct, added = dict.fromkeys(siblings.draws), len(self.tokens)
        self.append(node, distinct)
        return {siblings.draws.index(token): added + i for i, token in enumerate(distinct)}

    def append(self, node: int, tokens: Collection[int]) -> None:
        """Add children to `node` without a record; tokens: their ids, which are distinct."""
        self.tokens += tokens
        self.parents += [node] * len(tokens)
        self.siblings += [None] * len(tokens)

    def build(self, sure: tuple[float, ...] | None = None) -> TokenTree:
        """Return the tree; sure: as in TokenTree."""
        return TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.siblings), sure)


def opaque_tree(tokens: Sequence[int], parents: Sequence[int], sure: tuple[float, ...] | None = None) -> TokenTree:
    """Return the tree with these nodes, none of which was sampled: the law of all children is recorded as opaque.

    tokens, parents, sure: as in TokenTree; the children of a node are recorded in the order of these lists.
    """
    draws: dict[int, list[int]] = {}
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        draws.setdefault(parent, []).append(token)
    siblings: list[Siblings | None] = [None] * len(tokens)
    for node, below in draws.items():
        siblings[node] = Siblings(tuple(below), None, Opaque(len(below)))
    return TokenTree(tuple(tokens), tuple(parents), tuple(siblings), sure)


def root_only(token: int) -> TokenTree:
    """Return the tree of plain decoding, whose one node is `token`, the last committed id."""
    return TokenTree((token,), (-1,), (None,))


def chain(
    tokens: Sequence[int], siblings: Sequence[Siblings | None], sure: tuple[float, ...] | None = None
) -> TokenTree:
    """Return the tree that is one path.

    tokens: the ids from the root down [n].
    siblings: siblings[i] is the record of the draw of tokens[i + 1], None for the last [n].
    sure: as in TokenTree [n].
    """
    return TokenTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(siblings), sure)
