"""The jobs of one request while the model's thread works on them, as the event loop sees them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from foretoken.serve.errors import ApiError
from foretoken.serve.jobs import DrainingError, Failed, Job, Progress, QueueFullError

if TYPE_CHECKING:
    from foretoken.serve.worker import Worker

T = TypeVar("T")
RETRY_AFTER = 1  # seconds, sent with a 429 or 503


def unavailable(status: int, message: str) -> ApiError:
    """What a request is answered with that may come again: 429 where a queue is full, 503 where no more are taken."""
    code = "queue_full" if status == 429 else "unavailable"
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_AFTER)})


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class Running:
    """`async with Running(worker, jobs) as running: async for index, progress in running: ...`

    Leaving the block, for whatever reason, cancels the jobs that are not finished.
    """

    def __init__(self, worker: "Worker", jobs: Sequence[Job]) -> None:
        self.worker, self.jobs = worker, jobs
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Progress | Failed]] = asyncio.Queue()
        self._open: dict[int, Any] = {}

    async def __aenter__(self) -> "Running":
        """Submit all jobs or none. Raises ApiError: 429 where the queue is full, 503 where no more jobs are taken."""
        try:
            for index, job in enumerate(self.jobs):
                self._open[index] = self.worker.submit(job, self._deliver(index))
        except (QueueFullError, DrainingError) as error:
            self._cancel()
            raise unavailable(429 if isinstance(error, QueueFullError) else 503, str(error)) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Progress]]:
        """(index of the job, what a step added to it), until all are finished. Raises ApiError for a failure."""
        while self._open:
            index, came = await self._queue.get()
            if isinstance(came, Failed):
                del self._open[index]
                raise unavailable(503, came.message) if came.status == 503 else ApiError(came.status, came.message)
            if came.finish_reason is not None:
                del self._open[index]
            yield index, came

    def _deliver(self, index: int) -> Any:
        def deliver(came: Progress | Failed) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server ended
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, came))

        return deliver

    def _cancel(self) -> None:
        for ticket in self._open.values():
            self.worker.cancel(ticket)
        self._open.clear()


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """The work's result.

    receive: of ASGI, after the request's body was read.
    Raises ClientGoneError where the client disconnects before the work is done, which is then cancelled.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
