"""A drafter that drafts as deep as pays, and not at all where nothing pays: any other drafter under a controller.

The depth of each step is chosen before anything of it is drawn, from what earlier steps accepted and how long they
took. So every step is one of the other drafter's own, cut at a depth that is fixed beforehand, and is lossless as such.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core.interfaces import Drafter, DraftSession, FeatureDrafter, LearningSession, Path
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree, root_only
from foretoken.draft.controller import Controller, Experience
from foretoken.draft.randomised import RandomisedDrafter
from foretoken.draft.wrapped import WrappedDrafter, WrappedSession

CAUGHT_UP = 2  # committed ids that a drafter reads at any step: what the last one accepted last, and the root


@dataclass(frozen=True)
class AutoDrafter(WrappedDrafter[Drafter]):
    """inner: what drafts. sizes[d]: nodes that its tree has at most when it is cut at depth d, the root left out.

    experience: what earlier texts taught of costs and acceptance, kept from one text to the next; only where the next
    one starts depends on it. clock: seconds; what it tells steers the depths, and so, at temperature > 0, which of
    the equally distributed texts comes out for a seed. Without a clock costs are those of `experience`, every batch
    starts from it anew, and a seed fixes the text (of a batch of prompts: all of them together). alone: where torch has
    one thread, that one does all the work, and its own time is taken: what other programs take is no cost of drafting.
    """

    sizes: tuple[int, ...]
    experience: Experience = field(default_factory=Experience)
    clock: Callable[[], float] | None = time.perf_counter
    alone: bool = False

    def open(self, batch: int, slots: int) -> "AutoSession":
        return AutoSession(self.inner.open(batch, slots), self.controller(), self.session_clock())

    def session_clock(self) -> Callable[[], float] | None:
        """One clock for a whole session, whatever becomes of the number of threads: what two tell has no difference."""
        return time.thread_time if self.alone and torch.get_num_threads() == 1 else self.clock

    @property
    def outlook(self) -> tuple[float, float]:
        """(acceptance of a draft, a step with one draft in plain steps), by what is known: it pays if 1 + a is more."""
        return self.experience.acceptance, self.experience.costs_of(1).steps(1, float(self.sizes[1]))

    def controller(self) -> Controller:
        experience = self.experience if self.clock else deepcopy(self.experience)
        return Controller(self.sizes, experience, clocked=self.clock is not None)


class AutoSession(WrappedSession[DraftSession]):
    def __init__(self, inner: DraftSession, controller: Controller, clock: Callable[[], float] | None) -> None:
        super().__init__(inner)
        self.controller = controller
        self.clock = clock
        self._new = False  # a row joined: the next step reads its prompt
        self._seen: list[int] = []  # ids of each row that the drafter was shown
        self._depth, self._began = 0, 0.0
        self._limits: list[int] = []
        self._lengths: list[int] = []

    def join(self) -> None:
        super().join()
        self.controller.join()
        self._seen.append(0)
        self._new = True

    def leave(self, row: int) -> None:
        super().leave(row)
        self.controller.leave(row)
        self._seen[row] = self._seen[-1]
        self._seen.pop()

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        self._began = self.clock() if self.clock else 0.0
        drafts = any(seq.num_left > 1 for seq in sequences)
        self._depth = self.controller.choose(timed=not self._new) if drafts else 0
        if self._depth == 0:
            return [root_only(seq.ids[-1]) for seq in sequences]
        self._lengths = [len(seq.ids) for seq in sequences]
        for seq in sequences:
            seq.max_depth = self._depth
        self._limits = [seq.depth_left for seq in sequences]
        self._depth = max(self._limits)  # what is left of the text may end it
        return self.inner.propose(sequences)

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        if self.controller.resting:
            return
        batch, usual = len(sequences), True
        if self._depth:
            self.inner.observe(sequences, trees, paths)
            behind = max(length - seen for length, seen in zip(self._lengths, self._seen, strict=True))
            usual = behind <= CAUGHT_UP
            self._seen = [length - 1 + len(path) for length, path in zip(self._lengths, paths, strict=True)]
            accepted = [len(path) - 1 for path in paths]
            self.controller.learn_acceptance(self._limits, [tree.num_drafted for tree in trees], accepted)
        if self._new:
            self._new = False
            return
        nodes = sum(tree.num_drafted for tree in trees) / batch
        tokens = sum(map(len, paths)) / batch
        took = self.clock() - self._began if self.clock else self.controller.predicted(self._depth, nodes)
        self.controller.learn_cost(self._depth, nodes, tokens, took, usual)


@dataclass(frozen=True)
class FeatureAutoDrafter(AutoDrafter):
    """For a drafter that reads the target's hidden states."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        assert isinstance(self.inner, FeatureDrafter)
        return self.inner.feature_layers

    def open(self, batch: int, slots: int) -> "FeatureAutoSession":
        return FeatureAutoSession(self.inner.open(batch, slots), self.controller(), self.session_clock())


class FeatureAutoSession(AutoSession):
    def learn(self, features: list[Float[Tensor, "_ f"]]) -> None:
        assert isinstance(self.inner, LearningSession)
        self.inner.learn(features)


def auto_drafter(
    inner: Drafter, sizes: tuple[int, ...], device: torch.device, known: Experience | None = None
) -> AutoDrafter:
    """`inner` under a controller; `sizes` as in AutoDrafter. device: of the target. known: costs and acceptance, which
    then need no clock."""
    kind = FeatureAutoDrafter if isinstance(inner, FeatureDrafter) else AutoDrafter
    if known is not None:
        return kind(inner, sizes, known, None)
    alone = device.type == "cpu" and not isinstance(inner, RandomisedDrafter)  # which has a thread of its own
    return kind(inner, sizes, alone=alone)
