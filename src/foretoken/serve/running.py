"""The jobs of one request while the model's thread works on them, as the event loop sees them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from starlette.types import Receive

from foretoken.serve.batch import Ticket
from foretoken.serve.errors import ApiError
from foretoken.serve.jobs import Job, Progress
from foretoken.serve.worker import Worker

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has disconnected before its answer was complete."""


async def progress_of(worker: Worker, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Progress], None]:
    """Yield (index of a job, what a step added to it) until all jobs are finished; to close it cancels the others.

    worker: decodes the jobs.
    jobs: those of one request.
    Raises ApiError: 429 where the queue has no room for all of them, 503 where no more are taken, and for a job that
    failed.
    """
    loop, tickets = asyncio.get_running_loop(), dict[int, Ticket]()
    queue: asyncio.Queue[tuple[int, Progress | ApiError]] = asyncio.Queue()

    def deliver(index: int, came: Progress | ApiError) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server ended
            loop.call_soon_threadsafe(queue.put_nowait, (index, came))

    try:
        for index, job in enumerate(jobs):
            tickets[index] = worker.submit(job, partial(deliver, index))
        while tickets:
            index, came = await queue.get()
            if isinstance(came, ApiError):
                del tickets[index]
                raise came
            if came.finish_reason is not None:
                del tickets[index]
            yield index, came
    finally:
        for ticket in tickets.values():
            worker.cancel(ticket)


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`, which is cancelled where the client disconnects before.

    work: what is awaited.
    receive: ASGI's function for messages from the client; the body must have been read.
    Raises ClientGoneError where the client disconnects.
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
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
