"""The texts that are decoded side by side on the model's thread: they join, get their steps, and leave."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from foretoken.core.errors import ForetokenError, GrammarError, is_shortage
from foretoken.core.interfaces import Drafter, Path
from foretoken.core.random import Seeded, seeded
from foretoken.core.sequence import ANY_DEPTH, Sequence, Step
from foretoken.core.tree import TokenTree
from foretoken.core.walk import NodeScores
from foretoken.decode import Decoder, NoDrafter
from foretoken.engine import Engine, read_step
from foretoken.models.text import TextStream
from foretoken.serve.errors import ApiError, unavailable
from foretoken.serve.jobs import Deliver, Job, Progress, TokenLogprob
from foretoken.serve.prefix import BLOCK, Block, Prefill, PrefixCache, restore
from foretoken.serve.scoring import prompt_logprobs, step_logprobs

log = logging.getLogger(__name__)
GOOD_STEPS = 1000  # steps without a failure after which rows that were given up for lack of memory are tried again


@dataclass(eq=False)
class Ticket:
    """One submitted job, and what receives its news.

    job: the text that is to be generated.
    deliver: is called with all news of the job.
    cancelled: whether nobody waits for the job any more.
    submitted: when it was submitted, in seconds of time.perf_counter.
    """

    job: Job
    deliver: Deliver
    cancelled: bool = False
    submitted: float = field(default_factory=time.perf_counter)


@dataclass(eq=False)
class Text:
    """One job in work.

    ticket: the submitted job.
    sequence: its committed ids and settings, as the decoder takes them.
    stream: turns its ids into text.
    num_cached: number of tokens of its prompt that the prefix cache held.
    waited_s: seconds from its submission to the start of its work.
    logprobs, tree: log probabilities and token tree of its last step, where the job asks for them.
    scoring: yields those of its prompt, until all are there; None where the job does not ask for them.
    prompt_logprobs: what it has yielded, until it is delivered with the first step.
    """

    ticket: Ticket
    sequence: Sequence
    stream: TextStream
    num_cached: int = 0
    waited_s: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    tree: dict[str, tuple[int, ...]] | None = None
    scoring: Iterator[tuple[TokenLogprob, ...]] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def undoing(text: Text) -> Callable[[], None]:
    """Return a function that takes `text` back to its present state, for a step that fails."""
    sequence, rng = text.sequence, text.sequence.rng
    assert isinstance(rng, Seeded)
    length, numbers = len(sequence.ids), rng.generator.get_state()

    def undo() -> None:
        del sequence.ids[length:]
        sequence.finished = False
        rng.generator.set_state(numbers)

    return undo


class KeepingDecoder(Decoder):
    """A decoder that copies what its sessions keep of a text into the prefix cache when the text leaves.

    cache: the prefix cache.
    """

    cache: PrefixCache

    def leave(self, sequence: Sequence) -> None:
        ids = sequence.ids
        try:
            self.cache.keep(self, self.sequences.index(sequence), ids, self.cache.match(ids))
        except Exception:  # too little memory, say; the step is over, and must not be repeated
            log.exception("The prefix cache could not keep a text.")
            self.cache.clear()
        super().leave(sequence)


class Batch:
    """The texts in work: those whose prompts are still being read, and those with a row in the decoder.

    engine, context, cache_bytes: as for `Worker`.
    size: the most texts at once.
    cache: the prefix cache.
    prefill: reads prompts piece by piece.
    num_tokens: number of tokens so far: of all prompts that were taken into work, and of the texts that followed.
    """

    def __init__(self, engine: Engine, size: int, context: int, cache_bytes: int) -> None:
        self._engine, self._size, self._context = engine, size, context
        self._reading: deque[Text] = deque()
        self._texts: dict[Sequence, Text] = {}
        self._drafter: Drafter = engine.drafter
        self.cache = PrefixCache(cache_bytes)
        self.prefill = Prefill(lambda: self._open(1), self.cache)
        self._decoder = self._open(size)
        self._room = size  # the most rows of the decoder that are used; fewer after a lasting shortage of memory
        self._short = False  # whether the last step failed for all texts together, and for none by itself
        self._good = 0  # number of steps since the last one that failed
        self._step_s = 0.0  # seconds that the last step took
        self._num_failed = 0  # number of texts that failed after they had a row
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._texts) + len(self._reading)

    @property
    def num_wanted(self) -> int:
        """Number of texts in work that somebody waits for; the others leave before the next step."""
        return sum(not text.ticket.cancelled for text in [*self._texts.values(), *self._reading])

    @property
    def num_ids(self) -> int:
        """Number of committed ids of all texts in work, their prompts included."""
        return sum(len(text.sequence.ids) for text in [*self._texts.values(), *self._reading])

    def _open(self, size: int) -> Decoder:
        """Return a new decoder with `size` rows."""
        engine, slots = self._engine, self._context + self._engine.drafter.max_nodes
        decoder = KeepingDecoder(engine.target, self._drafter, engine.verifier, size, slots, self._watch)
        decoder.cache = self.cache
        return decoder

    def _draft_by(self, drafter: Drafter) -> None:
        """Use another drafter from now on, and empty the prefix cache.

        The cached blocks may lack hidden states that the target's sessions keep with this drafter, or have too many.
        """
        self._drafter = drafter
        self.cache.clear()
        self.prefill.reset()

    def join(self, ticket: Ticket) -> None:
        """Take the job of `ticket` into work; a prompt of more than BLOCK ids is read in pieces before a step."""
        if not len(self) and (self._drafter is not self._engine.drafter or self._room < self._size):
            if self._drafter is not self._engine.drafter:  # the texts with which it failed have left
                self._draft_by(self._engine.drafter)
            self._reopen(self._size)
        job, tokenizer = ticket.job, self._engine.tokenizer
        self.num_tokens += len(job.ids)
        new = min(job.max_new_tokens, self._context - len(job.ids))
        limit = ANY_DEPTH if job.depth is None else job.depth
        shows = job.top_logprobs is not None
        sequence = Sequence(list(job.ids), job.sampling, seeded(job.seed), new, job.eos_ids, limit, shows)
        assert tokenizer is not None
        stream = TextStream(tokenizer, job.stops, job.ids)
        text = Text(ticket, sequence, stream, waited_s=time.perf_counter() - ticket.submitted)
        if job.scores_prompt:
            text.scoring = prompt_logprobs(lambda: self._open(1), self.cache, job.ids, job.top_logprobs or 0)
        if len(job.ids) <= BLOCK and len(self._texts) < self._room and text.scoring is None:
            self._enter(text, [])
        else:
            self._reading.append(text)

    def _enter(self, text: Text, chain: list[Block]) -> None:
        """Give a text its row in the decoder, and copy the blocks of `chain` into the row.

        Where that fails, the text's job fails.
        """
        self._texts[text.sequence] = text
        self._decoder.join(text.sequence)
        try:
            restore(self._decoder, len(self._decoder.sequences) - 1, chain)
        except Exception as error:
            log.exception("A text could not take over what was read of it.")
            Decoder.leave(self._decoder, text.sequence)
            self._fail(text, error)

    def drop_cancelled(self) -> None:
        """Remove the texts that nobody waits for any more."""
        for sequence in [sequence for sequence, text in self._texts.items() if text.ticket.cancelled]:
            self._decoder.leave(sequence)
            del self._texts[sequence]
        if self.prefill.busy and self._reading[0].ticket.cancelled:
            self.prefill.end()
        for text in [text for text in self._reading if text.ticket.cancelled]:
            self._reading.remove(text)

    def fail(self, message: str) -> None:
        """End all texts for good; each of their jobs fails with the sentence `message` and HTTP status 503."""
        for text in [*self._texts.values(), *self._reading]:
            tell(text.ticket, unavailable(503, message))
        self._texts.clear()
        self._reading.clear()

    def step(self) -> None:
        """Read a piece of the next prompt, then take one step for every text whose prompt was read."""
        if self._reading and len(self._texts) < self._room:
            text = self._reading[0]
            try:
                chain = self._read(text)
            except Exception as error:
                log.exception("A prompt could not be read.")
                self.prefill.reset()
                self._reading.popleft()
                tell(text.ticket, failure(error))
            else:
                if chain is not None:
                    self._reading.popleft()
                    if text.sequence.max_new_tokens:
                        self._enter(text, chain)
        if self._texts:
            began = time.perf_counter()
            self._step()
            self._step_s = time.perf_counter() - began

    def _read(self, text: Text) -> list[Block] | None:
        """Read the next piece of a text's prompt, after it is scored where the job asks for that.

        Returns its blocks once all of them are read, None before. Where no tokens are to follow, nothing is read.
        """
        if text.scoring is not None:
            if (piece := next(text.scoring, None)) is not None:
                text.prompt_logprobs += piece
                return None
            text.scoring = None
            if not text.sequence.max_new_tokens:
                scored, waited = text.prompt_logprobs, text.waited_s
                end = Progress("", (), (), 0, waited_s=waited, finish_reason="length", prompt_logprobs=scored)
                tell(text.ticket, end)
                return []
        if not self.prefill.busy:
            chain = self.cache.match(text.sequence.ids[:-1])  # the last id is never read before a step
            num_cached = BLOCK * len(chain)
            if len(text.sequence.ids) == len(text.ticket.job.ids):  # not so for one that came back from the decoder
                text.num_cached = num_cached
            if len(text.sequence.ids) - 1 - num_cached < BLOCK:
                return chain
            self.prefill.begin(text.sequence, chain)
        return self.prefill.end() if self.prefill.read(self._step_s if self._texts else None) else None

    def _step(self) -> None:
        """Take one step for every text with a row, and deliver what it brought."""
        undos = [undoing(text) for text in self._texts.values()]
        try:
            steps = self._decoder.step()
        except Exception as error:
            log.warning("A step of %d texts failed, they are stepped one by one: %r", len(undos), error)
            self._short, self._good = self._step_alone(undos, self._short), 0
        else:
            self._short = False
            if self._decoder.gave_up:
                self._step_alone(undos)
            else:
                self._report(self._decoder, steps)
                self._good += 1
                if self._reading and self._room < self._size and self._good >= GOOD_STEPS:
                    self._grow()

    def _grow(self) -> None:
        """Open the decoder anew with up to twice the rows, for the texts that have one and those that wait."""
        for row, sequence in enumerate(self._decoder.sequences):
            self.cache.keep(self._decoder, row, sequence.ids, self.cache.match(sequence.ids))
        self._good = 0
        self._reopen(min(2 * self._room, self._size), self._room)

    def _reopen(self, rows: int, enough: int = 0) -> None:
        """Open the decoder anew, with as many rows as the memory suffices for; their number becomes its room.

        The texts get rows again; those for which there is no room wait until another one has ended.

        rows: the number of rows to begin with. If that fails, half of them are tried, and so on.
        enough: a number of rows that is tried before any smaller one.
        """
        vars(self).pop("_decoder", None)  # first, since its memory may be what lacks
        while True:
            self._room = rows
            try:
                self._decoder = self._open(rows)
                break
            except Exception as error:
                if rows == 1:
                    raise
                log.warning("There is no memory for %d texts at once: %r", rows, error)
            rows = max(rows // 2, enough) if rows > enough else rows // 2
        texts = list(self._texts.values())
        for text in texts[self._room :]:
            del self._texts[text.sequence]
            self._reading.append(text)
        for text in texts[: self._room]:
            self._enter(text, self.cache.match(text.sequence.ids[:-1]))

    def _step_alone(self, undos: list[Callable[[], None]], short: bool = False) -> bool:
        """Repeat a step with each text by itself, after the model or the drafter failed for all of them together.

        A text that fails by itself too ends, and one for which the drafter fails goes on without drafts; the others
        get the tokens that the failed step would have brought. If no text fails by itself, and the step before had
        to be repeated in this way too, the last text gives up its row and waits until another one has ended.

        undos: what `undoing` returned for each text before the step.
        short: whether the step before failed for all texts together, and for none by itself.
        Returns whether no text failed by itself.
        """
        del self._decoder  # the memory that it takes may be what the step lacked
        for undo in undos:
            undo()
        texts, gave_up, failed_before = list(self._texts.values()), [], self._num_failed
        num_drafted = sum(text.sequence.depth_limit > 0 for text in texts)
        for text in texts:
            try:
                if self._one_step(text):
                    gave_up.append(text.sequence)
            except Exception as error:
                log.exception("A text failed.")
                self._fail(text, error)
        if len(gave_up) > 1 and len(gave_up) >= num_drafted:
            self._draft_by(NoDrafter())  # the drafter fails for every text
        for sequence in gave_up:
            sequence.depth_limit = 0
        none_failed = self._num_failed == failed_before
        self._reopen(max(len(self._texts) - 1, 1) if short and none_failed else self._room)
        return none_failed

    def _one_step(self, text: Text) -> bool:
        """Take a step for one text, in a decoder of its own. Returns whether the drafter failed."""
        decoder, sequence = self._open(1), text.sequence
        decoder.join(sequence)
        restore(decoder, 0, self.cache.match(sequence.ids[:-1]))
        steps = decoder.step()
        self._report(decoder, steps)
        return decoder.gave_up

    def _report(self, decoder: Decoder, steps: list[tuple[Sequence, Step]]) -> None:
        """Deliver to each job what a step brought, and forget the texts that ended with it."""
        for sequence, step in steps:
            text = self._texts[sequence]
            try:
                tokens, new, reason = read_step(text.stream, sequence, step)
            except GrammarError as error:
                if not sequence.finished:
                    decoder.leave(sequence)
                self._fail(text, error)
                continue
            self.num_tokens += len(tokens)
            if reason is not None:
                del self._texts[sequence]
                if not sequence.finished:  # at a stop string
                    decoder.leave(sequence)
            origins, shown = step.origins[: len(tokens)], text.logprobs[: len(tokens)]
            known = text.tree, text.num_cached, text.waited_s, reason, text.prompt_logprobs
            text.prompt_logprobs = ()
            tell(text.ticket, Progress(new, tuple(tokens), origins, step.num_drafted, shown, *known))

    def _watch(self, sequence: Sequence, tree: TokenTree, scores: NodeScores, path: Path, token: int) -> None:
        """Keep what the jobs ask for besides their tokens; this is the decoder's observer."""
        text = self._texts[sequence]
        job = text.ticket.job
        if job.top_logprobs is not None:
            text.logprobs = step_logprobs(tree, scores, path, token, job.top_logprobs)
        if job.shows_trees:
            text.tree = {"tokens": tree.tokens, "parents": tree.parents, "path": path}

    def _fail(self, text: Text, error: Exception) -> None:
        del self._texts[text.sequence]
        self._num_failed += 1
        tell(text.ticket, failure(error))


def tell(ticket: Ticket, news: Progress | ApiError) -> None:
    """Deliver `news` of the job of `ticket`, unless it is cancelled."""
    if not ticket.cancelled:
        try:
            ticket.deliver(news)
        except RuntimeError:  # the event loop is closed in which it is read: the server ended
            ticket.cancelled = True


def failure(error: Exception) -> ApiError:
    """Return what is delivered where a job failed with `error`; the HTTP status is 400 for a GrammarError, else 500."""
    if isinstance(error, ForetokenError):
        return ApiError(400 if isinstance(error, GrammarError) else 500, str(error))
    if is_shortage(error):
        said = "The memory did not suffice for this request: shorten the prompt, or ask for fewer tokens."
        return ApiError(500, said)
    return ApiError(500, f"The model failed at this request ({type(error).__name__}).")
