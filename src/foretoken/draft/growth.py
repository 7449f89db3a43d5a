"""A token tree that grows level by level, for drafters that score its nodes themselves."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foretoken.core.laws import Law, Opaque
from foretoken.core.policy import TreePolicy
from foretoken.core.random import Uniforms
from foretoken.core.sampling import Sampling
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree, TreeBuilder, opaque_tree, path_to
from foretoken.core.verifier import LawFamily


@dataclass
class Growth:
    """The tree of one sequence while it grows.

    policy: the tree policy.
    law: how children are drawn.
    builder: the nodes so far.
    states: the policy's state of each node.
    scored: per node that the drafter has scored its index among the sequence's scored nodes in the cache.
    num_pending: scored nodes up to the root, that is the number of committed ids that the cache did not have.
    frontier: the nodes that will have children.
    depth: the number of levels drawn so far.
    floor, floors: a node gets no children if the product of q down to it is below `floor`, or below floors[d] where it
        is at depth d and there are floors.
    sure: that product per node; beyond the root only where there is a floor.
    uniforms: those of a chain, one per level [levels, 1]; None for other trees.
    decided: per node the law with the number of draws that coins decided before q was known.
    allowed: whether it may have nodes besides the root, and so counts as a tree of the policy.
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
    allowed: bool = False

    @property
    def asks(self) -> bool:
        """Whether the product of q down to each node is needed."""
        return self.floor > 0 or len(self.floors) > 0

    @property
    def weighs(self) -> bool:
        """Whether q must be a distribution even where the likeliest tokens are taken."""
        return self.asks or self.policy.weighs

    def needs_probabilities(self, sampling: Sampling) -> bool:
        """Whether q must be made as `sampling` says; else the likeliest tokens are taken, by scores."""
        return self.law is not Opaque or (self.weighs and sampling.temperature > 0)

    def select(self, first: int) -> list[int]:
        """Return the nodes of the lowest level that will have children; first: the index of its first node."""
        chosen = self.policy.select(self.states, first)
        if not self.asks:
            return chosen
        floor = self.floor_at(self.depth)
        return [node for node in chosen if self.sure[node] >= floor]

    def floor_at(self, depth: int) -> float:
        """Return the least product of q down to a node at this depth with which it gets children."""
        return max(self.floor, self.floors[depth] if self.floors else 0.0)

    def suffix(self, node: int) -> list[int]:
        """Return the draft tokens from below the root down to `node`."""
        return [self.builder.tokens[i] for i in path_to(self.builder.parents, node)[1:]]

    def add(
        self,
        nodes: Seq[int],
        laws: Seq[Law],
        q: Float[Tensor, "m v"],
        draws: Seq[tuple[int, ...]],
        states: Seq[Seq[Any]],
        weights: Seq[Seq[float]] | None,
    ) -> None:
        """Add the children of m nodes. Children that were not sampled are recorded by `finish`, which keeps only some.

        nodes: the parents [m].
        laws: the law of the children of each parent [m].
        q: the weights that they were drawn from, over the target's vocabulary [m, v]; not used if they are opaque.
        draws: per node the drawn ids, of the target's vocabulary.
        states: per node the policy's state of each draw.
        weights: per node q of each draw; None where the product of q is not needed.
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
        """Return the tree, without the nodes that the policy drops; `scored` then has the indices of the tree's nodes.

        Only children that were not sampled may be dropped.
        """
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
