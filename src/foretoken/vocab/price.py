"""The drafter's scored nodes after one text, which everything in a step shares, and psi, which is computed from them.

psi(t) is the probability that the drafter's text goes on with target token t: see vocab/slrs.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from foretoken.core.sampling import Sampling
from foretoken.vocab.segmentation import Plan, Segmentation
from foretoken.vocab.strings import Followed
from foretoken.vocab.translation import Edge


class Trie:
    """The drafter's nodes of one row since its last `keep`: first those that are scored, then those that wait for it.

    tokens, parents: the drafter id and the parent of each node; parent -1 is the committed text.
    q: q[i] is the drafter's distribution after scored node i [d], float64; scores that rank alike at temperature 0.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.q: list[np.ndarray] = []
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int | None:
        """Return the scored child of node `parent` with drafter id `token`, None if there is none.

        parent: -1 for a child of the committed text.
        """
        node = self._children.get((parent, token))
        return node if node is not None and node < len(self.q) else None

    def grow(self, parent: int, token: int) -> int:
        """Return the child of node `parent` with drafter id `token`; it is added, to be scored, if there is none."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    @property
    def waiting(self) -> slice:
        """The nodes that are not scored yet, as a slice of `tokens`."""
        return slice(len(self.q), len(self.tokens))


@dataclass(eq=False)
class Row(Followed):
    """One sequence in the drafter's ids; the inherited `ids` and `edge` are the context.

    committed: the drafter's ids that its cache holds as committed text.
    trie: the nodes after them.
    sampling: the sequence's, without what refers to the target's ids.
    """

    committed: list[int] = field(default_factory=list)
    trie: Trie = field(default_factory=Trie)
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(eq=False)
class Price:
    """psi at one context: the probability of each target token to come first, computed one at a time.

    segmentation: the feasible drafts of each token.
    row: the sequence.
    score: scores all nodes that wait in the row's trie.
    node: the node of the context's last drafter id.
    edge: the end of the context.
    known: {target id: psi} of those that were computed.
    """

    segmentation: Segmentation
    row: Row
    score: Callable[[], None]
    node: int
    edge: Edge
    known: dict[int, float] = field(default_factory=dict)

    def __call__(self, token: int) -> float:
        """Return psi of target id `token`, in [0, 1]; a new one may cost a forward of the drafter."""
        psi = self.known.get(token)
        if psi is None:
            plan = self.segmentation.plan(token, self.edge)
            psi = self.known[token] = 0.0 if plan is None else self._sum(plan)
        return psi

    def plant(self, plan: Plan) -> list[int]:
        """Return the trie's node of each node of `plan`; those that are new there wait to be scored."""
        nodes = [self.node]
        for token, parent in zip(plan.tokens[1:], plan.parents[1:], strict=True):
            nodes.append(self.row.trie.grow(nodes[parent], token))
        return nodes

    def _sum(self, plan: Plan) -> float:
        nodes = self.plant(plan)
        self.score()
        q = self.row.trie.q
        reach = [1.0 / float(q[self.node][~self.segmentation.closed(self.edge)].sum())]
        psi = 0.0
        for i, (node, stops) in enumerate(zip(nodes, plan.stops, strict=True)):
            if i:
                reach.append(reach[plan.parents[i]] * float(q[nodes[plan.parents[i]]][plan.tokens[i]]))
            if len(stops):
                psi += reach[i] * float(q[node][stops].sum())
        return psi
