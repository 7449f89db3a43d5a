"""Randomised drafting (paper 002) on chains and trees: coins decide the number of draws of every node before its q.

A node whose coins all said no gets no draws, but its verification needs q all the same. So q is computed for all such
nodes in one last forward of the drafter, at the same time as the target's own forward: nobody waits for a draft there.
A node at the tree's last level has no coin, no record, and is verified as a leaf: its token comes from p.

The law of a node is IID(N), N ~ Binomial(k, a) (core/coins.py), so any rule for it is lossless; `randomised` is the
paper's rule for k = 1, `transport` the optimum for any k. At temperature 0 there is nothing to win: no coins there.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from foretoken.core import laws
from foretoken.core.draw_each import draw_each
from foretoken.core.interfaces import Path
from foretoken.core.laws import IID, Law, Opaque
from foretoken.core.policy import Plan
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree, TreeBuilder
from foretoken.draft.growth import Growth
from foretoken.draft.lm import CHAIN, LMDrafter, LMDraftSession
from foretoken.models.rows import Rows

Scored = list[Tensor | None]  # q of the nodes of each row


@dataclass(frozen=True)
class RandomisedDrafter(LMDrafter):
    """As LMDrafter, with `law` a Coins and a policy that does not look at q."""

    def open(self, batch: int, slots: int) -> "RandomisedSession":
        rows = self.lm.open(batch, slots)
        assert isinstance(rows, Rows)  # a head has no state of its own to catch up with
        return RandomisedSession(self, rows)


class PendingSiblings(Siblings):
    """A record without draws whose q is computed while the target works; asking for it waits.

    q is None where the drafter failed, which `observe` then raises: the node's draws would have failed alike, so that
    its token comes from p whatever the coins said.
    """

    def __init__(self, law: Law, work: "Future[Scored]", row: int, i: int) -> None:
        for name, value in (("draws", ()), ("law", law), ("_work", work), ("_row", row), ("_i", i)):
            object.__setattr__(self, name, value)

    @property
    def q(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        work: Future[Scored] = self.__dict__["_work"]
        if work.exception() is not None:
            return None
        rows = work.result()[self.__dict__["_row"]]
        return None if rows is None else rows[self.__dict__["_i"]]


@dataclass(frozen=True)
class Chosen:
    """A node that gets draws: `drawing` is its plan's law with the number of draws decided."""

    node: int
    plan: Plan
    drawing: Law


