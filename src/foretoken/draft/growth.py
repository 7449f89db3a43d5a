"""A token tree while it grows level by level, for drafters that score it themselves."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foretoken.core.laws import Law, Opaque
from foretoken.core.policy import TreePolicy
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree, TreeBuilder, opaque_tree
from foretoken.core.verifier import LawFamily


@dataclass
class Growth:
    """One sequence's tree while it grows. scored[node]: its index among the row's scored nodes in the cache."""

    policy: TreePolicy
    law: LawFamily
    builder: TreeBuilder
    states: list
    scored: dict[int, int]
    num_pending: int  # scored nodes before the root's children: committed ids the cache had not seen, root last
    frontier: list[int] = field(default_factory=list)
    uniforms: Tensor | None = None  # of a chain: one for each level, whether or not it is reached
    tempered: bool = False  # whether the frontier's scores are q

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
    ) -> None:
        """The children of m nodes. What was not sampled is put on record by `finish`, since not all of it is kept."""
        if self.law is Opaque:
            for node, drawn, of_drawn in zip(nodes, draws, states, strict=True):
                self.builder.append(node, drawn)
                self.states += of_drawn[: len(drawn)]  # there may be fewer tokens than were asked for
            return
        for node, law, row, drawn, of_drawn in zip(nodes, laws, q.unbind(), draws, states, strict=True):
            added = self.builder.add(node, Siblings(drawn, row, law))
            self.states += [of_drawn[j] for j in added]

    def finish(self) -> TokenTree:
        """The tree, and `scored` by its nodes. Only children that were not sampled may be left out."""
        kept = self.policy.keep(self.states)
        if self.law is not Opaque:
            assert kept is None
            return self.builder.build()
        tokens, parents = self.builder.tokens, self.builder.parents
        if kept is not None:
            new = {node: i for i, node in enumerate(kept)}
            tokens, parents = [tokens[node] for node in kept], [-1, *(new[parents[node]] for node in kept[1:])]
            self.scored = {new[node]: place for node, place in self.scored.items() if node in new}
        return opaque_tree(tokens, parents)
