"""A token tree, and the record of how each node's children were drawn."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Law, Opaque
from foretoken.core.shapes import Float


@dataclass(frozen=True, eq=False)
class Siblings:
    """The children of one node: never split, so that a verifier always sees the q a token was really drawn from.

    draws: token ids (the target's) in draw order; a token drawn twice stands twice.
    q: [v] the very vector that was drawn from, over the target's vocabulary; None where the law is opaque.
    law: how they were drawn.
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
    """One draw, or none, from a distribution that is too large to write down but known entry by entry.

    draws: the token drawn, or nothing where what was drawn is no token of the target. q: None; law: opaque, so that
    exact match takes it. psi(token): the exact probability that the draw is `token`; each new one costs the drafter's
    time. The probabilities may sum to less than 1: the rest is that of no token.
    """

    psi: Callable[[int], float]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Tokens that the target scores in one forward. Node 0 is the root: the last committed token.

    tokens[i]: token id (the target's); parents[i] < i, parents[0] = -1.
    siblings[i]: the record of node i's children, None at a leaf. Repeated draws share one node.
    sure[i]: the product of the drafter's q down to node i; None where nobody asked for it.

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
        """Nodes besides the root."""
        return len(self.tokens) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges from the root, per node."""
        depths = [0] * len(self.tokens)
        for i in range(1, len(depths)):
            depths[i] = depths[self.parents[i]] + 1
        return tuple(depths)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {(self.parents[i], self.tokens[i]): i for i in range(1, len(self.tokens))}

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if any."""
        return self._children.get((node, token))

    def path_to(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while path[-1] > 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))


@dataclass
class TreeBuilder:
    """Grows a TokenTree from its root; duplicates among one node's draws become one node."""

    root: int
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    siblings: list[Siblings | None] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.siblings = [self.root], [-1], [None]

    def add(self, node: int, siblings: Siblings) -> dict[int, int]:
        """Record the children of `node`; {index of a token's first draw: its new node}, in draw order."""
        self.siblings[node] = siblings
        known, first = set(), {}
        for j, token in enumerate(siblings.draws):
            if token not in known:
                known.add(token)
                first[j] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.siblings.append(None)
        return first

    def append(self, node: int, tokens: Collection[int]) -> None:
        """Distinct children of `node`, without a record."""
        self.tokens += tokens
        self.parents += [node] * len(tokens)
        self.siblings += [None] * len(tokens)

    def build(self, sure: tuple[float, ...] | None = None) -> TokenTree:
        """sure: as in TokenTree."""
        return TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.siblings), sure)


def opaque_tree(tokens: Sequence[int], parents: Sequence[int], sure: tuple[float, ...] | None = None) -> TokenTree:
    """The tree with these nodes, none of them sampled: every node's children are recorded as opaque, in their order."""
    draws: dict[int, list[int]] = {}
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        draws.setdefault(parent, []).append(token)
    siblings: list[Siblings | None] = [None] * len(tokens)
    for node, below in draws.items():
        siblings[node] = Siblings(tuple(below), None, Opaque(len(below)))
    return TokenTree(tuple(tokens), tuple(parents), tuple(siblings), sure)


def root_only(token: int) -> TokenTree:
    """The tree of plain decoding."""
    return TokenTree((token,), (-1,), (None,))


def chain(
    tokens: Sequence[int], siblings: Sequence[Siblings | None], sure: tuple[float, ...] | None = None
) -> TokenTree:
    """A path: siblings[i] is the record of the draw of tokens[i + 1], None for the last."""
    return TokenTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(siblings), sure)
