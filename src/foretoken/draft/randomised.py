"""Randomised drafting (Toner et al. 2025) on chains and trees: coins decide how many draws a node has before its q.

A node whose coins allow no draw needs q for its verification all the same. So q is computed for all such nodes in one
last forward of the drafter, at the same time as the target's own forward, which does not wait for it. A node at the
tree's last level has no coin and no record, and is verified as a leaf: its token comes from p.

The law of a node is IID(N), N ~ Binomial(k, a) (`core.laws.Coins`), so that any rule for it is lossless; `randomised`
is the paper's rule for k = 1, `transport` the optimum for any k. At temperature 0 coins gain nothing: there are none.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from foretoken.core.draws import draw_iid
from foretoken.core.interfaces import Path
from foretoken.core.laws import IID, Law
from foretoken.core.sequence import Sequence
from foretoken.core.tree import Siblings, TokenTree
from foretoken.draft.growth import Growth
from foretoken.draft.lm import LMDrafter, LMDraftSession
from foretoken.models.rows import Rows

Scored = list[Tensor]  # q of the nodes of each row


@dataclass(frozen=True)
class RandomisedDrafter(LMDrafter):
    """An LMDrafter whose `law` is a Coins, and whose policy does not depend on q."""

    def open(self, batch: int, slots: int) -> "RandomisedSession":
        rows = self.lm.open(batch, slots)
        assert isinstance(rows, Rows)  # randomised drafting is for language models, not for heads
        return RandomisedSession(self, rows)


class PendingSiblings(Siblings):
    """A record without draws whose q is computed while the target works; reading q waits until it is there.

    q is None where the drafter failed. The node's draws would have failed too, so that its token comes from p, whatever
    the coins decided; the error is raised by `observe`.

    law: the node's law, with a random number of draws.
    work: gives q of all such nodes, per row [nodes, v].
    row, i: the row of the node's sequence, and the node's place among those of the row.
    """

    def __init__(self, law: Law, work: "Future[Scored]", row: int, i: int) -> None:
        for name, value in (("draws", ()), ("law", law), ("_work", work), ("_row", row), ("_i", i)):
            object.__setattr__(self, name, value)

    @property
    def q(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        work: Future[Scored] = self.__dict__["_work"]
        if work.exception() is not None:
            return None
        return work.result()[self.__dict__["_row"]][self.__dict__["_i"]]


class RandomisedSession(LMDraftSession):
    """The drafter's cache of one batch, and the trees of the present step, whose numbers of draws coins decide."""

    def __init__(self, drafter: LMDrafter, rows: Rows) -> None:
        super().__init__(drafter, rows)
        self._chain_depth = 0  # so that no uniforms are taken for all levels at once: coins decide which levels exist
        self._thread: ThreadPoolExecutor | None = None
        self._work: Future[Scored] | None = None

    def _choose(self, seq: Sequence, g: Growth) -> list[int]:
        """Return the nodes of the frontier at which the coins allow a draw."""
        return [node for node in super()._choose(seq, g) if self._decide(seq, g, node).k]

    def _decide(self, seq: Sequence, g: Growth, node: int) -> Law:
        """Decide by coins how many draws a node has, and return its law with that fixed number."""
        law = _planned(g, node)
        if isinstance(law, IID) and law.counts is not None:
            weights = torch.tensor([law.counts], dtype=torch.float64)
            law = IID(int(draw_iid(weights, seq.rng.uniforms(1, 1))))
        g.decided[node] = law
        return law

    def _finish(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        nodes = [[node for node, law in g.decided.items() if not law.k] for g in self.growths]
        if any(nodes):
            self._compute_meanwhile(sequences, nodes)
        return super()._finish(sequences)

    def _compute_meanwhile(self, sequences: Seq[Sequence], nodes: list[list[int]]) -> None:
        """Compute q of the nodes without draws, in a thread, so that the target's forward begins at once.

        On other devices than the CPU, and if a forward uses several threads, q is computed before the target's forward:
        torch's number of threads holds for the whole process, and the pool of the compiled loops serves one caller at a
        time.
        """
        past = [copy(seq) for seq in sequences]  # the target's walk appends to the sequences' own ids
        for seq in past:
            seq.ids = list(seq.ids)
        self._work = self._start(partial(self._weights_after, past, nodes))
        for row, (g, wanted) in enumerate(zip(self.growths, nodes, strict=True)):
            for i, node in enumerate(wanted):
                g.builder.siblings[node] = PendingSiblings(_planned(g, node), self._work, row, i)

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
            work.result()  # the thread must be done before the cache is changed; its error is raised here
        super().observe(sequences, trees, paths)


def _planned(g: Growth, node: int) -> Law:
    """Return the law of a node's children, whose number of draws may be random."""
    (plan,) = g.policy.plan([g.states[node]], None, g.law)
    assert plan is not None
    return plan.law
