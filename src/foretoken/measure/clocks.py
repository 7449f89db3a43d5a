"""Stopwatches around models and drafters. They are put on from outside; the code that is timed has none of its own."""

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ContextDecorator, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
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


def clock_named(device: torch.device) -> str:
    """Return the name of the clock to measure by, where models run on this `device`.

    It is THREAD, the thread's CPU time, which other programs disturb less, where one CPU thread does all the work;
    else WALL.
    """
    return THREAD if device.type == "cpu" and torch.get_num_threads() == 1 else WALL


def seconds(clock: str, device: torch.device) -> Callable[[], float]:
    """Return the function that reads a `clock`, THREAD or WALL, in seconds.

    device: where the models run; if that is a GPU, the function first waits until all work there is done.
    """
    if clock == THREAD:
        return time.thread_time
    if device.type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


class Clock(ContextDecorator):
    """A stopwatch: it runs in `with` blocks, of which the outermost counts, and during calls of `clock(function)`.

    seconds: seconds of wall clock in all.
    count: how often it was started.
    """

    def __init__(self, device: torch.device | None = None, halts: "Clock | None" = None) -> None:
        """Make a clock that stands still.

        device: waited for at start and stop if it is a GPU, whose calls return before they are done.
        halts: another clock that stands still while this one runs, so that no second is counted twice.
        """
        self._halts = halts
        self._wait = partial(torch.cuda.synchronize, device) if device is not None and device.type == "cuda" else None
        self.seconds, self.count = 0.0, 0
        self._depth, self._since = 0, 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            if self._wait:
                self._wait()
            self._since = time.perf_counter()
            self.count += 1
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            if self._wait:
                self._wait()
            took = time.perf_counter() - self._since
            self.seconds += took
            if self._halts is not None:
                self._halts._since += took  # without an effect on a clock that stands still


@contextmanager
def forwards_timed(model: nn.Module, clock: Clock) -> Iterator[None]:
    """While this context is open, let `clock` run during calls of `model`."""
    hooks = [
        model.register_forward_pre_hook(lambda *_: clock.__enter__()),
        model.register_forward_hook(lambda *_: clock.__exit__(), always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def record(thing: object, names: Iterable[str], clock: Clock) -> None:
    """Replace methods of one object, so that a clock runs during each call, those by the object itself included.

    thing, clock: the object and the clock.
    names: of the methods; those that it lacks are passed over.
    """
    for name in names:
        if hasattr(thing, name):
            vars(thing)[name] = clock(partial(_call, WeakMethod(getattr(thing, name))))  # it must not hold itself


def _call(method: WeakMethod[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    """Call a method of an object that is alive, since it is called."""
    found = method()
    assert found is not None
    return found(*args, **kwargs)


def timed(lm: CausalLM, scoring: Clock, forwards: Clock) -> CausalLM:
    """Return a copy of the model `lm`, with shared weights, whose rows run clocks.

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
