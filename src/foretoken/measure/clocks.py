"""Stopwatches around forwards, put on from outside: what is timed does not know."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from foretoken.core.interfaces import Drafter, DraftSession, FeatureDrafter, Path
from foretoken.core.sequence import Sequence as Running
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.core.verifier import Verifier
from foretoken.decode import Decoder, NoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.draft.slem import SLEMDrafter
from foretoken.draft.slrs import SLRSDrafter
from foretoken.draft.tli import IntersectionLM
from foretoken.draft.wrapped import WrappedDrafter, WrappedSession
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows
from foretoken.models.target import LMTarget, LMTargetSession

THREAD, WALL = "thread", "wall"
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

    def __init__(self, device: torch.device | None = None) -> None:
        """device: waited for at both ends if it is an accelerator, whose calls return before they are done."""
        self._wait = torch.cuda.synchronize if device is not None and device.type == "cuda" else None
        self.seconds, self.count = 0.0, 0
        self._depth, self._since, self._told = 0, 0.0, 0.0

    def time(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """call(*args), with the clock running."""
        self.start()
        try:
            return call(*args, **kwargs)
        finally:
            self.stop()

    def lap(self) -> float:
        """Seconds since the last lap, or the start."""
        seconds, self._told = self.seconds - self._told, self.seconds
        return seconds

    def start(self) -> None:
        if self._depth == 0:
            if self._wait:
                self._wait()
            self._since = time.perf_counter()
            self.count += 1
        self._depth += 1

    def stop(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            if self._wait:
                self._wait()
            self.seconds += time.perf_counter() - self._since


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


class TimedLM(CausalLM):
    """The same model. `scoring` runs while its rows score, extend and keep, `forwards` while they call the model: no
    hook is put on the model itself, since that would take it off its fast path."""

    def __init__(self, lm: CausalLM, scoring: Clock, forwards: Clock) -> None:
        self.__dict__.update(lm.__dict__)  # shares everything: a second probe of the model would be waste
        self.scoring, self.forwards = scoring, forwards

    def open(self, batch: int, slots: int, layers: tuple[int, ...] = ()) -> Rows:
        return TimedRows(self, batch, slots, layers)


class TimedRows(Rows):
    def __init__(self, lm: TimedLM, batch: int, slots: int, layers: tuple[int, ...]) -> None:
        super().__init__(lm, batch, slots, layers)
        self._scoring, self._forwards = lm.scoring, lm.forwards

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self._scoring.time(super().extend, row, tokens)

    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "n v"]]:
        return self._scoring.time(super().score, tokens, parents)

    def draft_chain(self, *args: Any, **kwargs: Any) -> tuple[list[int], Float[Tensor, "_ v"]]:
        return self._scoring.time(self._forwards.time, super().draft_chain, *args, **kwargs)

    def score_tree(
        self, row: int, tokens: Sequence[int], parents: Sequence[int], temperature: float
    ) -> Float[Tensor, "n v"] | None:
        return self._scoring.time(super().score_tree, row, tokens, parents, temperature)

    def grow_tree(self, *args: Any, **kwargs: Any) -> bool:
        return self._scoring.time(self._forwards.time, super().grow_tree, *args, **kwargs)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        self._scoring.time(super().keep, paths)

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forwards.time(super()._forward, *args, **kwargs)

    def _tempered(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self._forwards.time(super()._tempered, *args, **kwargs)


class TimedSession(WrappedSession[DraftSession]):
    """A drafter's session; `clock` runs while it proposes and observes."""

    def __init__(self, inner: DraftSession, clock: Clock) -> None:
        super().__init__(inner)
        self.clock = clock

    def propose(self, sequences: Sequence[Running]) -> list[TokenTree]:
        return self.clock.time(self.inner.propose, sequences)

    def observe(self, sequences: Sequence[Running], trees: Sequence[TokenTree], paths: Sequence[Path]) -> None:
        self.clock.time(self.inner.observe, sequences, trees, paths)


@dataclass(frozen=True)
class TimedDrafter(WrappedDrafter[Drafter]):
    """A drafter whose sessions are timed."""

    clock: Clock

    def open(self, batch: int, slots: int) -> TimedSession:
        return TimedSession(self.inner.open(batch, slots), self.clock)


class Clocks:
    """What one decoding is timed by.

    target, drafter: score, extend and keep of each model's rows. forwards: calls of either model. proposing: the
    drafter's session, with its model's calls.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.target, self.drafter, self.forwards, self.proposing = (Clock(device) for _ in range(4))

    @property
    def own_s(self) -> float:
        """Seconds of proposing and observing outside of the drafter's model: translating, and growing trees."""
        return self.proposing.seconds - self.drafter.seconds

    def on_target(self, target: LMTarget) -> LMTarget:
        return LMTarget(TimedLM(target.lm, self.target, self.forwards))

    def on_drafter(self, drafter: Drafter) -> Drafter:
        """The drafter, its sessions and, where it is no draft head, its model timed. One that reads the target's hidden
        states is left as it is."""
        if isinstance(drafter, NoDrafter | FeatureDrafter):
            return drafter
        if isinstance(drafter, LMDrafter | SLEMDrafter | SLRSDrafter) and isinstance(drafter.lm, CausalLM):
            drafter = replace(drafter, lm=self._on_model(drafter.lm))
        return TimedDrafter(drafter, self.proposing)

    def _on_model(self, lm: CausalLM) -> CausalLM:
        if isinstance(lm, IntersectionLM):
            return IntersectionLM(self._on_model(lm.lm), lm.translation)
        return TimedLM(lm, self.drafter, self.forwards)


def opened(target: LMTarget, drafter: Drafter, verifier: Verifier, sequences: Sequence[Running], slots: int) -> Decoder:
    """A decoder whose target has read the prompts of all sequences, so that steps alone are left to be timed."""
    decoder = Decoder(target, drafter, verifier, len(sequences), slots)
    for sequence in sequences:
        decoder.join(sequence)
    assert isinstance(decoder.target, LMTargetSession)
    decoder.target.catch_up(decoder.sequences)
    return decoder
