"""The thread that owns the model: jobs come in from any thread, and are decoded in one batch that is never closed."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Condition

from foretoken.core.errors import ForetokenError
from foretoken.engine import Engine
from foretoken.serve.batch import Batch, Ticket, tell
from foretoken.serve.errors import unavailable
from foretoken.serve.jobs import Deliver, Job
from foretoken.serve.owner import Owner

log = logging.getLogger(__name__)
CONTEXT = 4096  # ids of one text where neither the caller nor the model says how many
CACHE_BYTES = 1 << 30
DIED, DOWN = "The thread that runs the model has died: restart the server.", "The server is shutting down."


class Worker:
    """Decodes the jobs of a server, up to `max_batch` side by side; each has the text that it would have alone.

    All methods may be called from any thread. The model runs on the worker's own. No job is taken before `start`.

    engine: the models and their settings, with a tokenizer.
    max_batch: the most jobs decoded at once.
    context: the most ids of one text, its prompt included; None: the model's own context, or 4096 if it names none.
    max_queue: the most jobs that may wait for others to end.
    cache_bytes: the most memory of the prefix cache, in bytes; 0: there is no cache.
    owner: the thread that loaded the engine, where that is to be the worker's; None: a new thread.
    Raises ForetokenError for a context that the model does not take, and where memory does not suffice.

    error: the exception that the thread died of; None while it has not died.
    on_step: is called on the worker's thread after a step that added tokens, with their number: the emitted ones, and
        those of each prompt that joined.
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
        most = engine.target.lm.context
        if context is not None and most is not None and context > most:
            raise ForetokenError(
                f"context is {context}, and {engine.target.name} takes {most} tokens: give at most that."
            )
        self.max_batch, self.max_queue = max_batch, max_queue
        self.context = context or most or CONTEXT
        self.error: BaseException | None = None
        self.on_step: Callable[[int], None] = lambda num_tokens: None
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
        """Share of the slots for keys and values that the texts in work take, from 0 to 1."""
        return self._batch.num_ids / (self.max_batch * self.context)

    def start(self) -> None:
        """Start the work on jobs; it cannot be called twice."""
        assert self._owner is not None
        self._work = self._owner.submit(self._run)
        self._owner = None  # one that nobody else holds ends with the work

    def submit(self, job: Job, deliver: Deliver) -> Ticket:
        """Queue a job, and return the ticket that `cancel` takes.

        job: the text that is to be generated.
        deliver: is called with the job's news on the worker's thread; it must return at once.
        Raises ForetokenError for a job that does not fit the context, and ApiError: 429 where too many wait, 503 where
        no more are accepted.
        """
        if not 0 < len(job.ids) < self.context:
            raise ForetokenError(
                f"The prompt has {len(job.ids)} tokens, and the context is {self.context}: give at least one token, "
                "and fewer than the context has."
            )
        ticket = Ticket(job, deliver)
        with self._changed:
            if self._stopping or self.error is not None:
                raise unavailable(503, DIED if self.error is not None else DOWN)
            if len(self._waiting) + len(self._joining) + self._batch.num_wanted >= self.max_batch + self.max_queue:
                room = f"it takes {self.max_batch} texts side by side and {self.max_queue} that wait"
                raise unavailable(429, f"The server has no room for so many texts now: {room}. Try again later.")
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End the job of `ticket`, whose news nobody wants any more; its row is free after one more step at most."""
        with self._changed:
            ticket.cancelled = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._changed.notify_all()

    def end(self) -> None:
        """Have all jobs and the work ended after the step under way; does not wait for that."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End all jobs and the work as `end` does, and wait until it is done."""
        self.end()
        if self._work is not None:
            wait([self._work])

    def _run(self) -> None:
        """Work on jobs until `end` is called, or an exception ends the work."""
        try:
            counted = 0
            while self._take():
                self._batch.step()
                added, counted = self._batch.num_tokens - counted, self._batch.num_tokens
                if added:  # none where it only read a piece of a prompt, whose tokens were counted when it joined
                    self.on_step(added)
            self._end(DOWN)
        except BaseException as error:
            self.error = error
            log.exception("The thread that runs the model died.")
            self._end(DIED)

    def _end(self, message: str) -> None:
        """Accept no more jobs; those that are left fail with the sentence `message`."""
        with self._changed:
            self._stopping = True
            waiting = [*self._joining, *self._waiting]
            self._waiting.clear()
        self._batch.fail(message)
        for ticket in waiting:
            tell(ticket, unavailable(503, message))

    def _take(self) -> bool:
        """Let cancelled jobs leave and waiting ones join; sleep while there is nothing to do.

        The lock is not held while rows are copied, since `submit` and `cancel` would have to wait for it.
        Returns False where the work is to end, else True.
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
