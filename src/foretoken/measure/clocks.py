"""Stopwatches around forwards, put on from outside: what is timed does not know."""

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from foretoken.core.interfaces import Drafter, DraftSession, FeatureDrafter
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree
from foretoken.decode import NoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.draft.wrapped import WrappedDrafter
from foretoken.models.causal_lm import CausalLM
from foretoken.models.recorder import FORWARD, SCORING
from foretoken.models.target import LMTarget
from foretoken.vocab.slem import SLEMDrafter
from foretoken.vocab.slrs import SLRSDrafter
from foretoken.vocab.tli import IntersectionLM

THREAD, WALL = "thread", "wall"
DRAFTING = ("propose", "observe")  # methods of a drafter's session
P = ParamSpec("P")
T = TypeVar("T")


def clock_named(device: torch.device) -> str:
    """The thread's own CPU time where one thread does all the work, since no other program disturbs that; else wall."""
    return THREAD if device.type == "cpu" and torch.get_num_threads() == 1 else WALL


def seconds(clock: str, device: torch.device) -> Callable[[], float]:
    """The time of the clock, once the device is done with what it was given."""
    if clock == THREAD:
        return time.thread_time
    if device.type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


class Clock:
    """Seconds of wall clock spent, and times entered, between `start` and `stop`; nested pairs count once."""

    def __init__(self, device: torch.device | None = None, halts: "Clock | None" = None) -> None:
        """device: waited for at both ends if it is an accelerator, whose calls return before they are done. halts: a
        clock that stands still while this one runs, so that no second is counted twice."""
        self._halts, self._halted = halts, 0
        self._wait = torch.cuda.synchronize if device is not None and device.type == "cuda" else None
        self.seconds, self.count = 0.0, 0
        self._depth, self._since, self._lapped = 0, 0.0, 0.0

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def time(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """call(*args), with the clock running."""
        with self:
            return call(*args, **kwargs)

    def lap(self) -> float:
        """Seconds since the last lap, or the start."""
        seconds, self._lapped = self.seconds - self._lapped, self.seconds
        return seconds

    def start(self) -> None:
        if self._depth == 0:
            if self._wait:
                self._wait()
            if self._halts is not None:
                self._halted = self._halts.leave()
            self._since = time.perf_counter()
            self.count += 1
        self._depth += 1

    def stop(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            if self._wait:
                self._wait()
            self.seconds += time.perf_counter() - self._since
            if self._halts is not None and self._halted:
                self._halts.go_on(self._halted)

    def leave(self) -> int:
        """Stand still; returns what `go_on` takes, 0 if the clock stood still before."""
        depth, self._depth = self._depth, 0
        if depth:
            self.seconds += time.perf_counter() - self._since
        return depth

    def go_on(self, depth: int) -> None:
        self._depth, self._since = depth, time.perf_counter()


@contextmanager
def forwards_timed(model: nn.Module, clock: Clock) -> Iterator[None]:
    """Inside, `clock` runs during calls of `model`."""
    hooks = [
        model.register_forward_pre_hook(lambda *_: clock.start()),
        model.register_forward_hook(lambda *_: clock.stop(), always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def record(thing: object, names: Iterable[str], clock: Clock) -> None:
    """From now on `clock` runs during these methods of one object, its own calls of them included. Those that it does
    not have are passed over."""
    for name in names:
        if hasattr(thing, name):
            vars(thing)[name] = partial(clock.time, getattr(thing, name))


def timed(lm: CausalLM, scoring: Clock, forwards: Clock) -> CausalLM:
    """The same model with clocks: `scoring` runs while its rows work, `forwards` while they run the model."""
    return lm.recorded_by({SCORING: scoring, FORWARD: forwards}.__getitem__)


@dataclass
class Drafts:
    """nodes: that were to have children. empty: of these, where no token was drawn."""

    nodes: int = 0
    empty: int = 0

    def count(self, trees: Iterable[TokenTree]) -> None:
        """Add the nodes of these trees."""
        records = [siblings for tree in trees for siblings in tree.siblings if siblings is not None]
        self.nodes += len(records)
        self.empty += sum(not siblings.draws for siblings in records)


@dataclass(frozen=True)
class TimedDrafter(WrappedDrafter[Drafter]):
    """A drafter; `clock` runs while its sessions propose and observe, and `drafts` counts what they propose."""

    clock: Clock
    drafts: Drafts = field(default_factory=Drafts)

    def open(self, batch: int, slots: int) -> DraftSession:
        session = self.inner.open(batch, slots)
        record(session, DRAFTING, self.clock)
        propose = session.propose

        def counted(sequences: Seq[Sequence]) -> list[TokenTree]:
            trees = propose(sequences)
            self.drafts.count(trees)
            return trees

        vars(session)["propose"] = counted
        return session


class Clocks:
    """What one decoding is timed by.

    target, drafter: score, extend and keep of each model's rows. forwards: calls of either model. proposing: the
    drafter's session, with its model's calls and without the target's. drafts: what it proposed.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.drafts = Drafts()
        self.drafter, self.forwards, self.proposing = (Clock(device) for _ in range(3))
        self.target = Clock(device, halts=self.proposing)

    @property
    def own_s(self) -> float:
        """Seconds of proposing and observing outside of the drafter's model: translating, and growing trees."""
        return self.proposing.seconds - self.drafter.seconds

    def on_target(self, target: LMTarget) -> LMTarget:
        return LMTarget(timed(target.lm, self.target, self.forwards))

    def on_drafter(self, drafter: Drafter) -> Drafter:
        """The drafter, its sessions and, where it is no draft head, its model timed. One that reads the target's hidden
        states is left as it is."""
        if isinstance(drafter, NoDrafter | FeatureDrafter):
            return drafter
        if isinstance(drafter, LMDrafter | SLEMDrafter | SLRSDrafter) and isinstance(drafter.lm, CausalLM):
            drafter = replace(drafter, lm=self._on_model(drafter.lm))
        return TimedDrafter(drafter, self.proposing, self.drafts)

    def _on_model(self, lm: CausalLM) -> CausalLM:
        if isinstance(lm, IntersectionLM):
            return IntersectionLM(self._on_model(lm.lm), lm.translation)
        return timed(lm, self.drafter, self.forwards)
