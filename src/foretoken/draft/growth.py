"""A token tree while it grows level by level, for drafters that score it themselves."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foretoken.core.laws import Law, Opaque
from foretoken.core.policy import TreePolicy
from foretoken.core.random import Uniforms
from foretoken.core.sampling import Sampling
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree, TreeBuilder, opaque_tree
from foretoken.core.verifier import LawFamily


@dataclass
class Growth:
    """One sequence's tree while it grows.

    policy: decides which children a node gets.
    law: how they are drawn.
    builder: the nodes so far.
    states: the policy's memory of each node.
    scored: per node its index among the sequence's scored nodes in the cache.
    num_pending: scored nodes up to the root, that is the committed ids that the cache had not seen.
    frontier: nodes that will have children.
    depth: levels drawn so far.
    floor, floors: a node gets no children if the product of q down to it is below `floor`, or below floors[d] where it
        is at depth d and there are any.
    sure: that product per node; only kept where there is a floor.
    uniforms: of a chain, one per level.
    decided: per node the law with the number of draws that a coin decided before q was known.
    """

    policy: TreePolicy
    law: LawFamily
    builder: TreeBuilder
    states: list
    scored: dict[int, int] = field(default_factory=dict)
    num_pending: int = 0
    frontier: list[int] = field(default_factory=list)
    depth: int = 0
    floor: float = 0.0
    floors: Seq[float] = ()
    sure: list[float] = field(default_factory=lambda: [1.0])
    uniforms: Uniforms | None = None
    decided: dict[int, Law] = field(default_factory=dict)

    @property
    def asks(self) -> bool:
        """Whether somebody asks how sure the drafter is of its path."""
        return self.floor > 0 or len(self.floors) > 0

    @property
    def weighs(self) -> bool:
        """Whether q must be a distribution where the likeliest tokens are taken too."""
        return self.asks or self.policy.weighs

    def needs_probabilities(self, sampling: Sampling) -> bool:
        """Whether q must be made as `sampling` says. Else the likeliest tokens are taken, for which scores will do."""
        return self.law is not Opaque or (self.weighs and sampling.temperature > 0)

    def select(self, first: int) -> list[int]:
        """Of the nodes of the lowest level, from node `first` on, those that will have children."""
        chosen = self.policy.select(self.states, first)
        if not self.asks:
            return chosen
        floor = self.floor_at(self.depth)
        return [node for node in chosen if self.sure[node] >= floor]

    def floor_at(self, depth: int) -> float:
        """The least product of q down to a node at this depth for it to have children."""
        return max(self.floor, self.floors[depth] if self.floors else 0.0)

    def suffix(self, node: int) -> list[int]:
        """Drafted tokens from below the root down to `node`."""
        tokens = []
        while node > 0:
            tokens.append(self.builder.tokens[node])
            node = self.builder.parents[node]
        return tokens[::-1]

    def add(
        self,
        nodes: Seq[int],
        laws: Seq[Law],
        q: Float[Tensor, "m v"],
        draws: Seq[tuple[int, ...]],
        states: Seq[Seq[Any]],
        weights: Seq[Seq[float]] | None,
    ) -> None:
        """The children of m nodes. What was not sampled is put on record by `finish`, since not all of it is kept.

        weights: q of each draw; None where nobody asks for it.
        """
        for i, (node, drawn, of_drawn) in enumerate(zip(nodes, draws, states, strict=True)):
            if self.law is Opaque:
                self.builder.append(node, drawn)
                added = range(len(drawn))  # there may be fewer tokens than were asked for
            else:
                added = self.builder.add(node, Siblings(drawn, q[i], laws[i]))
            self.states += [of_drawn[j] for j in added]
            if weights is not None:
                self.sure += [self.sure[node] * weights[i][j] for j in added]

    def finish(self) -> TokenTree:
        """The tree, and `scored` by its nodes. Only children that were not sampled may be left out."""
        kept, sure = self.policy.keep(self.states), tuple(self.sure) if self.floors else None
        if self.law is not Opaque:
            assert kept is None
            return self.builder.build(sure)
        tokens, parents = self.builder.tokens, self.builder.parents
        if kept is not None:
            new = {node: i for i, node in enumerate(kept)}
            tokens, parents = [tokens[node] for node in kept], [-1, *(new[parents[node]] for node in kept[1:])]
            self.scored = {new[node]: place for node, place in self.scored.items() if node in new}
        return opaque_tree(tokens, parents, sure)
