"""Deterministic trees of a draft head's likeliest continuations: EAGLE-2's dynamic tree, and the product tree.

A node's score is the sum of log q along its path. Children are opaque (the likeliest tokens), verified by exact match.
"""

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from foretoken.core.laws import Law, Opaque
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree
from foretoken.draft.heads import HeadDrafter, HeadDraftSession
from foretoken.draft.lm import Growth
from foretoken.heads.rows import GumihoRows, MedusaRows

BEAM = 10  # nodes expanded a level, and children scored at each (EAGLE-2, Gumiho)
WIDE = 35  # children considered at each node of a parallel level (Gumiho's s)
DEEPEST = 7  # levels of a head that could go on for ever


class RankedDrafter(HeadDrafter):
    """Expands the 10 best nodes of each level, scores 10 children each, and keeps the best max_nodes of all.

    Li et al. 2024 (EAGLE-2). A node scores no more than its parent, so the best nodes form a tree. policy: a chain of
    max_nodes - 1 (its shape is not used, its size is the budget).
    """

    @property
    def laws(self) -> tuple[Law, ...]:
        return (Opaque(BEAM),)

    @property
    def serial_levels(self) -> int:
        """Levels drafted one after the other."""
        return self.lm.depth or DEEPEST

    def open(self, batch: int, slots: int) -> "RankedSession":
        return RankedSession(self, self.lm.open(batch, slots + BEAM * DEEPEST))


class RankedSession(HeadDraftSession):
    drafter: RankedDrafter  # pyright: ignore[reportIncompatibleVariableOverride]

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        self._scores: list[list[float]] = [[0.0] for _ in sequences]  # of every node drafted
        super().propose(sequences)
        return [self._best(seq, g, row) for row, (seq, g) in enumerate(zip(sequences, self.growths, strict=True))]

    def _draw(self, sequences: Seq[Sequence], logits: list[Float[Tensor, "_ v"]], depth: int) -> None:
        for seq, g, of_row, rows in zip(sequences, self.growths, self._scores, logits, strict=True):
            nodes, g.frontier = g.frontier, []
            if not nodes:
                continue
            first, found = len(g.builder.tokens), rows.log_softmax(-1).topk(min(BEAM, rows.shape[1]), -1)
            scores = found.values.double().numpy(force=True) + np.array([of_row[node] for node in nodes])[:, None]
            g.builder.tokens += found.indices.flatten().tolist()
            g.builder.parents += [node for node in nodes for _ in range(found.indices.shape[1])]
            flat = scores.ravel()
            of_row += flat.tolist()
            g.states += [0] * len(flat)
            g.builder.siblings += [None] * len(flat)
            if depth < min(self.drafter.serial_levels, seq.depth_left):
                best = np.sort(np.argsort(-flat, kind="stable")[:BEAM])
                g.frontier = (first + best).tolist()

    def _best(self, seq: Sequence, g: Growth, row: int) -> TokenTree:
        """The tree of the best nodes drafted; a parent comes before its children, and wins a tie against them."""
        scores = -np.array(self._scores[row][1:])
        chosen = np.sort(np.argsort(scores, kind="stable")[: self.drafter.max_nodes - 1]) + 1
        return self._tree(g, [int(node) for node in chosen], g.builder.tokens, g.builder.parents)

    def _tree(self, g: Growth, nodes: list[int], tokens: Seq[int], parents: Seq[int]) -> TokenTree:
        """The tree of the root and `nodes` (ascending, closed under parents), with what the cache knows renamed."""
        new = {0: 0} | {node: i for i, node in enumerate(nodes, start=1)}
        children: dict[int, list[int]] = {}
        for node in nodes:
            children.setdefault(new[parents[node]], []).append(tokens[node])
        g.scored = {new[node]: at for node, at in g.scored.items() if node in new}
        return TokenTree(
            (tokens[0], *(tokens[node] for node in nodes)),
            (-1, *(new[parents[node]] for node in nodes)),
            tuple(_opaque(children.get(i)) for i in range(len(nodes) + 1)),
        )


def _depth(g: Growth, node: int) -> int:
    return 0 if node == 0 else 1 + _depth(g, g.builder.parents[node])


def _opaque(draws: list[int] | None) -> Siblings | None:
    return None if draws is None else Siblings(tuple(draws), None, Opaque(len(draws)))


