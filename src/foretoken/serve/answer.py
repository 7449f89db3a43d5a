"""The answer to a request for texts: one JSON object, or a stream of server-sent events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from foretoken.models.text import TextStream
from foretoken.serve.batch import Ticket
from foretoken.serve.calls import Call, CallReader
from foretoken.serve.errors import ApiError, too_long
from foretoken.serve.forms import Form
from foretoken.serve.guards import LINGER_S
from foretoken.serve.jobs import Job, Progress, TokenLogprob
from foretoken.serve.metrics import Tally
from foretoken.serve.requests import Asked
from foretoken.serve.service import Service
from foretoken.version import __version__


@dataclass
class Choice:
    """One text of an answer, as far as it has grown.

    job: what was asked for.
    pieces: gives the text of single tokens, where the steps are shown.
    reader: finds tool calls in the text; None where none are read.
    text: the text, without calls.
    calls: the calls found.
    logprobs: (number of characters of the text before it, log probabilities) of the tokens that are still to be listed.
    num_chars: number of characters of the tokens whose `offsets` are known.
    num_certain: number of characters of the text that are certain, with those of calls.
    finish_reason: OpenAI's word for why it ended; None before the end.
    last: moment of the last step, in seconds of time.perf_counter; None before the first step.
    """

    job: Job
    pieces: TextStream
    reader: CallReader | None
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    num_chars: int = 0
    num_certain: int = 0
    finish_reason: str | None = None
    last: float | None = None

    @cached_property
    def spelled(self) -> TextStream:
        """Gives the text of single tokens without regard to stop strings, for `offsets`."""
        return TextStream(self.pieces.tokenizer, (), () if self.job.scores_prompt else self.job.ids)

    def offsets(self, given: Sequence[TokenLogprob]) -> list[int]:
        """Return the number of characters of the text before each of the next tokens, `given`."""
        found = []
        for x in given:
            found.append(self.num_chars)
            self.num_chars += len(self.spelled.push([x.token]))
        return found

    def read(self, progress: Progress) -> tuple[str, list[Call]]:
        """Return (text, calls) that a step adds for the client. progress: what the step added to the job."""
        reason, text, calls = progress.finish_reason, progress.text, []
        if self.reader is not None:
            text, calls = self.reader.read(text, last=reason is not None)
        self.text += text
        self.calls += calls
        self.finish_reason = "tool_calls" if reason == "stop" and self.calls else reason
        self.num_certain += len(progress.text)
        new = [*progress.prompt_logprobs, *progress.logprobs]
        self.logprobs += zip(self.offsets(new), new, strict=True)
        return text, calls

    def listed(self, silent: Collection[int]) -> list[tuple[int, TokenLogprob]]:
        """Return those of `logprobs` whose token has begun to show in the text, and forget them.

        A token that is left at the end does not show there, since it ended the text or a stop string cut it off. Beside
        those of the prompt all are listed, one for each token.

        silent: tokens that never show; they are left out.
        """
        if self.job.scores_prompt:
            given, self.logprobs = self.logprobs, []
            return given
        count = sum(before < self.num_certain for before, _ in self.logprobs)
        given, self.logprobs = self.logprobs[:count], self.logprobs[count:]
        return [(before, x) for before, x in given if x.token not in silent]


class Answer(Response):
    """Submits the jobs of a request, and writes their texts as the response.

    If the client goes away, or the time limit is reached, the jobs are cancelled, as they are where one of them fails.

    service: the model with what all endpoints share.
    form: how chat completions, or completions, write an answer.
    asked: the checked request.
    facts: what the request's line in the log says; the answer adds its numbers of tokens, and what went wrong.
    """

    def __init__(self, service: Service, form: Form, asked: Asked, facts: dict[str, Any]) -> None:
        super().__init__()
        self.service, self.form, self.asked, self.facts = service, form, asked, facts
        self.created = int(time.time())
        self.tally = Tally(asked.jobs, asked.n)
        tokenizer = service.spelling.tokenizer
        self.choices = [
            Choice(job, TextStream(tokenizer, job.stops, job.ids), asked.calls.reader() if asked.calls else None)
            for job in asked.jobs
        ]
        self.tickets: dict[int, Ticket] = {}  # of the jobs in work, by their index
        self.begun = False  # whether the response has begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request as an ASGI application, which gets scope, receive and send from the server."""
        work = self._stream(send) if self.asked.stream else self._whole(scope, receive, send)
        try:
            if not await _unless_gone(self._in_time(work), receive):
                self.facts["disconnected"] = True
        except ApiError as error:
            self.facts["error"] = error.message
            if error.status == 429:
                self.service.metrics.rejections.inc()
            if not self.begun:
                raise
            with suppress(TimeoutError):  # a client that does not read holds up the sending until it goes
                async with asyncio.timeout(LINGER_S):
                    await send(_body(f"data: {json.dumps(error.body)}\n\n", more=False))
        finally:
            self.facts["prompt_tokens"] = self.tally.prompt_tokens
            self.facts["completion_tokens"] = self.tally.num_tokens

    async def _in_time(self, work: Awaitable[None]) -> None:
        """Await `work`; jobs that are left then are cancelled. Raises ApiError 408 after the service's timeout."""
        seconds = self.service.timeout
        try:
            async with asyncio.timeout(seconds):
                await work
        except TimeoutError:
            raise too_long(f"The request took more than {seconds:g} seconds, and was ended.") from None
        finally:
            for ticket in self.tickets.values():
                self.service.worker.cancel(ticket)

    async def _steps(self) -> AsyncIterator[tuple[int, Progress]]:
        """Yield (index of a choice, what a step added to it) for each step, after the metrics have counted it.

        Raises ApiError: 429 where the queue has no room for all jobs, 503 where no more are taken, and for one that
        failed.
        """
        metrics, loop = self.service.metrics, asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Progress | ApiError]] = asyncio.Queue()

        def deliver(index: int, came: Progress | ApiError) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, (index, came))

        for index, job in enumerate(self.asked.jobs):
            self.tickets[index] = self.service.worker.submit(job, partial(deliver, index))
        while self.tickets:
            index, progress = await queue.get()
            if isinstance(progress, ApiError):
                raise progress
            if progress.finish_reason is not None:
                del self.tickets[index]
            choice, now = self.choices[index], time.perf_counter()
            self.tally.record(index, progress)
            if choice.last is None:
                metrics.began(len(choice.job.ids), progress, now - self.tally.start)
            else:
                metrics.between.observe(now - choice.last)
            choice.last = now
            metrics.step(progress)
            yield index, progress
        metrics.ended(self.tally)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer as one JSON object, once all choices are finished."""
        async for index, progress in self._steps():
            self.choices[index].read(progress)
        choices = []
        for index, choice in enumerate(self.choices):
            text = self.asked.echoed[index] + choice.text if self.asked.echoed else choice.text
            written = self.form.whole(text, choice.calls, self._logprobs(choice))
            choices.append({"index": index, **written, "finish_reason": choice.finish_reason})
        body = {**self._frame(self.form.name), "choices": choices, **self._end()}
        self.begun = True
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Send the answer as server-sent events, each of which is one chunk."""
        async for chunk in self._chunks():
            if not self.begun:
                self.begun = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send(_body(f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"))
        await send(_body("data: [DONE]\n\n", more=False))

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON objects of a stream, in the order in which the steps come."""
        frame, options, opened = self._frame(self.form.chunk_name), self.asked.options, set[int]()
        if options.include_usage:
            frame["usage"] = None

        def chunk(index: int, written: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            made = {**frame, "choices": [{"index": index, **written, "finish_reason": reason}]}
            return {**made, "usage": self.tally.usage} if options.continuous_usage_stats else made

        async for index, progress in self._steps():
            if index not in opened:
                opened.add(index)
                before = self.asked.echoed[index] if self.asked.echoed else None if self.asked.calls else ""
                opening = self.form.opening(before)
                if opening is not None:
                    yield chunk(index, opening)
            choice = self.choices[index]
            text, calls = choice.read(progress)
            logprobs = self._logprobs(choice)
            if text or calls or logprobs is not None or options.include_steps:
                news = chunk(index, self.form.part(text, calls, logprobs))
                if options.include_steps:
                    news["step"] = self._step(choice, progress)
                yield news
            if choice.finish_reason is not None:
                yield chunk(index, self.form.part("", (), None), choice.finish_reason)
        if options.include_usage:
            yield {**frame, "choices": [], **self._end()}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Return the log probabilities of a choice's next tokens as JSON.

        None where its job does not ask for them, and in a stream where none of the tokens shows yet.
        """
        spelling = self.service.spelling
        given = choice.listed(spelling.silent)
        if choice.job.top_logprobs is None or (self.asked.stream and not given):
            return None
        return self.form.logprobs([x for _, x in given], spelling, [before for before, _ in given])

    def _step(self, choice: Choice, progress: Progress) -> dict[str, Any]:
        """Return the `step` of a chunk, a field of ours: its tokens with their origin, and the labelled token tree."""
        texts = [choice.pieces.push([token]) for token in progress.token_ids]
        if progress.finish_reason is not None and texts:
            texts[-1] += choice.pieces.finish()
        tokens = [
            {"id": token, "text": text, "origin": origin}
            for token, text, origin in zip(progress.token_ids, texts, progress.origins, strict=True)
        ]
        tree, label = progress.tree, self.service.spelling.label
        shown = None if tree is None else {**tree, "labels": [label(token) for token in tree["tokens"]]}
        return {"tokens": tokens, "num_drafted": progress.num_drafted, "tree": shown}

    def _frame(self, kind: str) -> dict[str, Any]:
        """Return the fields that an answer and each of its chunks begin with. kind: OpenAI's `object`."""
        return {
            "id": self.form.prefix + str(self.facts["request_id"]),
            "object": kind,
            "created": self.created,
            "model": self.service.name,
            "system_fingerprint": f"foretoken-{__version__}",
        }

    def _end(self) -> dict[str, Any]:
        """Return the fields at the end of an answer: OpenAI's usage, vLLM's metrics, and our seed."""
        return {"usage": self.tally.usage, "metrics": self.tally.metrics, "seed": self.asked.seed}


def _body(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": more}


async def _unless_gone(work: Awaitable[None], receive: Receive) -> bool:
    """Await `work`, which is cancelled where the client disconnects before; return whether it came to its end."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if done := task.done():
            task.result()  # which raises its exception
        return done
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
