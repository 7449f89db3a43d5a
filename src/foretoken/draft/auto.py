"""A drafter under a controller: it drafts as deep as pays, and not at all where nothing pays.

How far a step drafts is decided before anything of it is drawn, from what earlier steps accepted and how long they
took: the depth, and for chains the least product of q at each depth with which a path goes on. So every step is a step
of the inner drafter, with floors that are fixed beforehand, and is lossless as such.
"""

import math
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import dataclass

import torch

from foretoken.core.interfaces import (
    Drafter,
    DraftSession,
    GuestSession,
    LearningSession,
    Path,
    PrefixSession,
    Saved,
)
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree, root_only
from foretoken.draft.controller import EXTRA, Controller, Experience, expected_extra
from foretoken.draft.lookup import LookupSession
from foretoken.draft.randomised import RandomisedDrafter
from foretoken.draft.wrapped import WrappedDrafter, WrappedSession

CAUGHT_UP = 2  # committed ids that a drafter reads at an ordinary step: the one accepted last, and the root


@dataclass(frozen=True)
class AutoDrafter(WrappedDrafter[Drafter]):
    """Another drafter (`inner`) whose trees end, step by step, where one more draft token would not pay.

    experience: the costs and acceptance learnt from earlier texts, which the controller starts from; it is updated, and
        kept from one text to the next.
    clock: gives seconds. The times decide the depths, and so, at temperature > 0, which of the equally distributed
        texts comes out for a seed. None: the costs are those of `experience`, every batch starts from a copy of it, and
        a seed fixes the text (of a batch of prompts: all seeds together fix the texts).
    alone: whether a single thread of torch does all the work; that thread's own time is measured then, since the time
        of other programs is no cost of drafting.
    """

    experience: Experience
    clock: Callable[[], float] | None = time.perf_counter
    alone: bool = False

    def open(self, batch: int, slots: int) -> "AutoSession":
        experience = deepcopy(self.experience) if self.clock is None else self.experience
        return AutoSession(self.inner.open(batch, slots), Controller(experience), self.session_clock())

    def session_clock(self) -> Callable[[], float] | None:
        """Return the clock of a new session, which keeps it: the times of two different clocks cannot be compared."""
        return time.thread_time if self.alone and torch.get_num_threads() == 1 else self.clock

    @property
    def outlook(self) -> tuple[float, float]:
        """(acceptance a of a draft token, the time t of a step with one draft token, in plain steps).

        One draft token pays if 1 + a > t.
        """
        return self.experience.drafts.mean, self.experience.costs_of(1).steps(1)