class ProductDrafter(RankedDrafter):
    """Full tree attention done exactly: parallel levels are continued under EVERY path, each node in its own context.

    What a parallel head drafts at a depth does not depend on the tokens between, so any combination of them is a path.
    The tree holds the max_nodes best of that whole product, found best first. In the published form (paper 004,
    section 3.4) a token is appended to another path together with the target's logits of the path it came from; those
    are logits of another context, so the text's law changes: tests/test_product_tree.py.
    """

    @property
    def laws(self) -> tuple[Law, ...]:
        return (Opaque(WIDE),)

    @property
    def serial_levels(self) -> int:
        return self.lm.serial_levels

    def open(self, batch: int, slots: int) -> "ProductSession":
        return ProductSession(self, self.lm.open(batch, slots + BEAM * DEEPEST))


@dataclass(frozen=True)
class Level:
    """The likeliest tokens of one depth under one ancestor, best first, with log q."""

    tokens: list[int]
    log_q: list[float]


class ProductSession(RankedSession):
    rows: GumihoRows | MedusaRows  # pyright: ignore[reportIncompatibleVariableOverride]

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        self._levels: list[dict[int, list[Level]]] = []
        return super().propose(sequences)

    def _draw(self, sequences: Seq[Sequence], logits: list[Float[Tensor, "_ v"]], depth: int) -> None:
        if self.drafter.serial_levels:
            super()._draw(sequences, logits, depth)
        if depth >= self.drafter.serial_levels:
            self._ask()
            for g in self.growths:
                g.frontier = []

    def _ask(self) -> None:
        """All parallel levels of all rows in one call, sorted."""
        depth = (
            1 if self.drafter.serial_levels else 0
        )  # of the nodes that levels belong to: Gumiho's pairs, or the root
        asked = [[node for node in g.scored if _depth(g, node) == depth and g.num_pending] for g in self.growths]
        pairs = [(row, self.growths[row].scored[node]) for row, of_row in enumerate(asked) for node in of_row]
        self._levels = [{} for _ in self.growths]
        if not pairs:
            return
        found = self.rows.parallel_scores(pairs).log_softmax(-1)
        top = found.topk(min(WIDE, found.shape[-1]), -1)
        tokens, log_q = top.indices.tolist(), top.values.double().tolist()
        nodes = ((row, node) for row, of_row in enumerate(asked) for node in of_row)
        for (row, node), its_tokens, its_log_q in zip(nodes, tokens, log_q, strict=True):
            self._levels[row][node] = [Level(t, q) for t, q in zip(its_tokens, its_log_q, strict=True)]

    def _best(self, seq: Sequence, g: Growth, row: int) -> TokenTree:
        """Best first: a node enters when it is the best not yet in; then its next sibling and first child may enter."""
        serial, levels = self._serial_levels(g, self._scores[row]), self._levels[row] if self._levels else {}
        deepest = min(self.drafter.lm.depth or DEEPEST, seq.depth_left)
        tokens, parents, names = (
            [g.builder.tokens[0]],
            [-1],
            [0],
        )  # names: nodes of the serial part, else their ancestor
        depths, heap = [0], []

        def offer(parent: int, rank: int) -> None:
            depth = depths[parent]
            if depth >= deepest:
                return
            if depth < self.drafter.serial_levels:
                level = serial.get(names[parent])
            else:
                level = levels[names[parent]][depth - self.drafter.serial_levels] if names[parent] in levels else None
            if level is not None and rank < len(level.tokens):
                heapq.heappush(heap, (-(scores[parent] + level.log_q[rank]), parent, rank, level.tokens[rank]))

        scores, ends = [0.0], self.drafter.serial_levels
        by_token = {(g.builder.parents[i], g.builder.tokens[i]): i for i in range(1, len(g.builder.tokens))}
        scored: dict[int, int] = {0: g.scored[0]}
        offer(0, 0)
        while heap and len(tokens) < self.drafter.max_nodes:
            score, parent, rank, token = heapq.heappop(heap)
            node, depth = len(tokens), depths[parent] + 1
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            scores.append(-score)
            name = by_token[names[parent], token] if depth <= ends else names[parent]
            if depth <= ends and name in g.scored:
                scored[node] = g.scored[name]
            names.append(g.builder.parents[name] if depth == ends and ends > 1 else name)
            offer(parent, rank + 1)
            offer(node, 0)
        g.scored = scored
        return self._tree(g, list(range(1, len(tokens))), tokens, parents)

    def _serial_levels(self, g: Growth, scores: list[float]) -> dict[int, Level]:
        """{node: its children}, of the nodes that the serial part expanded."""
        out: dict[int, Level] = {}
        for node in range(1, len(g.builder.tokens)):
            parent = g.builder.parents[node]
            level = out.setdefault(parent, Level([], []))
            level.tokens.append(g.builder.tokens[node])
            level.log_q.append(scores[node] - scores[parent])
        return out
