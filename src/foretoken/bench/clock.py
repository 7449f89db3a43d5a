"""Stopwatches around forwards, put on from outside: what is timed does not know."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foretoken.models.causal_lm import CausalLM, Rows


class Clock:
    """Seconds spent, and times entered, between `start` and `stop`; nested pairs count once."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: waited for at both ends if it is an accelerator, whose calls return before they are done."""
        self._wait = torch.cuda.synchronize if device is not None and device.type == "cuda" else None
        self.reset()

    def reset(self) -> None:
        self.seconds, self.count = 0.0, 0
        self._depth, self._since = 0, 0.0

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
    """Inside, `clock` runs during calls of `model` or of its body without the head."""

    def before(*_: object) -> None:
        clock.start()

    def after(*_: object) -> None:
        clock.stop()

    hooks = []
    modules = {id(m): m for m in (model, getattr(model, "base_model", model))}
    for module in modules.values():
        hooks.append(module.register_forward_pre_hook(before))
        hooks.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class TimedLM(CausalLM):
    """The same model; `clock` runs while its rows score, extend and keep."""

    def __init__(self, lm: CausalLM, clock: Clock) -> None:
        self.__dict__.update(lm.__dict__)  # shares everything: a second probe of the model would be waste
        self.clock = clock

    def open(self, batch: int, slots: int) -> Rows:
        return TimedRows(self, batch, slots)


class TimedRows(Rows):
    def __init__(self, lm: TimedLM, batch: int, slots: int) -> None:
        super().__init__(lm, batch, slots)
        self.clock = lm.clock

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self._timed(super().extend, row, tokens)

    def score(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[Float[Tensor, "n v"]]:
        return self._timed(super().score, tokens, parents)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        self._timed(super().keep, paths)

    def _timed(self, call: Any, *args: Any) -> Any:
        self.clock.start()
        try:
            return call(*args)
        finally:
            self.clock.stop()
