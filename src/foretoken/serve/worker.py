"""The thread that owns the model: jobs come in from any thread, and are decoded in one batch that is never closed."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Condition

from foretoken.core.errors import ForetokenError
from foretoken.engine import Engine
from foretoken.serve.batch import Batch, Ticket, tell
from foretoken.serve.jobs import Deliver, DrainingError, Failed, Job, QueueFullError
from foretoken.serve.owner import Owner

log = logging.getLogger(__name__)
CONTEXT = 4096  # ids of one text where neither the caller nor the model says how many
CACHE_BYTES = 1 << 30
DIED = "The thread that runs the model has died: restart the server."


class Worker:
    """Decodes the jobs of a server, up to `max_batch` side by side; each has the text that it would have alone.

    All methods may be called from any thread. The model runs on the worker's own.
    """

    def __init__(
        self,
        engine: Engine,
        max_batch: int = 8,
        context: int | None = None,
        max_queue: int = 64,
        cache_bytes: int = CACHE_BYTES,
        owner: Owner | None = None,
    ) -> None:
        """engine: with a tokenizer.
        max_batch: the most jobs decoded at once.
        context: the most ids of one text, its prompt included; the model's own context where it is None.
        max_queue: the most jobs that may wait for others to end.
        cache_bytes: the most memory of the prefix cache; 0 for none.
        owner: the thread that loaded the engine, where that is to be the worker's; None for a new one.
        Raises ForetokenError for a context that the model does not take, and where memory does not suffice.
        """
        most = engine.target.lm.context
        if context is not None and most is not None and context > most:
            raise ForetokenError(
                f"context is {context}, and {engine.target.name} takes {most} tokens: give at most that."
            )
        self.max_batch, self.max_queue = max_batch, max_queue
        self.context = context or most or CONTEXT
        self.error: BaseException | None = None  # what the thread died of
        self.on_step: Callable[[int], None] = lambda num_tokens: None  # called with the tokens that a step has added
        self._owner: Owner | None = owner or Owner()
        try:
            self._batch = self._owner.submit(lambda: Batch(engine, max_batch, self.context, cache_bytes)).result()
        except MemoryError as error:
            raise ForetokenError(
                f"The memory does not suffice for {max_batch} texts of {self.context} tokens side by side: give a "
                "smaller max_batch or context."
            ) from error
        self._waiting: deque[Ticket] = deque()
        self._joining: deque[Ticket] = deque()  # those that the thread has taken, and not yet given a row
        self._changed = Condition()
        self._stopping = False  # whether no more jobs are taken
        self._work: Future[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether jobs are worked on; False before `start`, after the thread's end, and if it died."""
        return self._work is not None and not self._work.done() and self.error is None

    @property
    def running(self) -> int:
        """Number of jobs in work."""
        return len(self._batch)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for others to end."""
        return len(self._waiting)

    @property
    def cache_use(self) -> float:
        """Share of the room for keys and values that the texts in work take."""
        return self._batch.num_ids / (self.max_batch * self.context)

    def start(self) -> None:
        """Start the thread, for once and all."""
        assert self._owner is not None
        self._work = self._owner.submit(self._run)
        self._owner = None  # one that nobody else holds ends with the work

    def submit(self, job: Job, deliver: Deliver) -> Ticket:
        """Queue a job; `deliver` is called with its news from the worker's thread.

        Returns: what `cancel` takes.
        Raises ForetokenError for a job that does not fit the context, QueueFullError where too many wait, DrainingError
        where no more are accepted.
        """
        if not 0 < len(job.ids) < self.context:
            raise ForetokenError(
                f"The prompt has {len(job.ids)} tokens, and the context is {self.context}: give at least one token, "
                "and fewer than the context has."
            )
        ticket = Ticket(job, deliver)
        with self._changed:
            if self._stopping or self.error is not None:
                raise DrainingError(DIED if self.error is not None else "The server is shutting down.")
            if len(self._waiting) + len(self._joining) + self._batch.num_wanted >= self.max_batch + self.max_queue:
                room = f"{self.max_batch} texts side by side and {self.max_queue} that wait"
                raise QueueFullError(f"The server has no room for so many texts now: it takes {room}. Try again later.")
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a job of which nobody wants to hear any more; its row is free before the next step."""
        with self._changed:
            ticket.cancelled = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._changed.notify_all()

    def end(self) -> None:
        """End all jobs after the step under way, and the thread. Does not wait for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def stop(self) -> None:
        """`end`, and wait."""
        self.end()
        if self._work is not None:
            wait([self._work])

    def _run(self) -> None:
        try:
            counted = 0
            while self._take():
                self._batch.step()
                added, counted = self._batch.num_tokens - counted, self._batch.num_tokens
                if added:  # a step may only have read on in a prompt, which was counted when that was begun
                    self.on_step(added)
            self._end("The server is shutting down.")
        except BaseException as error:
            self.error = error
            log.exception("The thread that runs the model died.")
            self._end(DIED)

    def _end(self, message: str) -> None:
        """Accept no more jobs, and end all that are left with this sentence."""
        with self._changed:
            self._stopping = True
            waiting = [*self._joining, *self._waiting]
            self._waiting.clear()
        self._batch.fail(message)
        for ticket in waiting:
            tell(ticket, Failed(message, 503))

    def _take(self) -> bool:
        """Let cancelled jobs leave and waiting ones join; sleeps while there is nothing to do. False to end.

        Rows are copied without the lock, for which `submit` and `cancel` would wait.
        """
        while True:
            self._batch.drop_cancelled()
            with self._changed:
                if self._stopping:
                    return False
                while self._waiting and len(self._batch) + len(self._joining) < self.max_batch:
                    self._joining.append(self._waiting.popleft())
                if not self._joining and not len(self._batch):
                    self._changed.wait()
            while self._joining:
                self._batch.join(self._joining[0])
                self._joining.popleft()
            if len(self._batch):
                return True