class RandomisedSession(LMDraftSession):
    def __init__(self, drafter: LMDrafter, rows: Rows) -> None:
        super().__init__(drafter, rows)
        self._thread: ThreadPoolExecutor | None = None
        self._work: Future[Scored] | None = None

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        self.growths = [self._root(seq) for seq in sequences]
        waiting: list[list[tuple[int, Law]]] = [[] for _ in sequences]  # nodes without draws, and their law
        for depth in count():
            chosen = [
                self._choose(seq, g, depth, later)
                for seq, g, later in zip(sequences, self.growths, waiting, strict=True)
            ]
            if not any(chosen):
                break
            logits = self._score_nodes(sequences, [[each.node for each in nodes] for nodes in chosen])
            for seq, g, rows, nodes in zip(sequences, self.growths, logits, chosen, strict=True):
                if nodes:
                    self._draw_children(seq, g, rows, nodes)
        if any(waiting):
            self._compute_meanwhile(sequences, waiting)
        return [g.builder.build() for g in self.growths]

    def _root(self, seq: Sequence) -> Growth:
        law = Opaque if seq.sampling.temperature == 0 else self.drafter.law
        policy = self.drafter.policy.at(law, seq.sampling.temperature)
        return Growth(policy, law, TreeBuilder(seq.ids[-1]), [policy.root(None)], {}, 0, [0])

    def _choose(self, seq: Sequence, g: Growth, depth: int, later: list[tuple[int, Law]]) -> list[Chosen]:
        """The frontier's nodes that coins give draws to; those that get none go to `later`."""
        nodes, g.frontier = g.frontier, []
        found = []
        for node in nodes:
            if depth >= seq.depth_left:
                continue
            (plan,) = g.policy.plan([g.states[node]], None, g.law)
            if plan is None:
                continue
            drawing = plan.law
            if isinstance(drawing, IID) and drawing.counts is not None:
                weights = torch.tensor([drawing.counts], dtype=torch.float64)
                drawing = IID(int(laws.draw_iid(weights, seq.uniforms(1, 1))))
            if drawing.k:
                found.append(Chosen(node, plan, drawing))
            else:
                later.append((node, plan.law))
        return found

    def _draw_children(self, seq: Sequence, g: Growth, rows: Tensor, nodes: list[Chosen]) -> None:
        """Draw and record; the children are the new frontier."""
        q = self._weights(seq, g, rows, [g.suffix(chosen.node) for chosen in nodes])
        u = seq.uniforms(len(nodes), max(chosen.drawing.num_uniforms for chosen in nodes))
        draws = draw_each([chosen.drawing for chosen in nodes], q, u)
        grown = g.policy.grow([chosen.plan for chosen in nodes], q, draws)
        for chosen, q_row, kept, states in zip(nodes, q, draws, grown, strict=True):
            record = Siblings(kept, None if g.law is Opaque else q_row, chosen.plan.law)
            for j, child in g.builder.add(chosen.node, record).items():
                g.states.append(states[j])
                g.frontier.append(child)

    def _score_nodes(self, sequences: Seq[Sequence], nodes: list[list[int]]) -> list[Float[Tensor, "_ v"]]:
        """The drafter's logits after nodes of every row; the ids that its cache has not seen come before a root."""
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for row, (seq, g, wanted) in enumerate(zip(sequences, self.growths, nodes, strict=True)):
            if wanted == [0]:
                if len(seq.ids) - self.rows.lengths[row] > CHAIN:
                    self.rows.extend(row, self._known(seq.ids[self.rows.lengths[row] : -1]))
                pending = self._known(seq.ids[self.rows.lengths[row] :])
                g.num_pending, g.scored = len(pending), {0: len(pending) - 1}
                tokens.append(pending)
                parents.append(list(range(-1, len(pending) - 1)))
            else:
                first = g.num_pending + len(g.scored) - 1 if g.scored else 0
                tokens.append(self._known([g.builder.tokens[node] for node in wanted]))
                parents.append([g.scored[g.builder.parents[node]] for node in wanted])
                g.scored.update((node, first + i) for i, node in enumerate(wanted))
        logits = self.rows.score(tokens, parents)
        return [rows[-1:] if wanted == [0] else rows for rows, wanted in zip(logits, nodes, strict=True)]

    def _compute_meanwhile(self, sequences: Seq[Sequence], waiting: list[list[tuple[int, Law]]]) -> None:
        """q of the nodes without draws: in a thread, so that the target's forward begins at once.

        With more than one thread a forward the two take turns: torch's number of threads is one for the process, and
        the pool of the compiled loops serves one caller at a time.
        """
        nodes = [[node for node, _ in later] for later in waiting]
        past = [copy(seq) for seq in sequences]  # the target's walk appends to the sequences' own ids
        for seq in past:
            seq.ids = list(seq.ids)

        def compute() -> Scored:
            logits = self._score_nodes(past, nodes)
            return [
                self._weights(seq, g, rows, [g.suffix(node) for node in wanted]) if wanted else None
                for seq, g, rows, wanted in zip(past, self.growths, logits, nodes, strict=True)
            ]

        self._work = self._start(compute)
        for row, (g, later) in enumerate(zip(self.growths, waiting, strict=True)):
            for i, (node, law) in enumerate(later):
                g.builder.siblings[node] = PendingSiblings(law, self._work, row, i)

    def _start(self, compute: Callable[[], Scored]) -> "Future[Scored]":
        if torch.get_num_threads() > 1 or self.drafter.lm.device.type != "cpu":
            done: Future[Scored] = Future()
            done.set_result(compute())
            return done
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "drafter")
        return self._thread.submit(compute)

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work.result()  # its cache must rest before it is touched; and a failure is to be heard of
        kept: Iterator[list[int]] = (
            [*range(g.num_pending), *(g.scored[node] for node in path[1:] if node in g.scored)]
            for g, path in zip(self.growths, paths, strict=True)
        )
        self.rows.keep(list(kept))
