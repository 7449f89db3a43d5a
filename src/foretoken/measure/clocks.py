"""Stopwatches around forwards, put on from outside: what is timed does not know."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from foretoken.core.shapes import Float
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows

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
