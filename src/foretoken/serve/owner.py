"""The one thread that runs a model, from its loading on.

A thread that runs a model has helper threads, one per further core, which wait for its next forward. They wait awake
only while there are no more of them in the process than cores. If one thread loads a model and another one decodes with
it, there are twice as many: all of them go to sleep between the layers, and a step of SmolLM2 on two cores takes 14 ms
instead of 8 (docs/LOG.md, 2026-11-24, night).
"""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import finalize

T = TypeVar("T")


Call = tuple[Future[Any], Callable[[], Any]]


class Owner:
    """Calls functions one after the other in a thread of its own.

    The thread ends once nothing refers to this object any more and all calls are done. The process can end before
    that: it does not wait for this thread, as it would for one of `concurrent.futures`.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        Thread(target=_work, args=(self._calls,), name="foretoken-model", daemon=True).start()
        finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call. Returns the future of its result or exception."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future


def _work(calls: SimpleQueue[Call | None]) -> None:
    """Make the calls up to the first None. It must not refer to the Owner, whose thread would then never end."""
    while (each := calls.get()) is not None:
        future, call = each
        try:
            future.set_result(call())
        except BaseException as error:  # raised where the future's result is read
            future.set_exception(error)
        del future, call, each
