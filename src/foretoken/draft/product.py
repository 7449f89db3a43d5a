"""The product tree of a head with parallel levels: full tree attention, exactly (Li et al. 2025, Gumiho, s. 3.3).

What a parallel level drafts does not depend on the tokens between it and the serial levels, so that any combination of
its tokens is a path. In the published form a token is appended to another path together with the target's logits of
the path that it came from. Those are logits of another context, which changes the distribution of the text:
tests/test_product_tree.py. Here every node is scored below its own ancestors.
"""

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from foretoken.core.laws import Law, Opaque
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree, opaque_tree
from foretoken.draft.growth import Growth
from foretoken.draft.heads import HeadDrafter, HeadDraftSession
from foretoken.heads.eagle import GumihoRows
from foretoken.heads.flat import LevelRows


@dataclass(frozen=True)
class ProductDrafter(HeadDrafter):
    """Drafts the `budget` best nodes of the whole product by the sum of log q along the path.

    policy: grows the serial levels, by the likeliest tokens, and selects those nodes of the last one for which the
        parallel levels are computed; its states are those of a RankedTree.
    serial: the number of levels that are drafted one after the other.
    budget: the most nodes of the tree besides the root.
    wide: the most children considered at a node of the parallel levels.
    """

    serial: int
    budget: int
    wide: int

    @property
    def laws(self) -> tuple[Law, ...]:
        return (Opaque(max(self.policy.max_draws, self.wide)),)

    def open(self, batch: int, slots: int) -> "ProductSession":
        return ProductSession(self, self.lm.open(batch, slots))


@dataclass(frozen=True)
class Level:
    """The likeliest tokens below a node, best first.

    tokens, log_q: their ids, and ln of their q.
    below: per token the serial node by which its own children are found: its own node, or, in the parallel levels, the
        node that these levels were computed for.
    """

    tokens: list[int]
    log_q: list[float]
    below: list[int]


class ProductSession(HeadDraftSession):
    """The head's cache of one batch; the serial levels grow as usual, and `_finish` makes the tree of all levels."""

    drafter: ProductDrafter  # pyright: ignore[reportIncompatibleVariableOverride]
    rows: GumihoRows | LevelRows  # pyright: ignore[reportIncompatibleVariableOverride]

    def _draw(self, seq: Sequence, g: Growth, nodes: list[int], q: Float[Tensor, "m _"]) -> None:
        if g.depth < self.drafter.serial:  # below the last serial level the parallel levels take over
            super()._draw(seq, g, nodes, q)

    def _finish(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        parallel = self._parallel_levels(sequences)
        return [self._best(seq, g, levels) for seq, g, levels in zip(sequences, self.growths, parallel, strict=True)]

    def _parallel_levels(self, sequences: Seq[Sequence]) -> list[dict[int, list[Level]]]:
        """Return per row {node of the last serial level: its parallel levels}, all rows in one call."""
        serial = self.drafter.serial
        owners = [[node for node in g.scored if g.states[node][1] == serial] for g in self.growths]
        places = [(row, self.growths[row].scored[node]) for row, nodes in enumerate(owners) for node in nodes]
        if not places:
            return [{} for _ in owners]
        scores = self.rows.parallel_scores(places).split([len(nodes) for nodes in owners])
        return [self._levels(*each) for each in zip(sequences, self.growths, owners, scores, strict=True)]

    def _levels(
        self, seq: Sequence, g: Growth, nodes: list[int], logits: Float[Tensor, "n m v"]
    ) -> dict[int, list[Level]]:
        if not nodes:
            return {}
        q = self._weights(
            seq, g, logits.flatten(0, 1), [g.suffix(node) for node in nodes for _ in range(logits.shape[1])]
        )
        top = q.topk(min(self.drafter.wide, q.shape[1]), -1)
        shape = (*logits.shape[:2], -1)
        tokens, log_q = top.indices.view(shape).tolist(), top.values.double().log().view(shape).tolist()
        return {
            node: [Level(t, x, [node] * len(t)) for t, x in zip(*of_node, strict=True)]
            for node, *of_node in zip(nodes, tokens, log_q, strict=True)
        }

    def _serial_levels(self, g: Growth) -> dict[int, Level]:
        """Return {node: its children} for the nodes that have children in the serial levels."""
        out: dict[int, Level] = {}
        for node in range(1, len(g.builder.tokens)):
            parent, log_score = g.builder.parents[node], g.states[node][0]
            level = out.setdefault(parent, Level([], [], []))
            level.tokens.append(g.builder.tokens[node])
            level.log_q.append(log_score - g.states[parent][0])
            level.below.append(node)
        return out

    def _best(self, seq: Sequence, g: Growth, parallel: dict[int, list[Level]]) -> TokenTree:
        """Return the tree of the best nodes of all levels.

        The best node that is not in the tree yet enters it; then its next sibling and its first child may enter too.
        """
        serial, depth = self._serial_levels(g), self.drafter.serial
        deepest = min(self.drafter.lm.head.depth or depth, seq.depth_left)
        tokens, parents, owners, depths, scores = [g.builder.tokens[0]], [-1], [0], [0], [0.0]
        heap: list[tuple[float, int, int]] = []

        def level(node: int) -> Level | None:
            if depths[node] >= deepest:
                return None
            if depths[node] < depth:
                return serial.get(owners[node])
            return parallel[owners[node]][depths[node] - depth] if owners[node] in parallel else None

        def offer(parent: int, rank: int) -> None:
            children = level(parent)
            if children is not None and rank < len(children.tokens) and children.log_q[rank] > float("-inf"):
                heapq.heappush(heap, (-(scores[parent] + children.log_q[rank]), parent, rank))

        offer(0, 0)
        while heap and len(tokens) <= self.drafter.budget:
            score, parent, rank = heapq.heappop(heap)
            children = level(parent)
            assert children is not None
            tokens.append(children.tokens[rank])
            parents.append(parent)
            owners.append(children.below[rank])
            depths.append(depths[parent] + 1)
            scores.append(-score)
            offer(parent, rank + 1)
            offer(len(tokens) - 1, 0)
        g.scored = {
            node: g.scored[owner] for node, owner in enumerate(owners) if depths[node] <= depth and owner in g.scored
        }
        return opaque_tree(tokens, parents)