class AutoSession(WrappedSession[DraftSession]):
    """A session whose depths a controller chooses.

    looking: whether this step is to measure what a plain one takes, so that nothing else may be drafted either.
    """

    def __init__(self, inner: DraftSession, controller: Controller, clock: Callable[[], float] | None) -> None:
        """inner: the session that drafts. controller: has no sequences yet. clock: as in AutoDrafter."""
        super().__init__(inner)
        self.controller = controller
        self.clock = clock
        self._new = False  # whether a sequence joined: the next step reads its prompt
        self._seen: list[int] = []  # per sequence, the number of ids that the drafter has read
        self._emitted: list[int] = []  # per sequence, the number of its tokens at the latest step
        self._depth, self._began, self._asked = 0, 0.0, False
        self.looking = False
        self._limits: list[int] = []
        self._lengths: list[int] = []
        self._drafts: list[bool] = []  # per sequence, whether this step drafts for it
        # Others have no model that reads the text: a lookup's index, and what the target knows of it, take little.
        self._reads = not isinstance(inner, LookupSession | LearningSession | GuestSession)
        if isinstance(inner, PrefixSession):
            self._prefix, self.save = inner, inner.save
            self.read, self.restore = self._read, self._restore

    def join(self) -> None:
        super().join()
        self.controller.join()
        self._seen.append(0)
        self._emitted.append(0)
        self._new = True

    def leave(self, row: int) -> None:
        super().leave(row)
        self.controller.leave(row)
        if self._emitted[row]:
            self.controller.experience.lengths.latest.append(float(self._emitted[row]))
        for numbers in self._seen, self._emitted:
            numbers[row] = numbers[-1]
            numbers.pop()

    def _read(self, row: int, sequence: Sequence, end: int) -> None:
        """Read a prompt's beginning with the drafter where that pays; else leave it for later."""
        costs, unread = self.controller.costs, self._unread(row, len(sequence.ids))
        if not costs.drafting or (self._reads and not self.controller.worth_reading(unread, self._left(sequence))):
            return
        began = self.clock() if self.clock else 0.0
        self._prefix.read(row, sequence, end)
        if self.clock and costs.pace_s is not None:
            costs.reading.learn(end - self._seen[row], costs.plain_steps(self.clock() - began))
        self._seen[row] = end

    def _restore(self, row: int, saved: Saved) -> None:
        self._prefix.restore(row, saved)
        self._seen[row] = saved.end

    def _unread(self, row: int, length: int) -> int:
        """The number of ids that the drafter must read of a row of `length` ids beyond those of an ordinary step."""
        return max(length - self._seen[row] - CAUGHT_UP, 0)

    def _left(self, seq: Sequence) -> float:
        """The number of tokens that a sequence is expected to have yet."""
        return self.controller.experience.lengths.left(seq.num_new, seq.num_left)

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        self._began = self.clock() if self.clock else 0.0
        self._emitted = [seq.num_new for seq in sequences]
        limits = [max(min(seq.num_left - 1, seq.depth_limit), 0) for seq in sequences]
        # A step that reads a prompt drafts nothing, so that the first token comes as soon as without a drafter.
        chooses = any(limits) and not self._new
        chosen = self._choose(sequences, limits) if chooses else []
        self._drafts = [len(floors) > 0 for floors in chosen]
        self._depth = max(map(len, chosen), default=0)
        self._asked = self._depth > 0
        looks = self.controller.costs.drafting and not self.controller.waiting
        self.looking = chooses and not self._asked and looks
        if not self._asked:
            return [root_only(seq.ids[-1]) for seq in sequences]
        self._lengths = [len(seq.ids) for seq in sequences]
        for seq, floors in zip(sequences, chosen, strict=True):
            seq.floors = floors
        trees = self.inner.propose(sequences)
        # The end of the text may cut a tree shorter, and so may the floors. A model that drafts nothing took its time
        # in vain; a lookup that finds nothing took none.
        least = 0 if isinstance(self.inner, LookupSession) else 1
        depths = [max(least, max(tree.depths)) for tree in trees]
        each = zip(limits, depths, self._drafts, strict=True)
        self._limits = [min(limit, depth) if drafts else 0 for limit, depth, drafts in each]
        # Floors count the drafter's tokens; the same string may be more tokens of the target.
        self._depth = min(self._depth, max(self._limits))
        return trees

    def _choose(self, sequences: Seq[Sequence], limits: Seq[int]) -> list[tuple[float, ...]]:
        """Have the controller choose how far the next step drafts; limits: as in `Controller.choose`."""
        unread, left = list[int](), list[float]()
        if self._reads:
            unread = [self._unread(row, len(seq.ids)) for row, seq in enumerate(sequences)]
            left = [self._left(seq) for seq in sequences] if any(unread) else []
        return self.controller.choose(self.clock is not None, limits, unread, left)

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        if self._new:  # nothing was chosen, and the step's time is mostly that of reading a prompt
            self._new = False
            return
        if self.controller.waiting:
            return
        read = 0
        if self._asked:
            self.inner.observe(sequences, trees, paths)
            for row, (length, path) in enumerate(zip(self._lengths, paths, strict=True)):
                if self._drafts[row]:
                    read += self._unread(row, length)
                    self._seen[row] = length - 1 + len(path)
            surprises = [_surprise(tree, path[-1]) for tree, path in zip(trees, paths, strict=True)]
            self.controller.learn_acceptance(self._limits, [len(path) - 1 for path in paths], surprises)
        took = self.clock() - self._began if self.clock else None
        self.controller.learn_cost(self._depth, sum(map(len, paths)) / len(paths), took, read)


def _surprise(tree: TokenTree, last: int) -> float | None:
    """Return -ln of the product of q down to the last draft token that was tried, in nats; None if q is unknown.

    last: the last accepted node. Its child with the largest product counts as the one that was tried, if there is one.
    """
    if tree.sure is None:
        return None
    below = [sure for sure, parent in zip(tree.sure, tree.parents, strict=True) if parent == last]
    return -math.log(max(max(below, default=tree.sure[last]), sys.float_info.min))


def auto_drafter(
    inner: Drafter, sizes: tuple[int, ...], device: torch.device, known: Experience | None = None, share: float = 0.0
) -> AutoDrafter:
    """Return the drafter `inner` under a controller.

    sizes: the most nodes besides the root when its tree is cut at depth 0, 1, ..
    device: that of the target.
    known: costs and acceptance from a profile, by which a seed fixes the text; None: they are measured as it drafts.
    share: the weights that a draft token reads, as a share of those that a plain step reads; 0 where it is not known.
    """
    if known is not None:
        return AutoDrafter(inner, known, None)
    alone = device.type == "cpu" and not isinstance(inner, RandomisedDrafter)  # which has a thread of its own
    step, level, node = EXTRA
    return AutoDrafter(inner, Experience(expected_extra(sizes, (step, max(level, share), node))), alone=alone)
