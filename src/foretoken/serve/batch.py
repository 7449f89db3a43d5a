"""The texts that are decoded side by side on the model's thread: they join, get their steps, and leave."""

import logging
from dataclasses import dataclass, field

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.interfaces import Drafter
from foretoken.core.random import Seeded, seeded
from foretoken.core.sequence import ANY_DEPTH, Sequence, Step
from foretoken.decode import Decoder, NoDrafter
from foretoken.engine import Engine, finish_reason, read_step
from foretoken.models.text import TextStream
from foretoken.serve.jobs import Deliver, Failed, Job, Progress

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Ticket:
    """One submitted job, and who is told of it.

    cancelled: whether nobody waits for it any more.
    """

    job: Job
    deliver: Deliver
    cancelled: bool = False


@dataclass(eq=False)
class Text:
    """One job in work.

    rng: the source of the sequence's random numbers.
    stream: turns its ids into text, None where the engine has no tokenizer.
    """

    ticket: Ticket
    sequence: Sequence
    rng: Seeded
    stream: TextStream | None


@dataclass
class Mark:
    """Where a text was before a step, to go back there if the step fails."""

    text: Text
    length: int = field(init=False)
    numbers: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.text.sequence.ids)
        self.numbers = self.text.rng.generator.get_state()

    def restore(self) -> None:
        """Undo what happened to the sequence since."""
        del self.text.sequence.ids[self.length :]
        self.text.sequence.finished = False
        self.text.rng.generator.set_state(self.numbers)


class Batch:
    """The texts in work, one row of the decoder each."""

    def __init__(self, engine: Engine, size: int, context: int) -> None:
        """size: the most texts at once. context: the most ids of one text, its prompt included."""
        self._engine = engine
        self._size, self._context = size, context
        self._texts: dict[Sequence, Text] = {}
        self._drafter: Drafter = engine.drafter
        self._decoder = self._open(size)

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_ids(self) -> int:
        """Committed ids of all texts in work."""
        return sum(len(sequence.ids) for sequence in list(self._texts))

    def _open(self, size: int) -> Decoder:
        engine, drafter = self._engine, self._drafter
        return Decoder(engine.target, drafter, engine.verifier, size, self._context + engine.drafter.max_nodes)

    def join(self, ticket: Ticket) -> None:
        """Take a job into work; its prompt is read with the next step."""
        if not self._texts and self._drafter is not self._engine.drafter:
            self._drafter = self._engine.drafter  # what made it fail may have left
            self._decoder = self._open(self._size)
        job, tokenizer = ticket.job, self._engine.tokenizer
        rng = seeded(job.seed)
        new = min(job.max_new_tokens, self._context - len(job.ids))
        limit = ANY_DEPTH if job.depth is None else job.depth
        sequence = Sequence(list(job.ids), job.sampling, rng, new, job.eos_ids, limit)
        stream = TextStream(tokenizer, job.stops, job.ids) if tokenizer else None
        self._texts[sequence] = Text(ticket, sequence, rng, stream)
        self._decoder.join(sequence)

    def drop_cancelled(self) -> None:
        """Let the texts leave that nobody waits for any more."""
        for sequence in [sequence for sequence, text in self._texts.items() if text.ticket.cancelled]:
            self._decoder.leave(sequence)
            del self._texts[sequence]

    def fail(self, message: str) -> None:
        """End all texts with this sentence, for good."""
        for text in list(self._texts.values()):
            self._fail(text, message)

    def step(self) -> None:
        """One step of every text, and its news to those who wait."""
        marks = [Mark(text) for text in self._texts.values()]
        try:
            steps = self._decoder.step()
        except Exception as error:
            log.warning("A step of %d texts failed, they are stepped one by one: %r", len(marks), error)
            self._step_alone(marks)
        else:
            if self._decoder.gave_up:
                self._step_alone(marks)
            else:
                self._report(self._decoder, steps)

    def _step_alone(self, marks: list[Mark]) -> None:
        """The step again, each text by itself, after the model or the drafter failed for all together.

        A text that fails by itself ends, and one for which the drafter fails goes on without drafts; the others come
        out as they would have beside them.
        """
        del self._decoder  # its memory may be what is wanting
        for mark in marks:
            mark.restore()
        drafted, gave_up = [mark.text.sequence for mark in marks if mark.text.sequence.depth_limit], []
        for mark in marks:
            sequence, decoder = mark.text.sequence, self._open(1)
            decoder.join(sequence)
            try:
                steps = decoder.step()
            except Exception as error:
                log.exception("A text failed.")
                self._fail(mark.text, sentence(error))
                continue
            if decoder.gave_up:
                gave_up.append(sequence)
            self._report(decoder, steps)
        if len(gave_up) > 1 and len(gave_up) >= len(drafted):
            self._drafter = NoDrafter()  # it fails for every text
        for sequence in gave_up:
            sequence.depth_limit = 0
        self._decoder = self._open(self._size)
        for sequence in self._texts:
            self._decoder.join(sequence)

    def _report(self, decoder: Decoder, steps: list[tuple[Sequence, Step]]) -> None:
        for sequence, step in steps:
            text = self._texts[sequence]
            tokens, new, stopped = read_step(text.stream, step, sequence.finished)
            if stopped and not sequence.finished:
                decoder.leave(sequence)
            reason = finish_reason(sequence, stopped)
            if reason is not None:
                del self._texts[sequence]
            origins = step.origins[: len(tokens)]
            tell(text.ticket, Progress(new, tuple(tokens), origins, step.num_drafted, finish_reason=reason))

    def _fail(self, text: Text, message: str) -> None:
        del self._texts[text.sequence]
        tell(text.ticket, Failed(message))


def tell(ticket: Ticket, news: Progress | Failed) -> None:
    """Deliver the news; one who cannot be told any more has left."""
    if ticket.cancelled:
        return
    try:
        ticket.deliver(news)
    except Exception:
        log.exception("A job's news could not be delivered; it is cancelled.")
        ticket.cancelled = True


def sentence(error: Exception) -> str:
    """Why a job failed, for the one who asked for it."""
    if isinstance(error, ForetokenError):
        return str(error)
    if isinstance(error, MemoryError):
        return "The memory did not suffice for this request: shorten the prompt, or ask for fewer tokens."
    return f"The model failed at this request ({type(error).__name__})."
