"""Stopwatches around models and drafters. They are put on from outside; the code that is timed has none of its own."""

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakMethod

import torch
from torch import nn

from foretoken.core.interfaces import Drafter, DraftSession, FeatureDrafter
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree
from foretoken.decode import NoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.draft.wrapped import WrappedDrafter
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows
from foretoken.models.target import LMTarget
from foretoken.vocab.slem import SLEMDrafter
from foretoken.vocab.slrs import SLRSDrafter
from foretoken.vocab.tli import IntersectionLM

THREAD, WALL = "thread", "wall"
DRAFTING = ("propose", "observe")  # the methods of a drafter's session that are timed
P = ParamSpec("P")
T = TypeVar("T")


def clock_named(device: torch.device) -> str:
    """Return the name of the clock to measure by: THREAD where one CPU thread does all the work, else WALL.

    THREAD is the CPU time of the thread, which other programs disturb less.

    device: where the models run.
    """
    return THREAD if device.type == "cpu" and torch.get_num_threads() == 1 else WALL


def seconds(clock: str, device: torch.device) -> Callable[[], float]:
    """Return the function that reads a clock, in seconds. On a GPU it first waits until all work there is done.

    clock: THREAD or WALL.
    device: where the models run.
    """
    if clock == THREAD:
        return time.thread_time
    if device.type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


class Clock:
    """A stopwatch: it runs between `start` and `stop`, or in a `with` block. Of nested pairs only the outermost counts.

    seconds: seconds of wall clock in all.
    count: how often it was started.
    """

    def __init__(self, device: torch.device | None = None, halts: "Clock | None" = None) -> None:
        """Make a clock that stands still.

        device: waited for at start and stop if it is a GPU, whose calls return before they are done.
        halts: another clock that stands still while this one runs, so that no second is counted twice.
        """
        self._halts, self._halted = halts, 0
        self._wait = partial(torch.cuda.synchronize, device) if device is not None and device.type == "cuda" else None
        self.seconds, self.count = 0.0, 0
        self._depth, self._since, self._lapped = 0, 0.0, 0.0

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def time(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `call` returns for these arguments, with the clock running meanwhile."""
        with self:
            return call(*args, **kwargs)

    def lap(self) -> float:
        """Return the seconds counted since the last call, at first all of them."""
        seconds, self._lapped = self.seconds - self._lapped, self.seconds
        return seconds

    def start(self) -> None:
        """Run on, until `stop` was called as often as `start`."""
        if self._depth == 0:
            if self._wait:
                self._wait()
            if self._halts is not None:
                self._halted = self._halts.leave()
            self._since = time.perf_counter()
            self.count += 1
        self._depth += 1

    def stop(self) -> None:
        """End what the last `start` began."""
        self._depth -= 1
        if self._depth == 0:
            if self._wait:
                self._wait()
            self.seconds += time.perf_counter() - self._since
            if self._halts is not None and self._halted:
                self._halts.go_on(self._halted)

    def leave(self) -> int:
        """Stand still until `go_on`; returns the number of open `start`s, 0 if the clock stood still before."""
        depth, self._depth = self._depth, 0
        if depth:
            self.seconds += time.perf_counter() - self._since
        return depth

    def go_on(self, depth: int) -> None:
        """Run on after `leave`, which returned `depth`."""
        self._depth, self._since = depth, time.perf_counter()


@contextmanager
def forwards_timed(model: nn.Module, clock: Clock) -> Iterator[None]:
    """While this context is open, let `clock` run during calls of `model`."""
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
    """Replace methods of one object, so that a clock runs during each call, those by the object itself included.

    thing: the object.
    names: of the methods; those that it lacks are passed over.
    clock: runs during the calls.
    """
    for name in names:
        if hasattr(thing, name):
            vars(thing)[name] = partial(_time, clock, WeakMethod(getattr(thing, name)))  # it must not hold itself


def _time(clock: Clock, method: WeakMethod[Callable[..., T]], *args: Any, **kwargs: Any) -> T:
    call = method()
    assert call is not None  # since it is called
    return clock.time(call, *args, **kwargs)


def timed(lm: CausalLM, scoring: Clock, forwards: Clock) -> CausalLM:
    """Return a copy of a model, with shared weights, whose rows run clocks.

    lm: the model.
    scoring: runs while its rows work: masks, cache and forward.
    forwards: runs during the model's own part of that.
    """

    def put_on(rows: Rows) -> None:
        record(rows, ("extend", "score", "keep", "score_tree", "draft_chain"), scoring)
        record(rows, ("_forward",), forwards)
        record(rows.cache, ("score_tree", "draft_chain"), forwards)

    clocked = copy(lm)
    clocked.opened = put_on
    return clocked


@dataclass
class Drafts:
    """Counts of what a drafter drew.

    nodes: nodes that were to have children.
    empty: those of them for which no token was drawn.
    """

    nodes: int = 0
    empty: int = 0

    def count(self, trees: Iterable[TokenTree]) -> None:
        """Add the nodes of `trees`."""
        records = [siblings for tree in trees for siblings in tree.siblings if siblings is not None]
        self.nodes += len(records)
        self.empty += sum(not siblings.draws for siblings in records)


@dataclass(frozen=True)
class TimedDrafter(WrappedDrafter[Drafter]):
    """A drafter around another one that times it.

    clock: runs while sessions propose and observe.
    drafts: counts what they propose.
    """

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
    """The clocks of one decoding.

    target, drafter: run during score, extend and keep of each model's rows.
    forwards: runs during calls of either model.
    proposing: runs while the drafter's session works, calls of its model included, calls of the target's excluded.
    drafts: counts what the session proposed.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Make clocks that stand still; device: where the models run, see Clock."""
        self.drafts = Drafts()
        self.drafter, self.forwards, self.proposing = (Clock(device) for _ in range(3))
        self.target = Clock(device, halts=self.proposing)

    @property
    def own_s(self) -> float:
        """The seconds of proposing and observing outside of the drafter's model: translating, and growing trees."""
        return self.proposing.seconds - self.drafter.seconds

    def on_target(self, target: LMTarget) -> LMTarget:
        """Return a copy of `target` that runs the clocks."""
        return LMTarget(timed(target.lm, self.target, self.forwards))

    def on_drafter(self, drafter: Drafter) -> Drafter:
        """Return a copy of `drafter` whose sessions run the clocks; so does its model where that is a CausalLM.

        A drafter that reads the target's hidden states is returned as it is.
        """
        if isinstance(drafter, NoDrafter | FeatureDrafter):
            return drafter
        if isinstance(drafter, LMDrafter | SLEMDrafter | SLRSDrafter) and isinstance(drafter.lm, CausalLM):
            drafter = replace(drafter, lm=self._on_model(drafter.lm))
        return TimedDrafter(drafter, self.proposing, self.drafts)

    def _on_model(self, lm: CausalLM) -> CausalLM:
        if isinstance(lm, IntersectionLM):
            return IntersectionLM(self._on_model(lm.lm), lm.translation)
        return timed(lm, self.drafter, self.forwards)
