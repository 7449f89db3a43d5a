"""The drafter's scored nodes after one text, shared by all that is asked in a step, and psi computed from them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from foretoken.core.sampling import Sampling
from foretoken.vocab.segmentation import CLOSED, Plan, Segmentation
from foretoken.vocab.strings import Followed
from foretoken.vocab.translation import Edge


class Trie:
    """The scored nodes of one row since its last keep. q[i]: [d] what the drafter would write after node i, float64, or
    any scores of it at temperature 0."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.q: list[np.ndarray] = []
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int | None:
        """The scored child of `parent` (-1: of the committed ids) that carries `token`, if any."""
        node = self._children.get((parent, token))
        return node if node is not None and node < len(self.q) else None

    def grow(self, parent: int, token: int) -> int:
        """The child of `parent` that carries `token`; a new one waits to be scored."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    @property
    def waiting(self) -> slice:
        return slice(len(self.q), len(self.tokens))


@dataclass(eq=False)
class Row(Followed):
    """One sequence in the drafter's ids. committed: what the cache holds. ids, edge: the context now."""

    committed: list[int] = field(default_factory=list)
    trie: Trie = field(default_factory=Trie)
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(eq=False)
class Price:
    """psi at one context: the probability of each first target token, asked one at a time."""

    segmentation: Segmentation
    row: Row
    score: Callable[[], None]  # what waits in the row's trie
    node: int  # the context's last id
    edge: Edge
    known: dict[int, float] = field(default_factory=dict)

    def __call__(self, token: int) -> float:
        psi = self.known.get(token)
        if psi is None:
            plan = self.segmentation.plan(token, self.edge)
            psi = self.known[token] = 0.0 if plan is None else self._sum(plan)
        return psi

    def plant(self, plan: Plan) -> list[int]:
        """The plan's nodes in the trie; new ones wait to be scored."""
        nodes = [self.node]
        for token, parent in zip(plan.tokens[1:], plan.parents[1:], strict=True):
            nodes.append(self.row.trie.grow(nodes[parent], token))
        return nodes

    def _sum(self, plan: Plan) -> float:
        nodes = self.plant(plan)
        self.score()
        q = self.row.trie.q
        reach = [1.0 / float(q[self.node][first_tokens(self.segmentation, self.edge)].sum())]
        psi = 0.0
        for i, (node, stops) in enumerate(zip(nodes, plan.stops, strict=True)):
            if i:
                reach.append(reach[plan.parents[i]] * float(q[nodes[plan.parents[i]]][plan.tokens[i]]))
            if len(stops):
                psi += reach[i] * float(q[node][stops].sum())
        return psi


def first_tokens(segmentation: Segmentation, edge: Edge) -> np.ndarray:
    """[d] bool: which drafter tokens may begin a draft."""
    return segmentation.outcomes(b"", edge) != CLOSED
