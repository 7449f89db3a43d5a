"""The public engine: it continues texts, several at a time."""

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from operator import index
from typing import Any, Literal, TypedDict, Unpack, cast, overload

from torch import Tensor

from foretoken.core import sequence as core
from foretoken.core.errors import ContextError, ForetokenError
from foretoken.core.forked import OfOneProcess, models_run
from foretoken.core.interfaces import Drafter
from foretoken.core.laws import Opaque
from foretoken.core.limits import check_choice, check_seed, check_stops, count, whole
from foretoken.core.messages import Message, check_messages, is_conversation
from foretoken.core.random import seeded
from foretoken.core.sampling import Processor, Sampling
from foretoken.core.verifier import Verifier
from foretoken.decode import Decoder, NoDrafter, Observer
from foretoken.draft.source import Source
from foretoken.models.grammar import Grammar, check_grammars
from foretoken.models.target import LMTarget
from foretoken.models.text import TextStream, Tokenizer, chat_prompt, encode, turn_end
from foretoken.names import check_pair
from foretoken.recipe import AUTO, NO_DRAFTER, Recipe
from foretoken.stats import Stats

Messages = Sequence[Message]  # a conversation, for the tokenizer's chat template
Prompt = str | Sequence[int] | Tensor | Messages
FinishReason = Literal["stop", "length"]  # as in Result


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream` that shape p; see core.sampling.Sampling."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float]
    processors: tuple[Processor, ...]


class GenerateOptions(SamplingOptions, total=False):
    """All keyword arguments of `generate`, for type checkers; the signature below has the defaults."""

    max_new_tokens: int
    seed: int | None
    stop: str | Sequence[str] | None
    grammar: Grammar | None
    observer: Observer | None


@dataclass(frozen=True)
class Result:
    """The continuation of one prompt.

    text: without the prompt and without the stop string that ended it; empty if the engine has no tokenizer.
    token_ids: the emitted ids.
    stats: counts and times.
    seed: the seed of its random numbers.
    finish_reason: "stop" at an end-of-text token or a stop string, "length" at max_new_tokens or the end of the
        context.
    """

    text: str
    token_ids: list[int]
    stats: Stats
    seed: int
    finish_reason: FinishReason


@dataclass(frozen=True)
class Chunk:
    """What one step added to one sequence.

    index: the place of its prompt in the list of prompts, 0 for a single one.
    text: the text that has become certain; characters that are not complete, or may begin a stop string, come later.
    token_ids: the ids that the step emitted, at once.
    origins: per id "plain", "accepted", "corrected" or "bonus", as `core.sequence.Step.origins` explains.
    finish_reason: as in Result; None before the last chunk.
    stats: counts and times so far.
    """

    index: int
    text: str
    token_ids: list[int]
    origins: tuple[core.Origin, ...]
    finish_reason: FinishReason | None
    stats: Stats

    @property
    def finished(self) -> bool:
        """Whether this is the sequence's last chunk."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class Request:
    """One prompt in work.

    index: its place in the list of prompts.
    ids: those of the prompt.
    eos_ids: tokens that end the text.
    stream: makes text of ids as they come; None where the text is made of all ids at the end.
    constraints: processors that allow only tokens of a grammar.
    """

    index: int
    ids: list[int]
    eos_ids: frozenset[int]
    seed: int
    stream: TextStream | None
    constraints: tuple[Processor, ...]


@dataclass(frozen=True, repr=False)  # which would be pages
class Engine(OfOneProcess):
    """A target, a drafter and a verifier that belong together; made by `foretoken.load`.

    target, drafter, verifier: the parts of the decoding loop.
    tokenizer: turns texts into ids and back; None where only ids are given and wanted.
    eos_ids: tokens that end a text.
    recipe, source: what the drafter and the verifier were made of; see `foretoken.build.with_recipe`.
    max_batch: the most sequences that are decoded side by side; the others of a longer list join as these finish.

    Raises ForetokenError where the verifier is not lossless for the drafter's laws.
    """

    target: LMTarget
    drafter: Drafter
    verifier: Verifier
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    recipe: Recipe
    source: Source
    max_batch: int = 8

    def __post_init__(self) -> None:
        check_pair(self.drafter, self.verifier)

    @property
    def tree(self) -> str:
        """The name of the tree that is drafted, or "plain"; under method auto "auto, at most " and the name."""
        automatic = self.recipe.method == AUTO and not isinstance(self.drafter, NoDrafter)
        return f"auto, at most {self.recipe.tree}" if automatic else self.recipe.tree

    @property
    def rule(self) -> str | None:
        """The name of the verifier; None where nothing is drafted."""
        return None if isinstance(self.drafter, NoDrafter) else self.verifier.name

    @property
    def seeds_fix_texts(self) -> bool:
        """Whether a seed gives the same text whatever times are measured: where trees do not depend on a clock, or
        draft tokens are matched exactly and take no random numbers to draft."""
        if self.recipe.method != AUTO or not self.drafter.laws:
            return True
        drawn = self.recipe.law not in (None, "opaque") or not all(isinstance(x, Opaque) for x in self.drafter.laws)
        return self.verifier.name == "exact-match" and not drawn

    @property
    def kind(self) -> str:
        """The kind of its drafter, a name in `recipe.KINDS`."""
        return NO_DRAFTER if isinstance(self.drafter, NoDrafter) else self.recipe.vocab or self.source.kind

    @property
    def fingerprint(self) -> str:
        """An identifier of how it drafts, and of the weights that draft."""
        return self.source.fingerprint(self.recipe.vocab or self.source.kind)

    # To a type checker a text is also a sequence of texts; to us it is one prompt.
    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Result: ...

    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[Result]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        grammar: Grammar | None = None,
        observer: Observer | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Result | list[Result]:
        """Continue one prompt, or a list of prompts; returns one Result, or a list of them.

        The same prompt, settings and seed give the same text: in any batch where our kernel runs the models, and
        elsewhere but for rounding, which depends on the batch.
        Not so under method auto at temperature > 0, unless draft tokens are matched exactly (`seeds_fix_texts`): there
        measured times, or with a profile all prompts of the list together, choose the depths, and so which of the
        equally distributed texts comes out.

        prompt: a text, token ids, or a conversation (a list of messages {"role": ..., "content": ...}, see `chat`), or
            a list of these.
        max_new_tokens: the most tokens that are emitted per prompt; no more than the context leaves.
        seed: that of the random numbers; prompt i of a list has seed + i. None: a random one, which the result has.
        stop: a string, or several, that end the text before them.
        grammar: what the text must be, such as foretoken.Grammar.regex("[ab]+"); at max_new_tokens it is cut all the
            same.
        observer: a function that is called at every step, such as foretoken.Trace; see Observer in decode.py.
        sampling: temperature, top_k and so on, as in foretoken.Sampling.

        Raises ForetokenError, one sentence, for an argument that is out of its range or cannot be used.
        """
        prompts, single = _as_list(prompt)
        requests = self._requests(prompts, seed, stop, grammar, streaming=False)
        results: dict[int, Result] = {}
        ids: list[list[int]] = [[] for _ in requests]
        texts: list[list[str]] = [[] for _ in requests]
        for chunk in self._run(requests, *self._checked(max_new_tokens, sampling, observer)):
            i, request = chunk.index, requests[chunk.index]
            ids[i] += chunk.token_ids
            texts[i].append(chunk.text)
            if chunk.finish_reason is not None:
                text = self._text(request.ids, ids[i]) if request.stream is None else "".join(texts[i])
                results[i] = Result(text, ids[i], chunk.stats, request.seed, chunk.finish_reason)
        return results[0] if single else [results[i] for i in range(len(requests))]

    def _text(self, prompt: list[int], ids: list[int]) -> str:
        """Return the text of tokens `ids` behind a prompt of tokens; an empty one without a tokenizer."""
        if self.tokenizer is None:
            return ""
        stream = TextStream(self.tokenizer, (), prompt)
        return stream.push(ids) + stream.finish()

    def chat(
        self, messages: Messages | Sequence[Messages], **options: Unpack[GenerateOptions]
    ) -> Result | list[Result]:
        """Return the model's answer to a conversation, or the answers to a list of conversations.

        The tokenizer's chat template writes the conversation up to where the answer begins. The answer ends where the
        model ends its turn. `stream` takes conversations as well.

        messages: a list of {"role": "user", "content": "..."}, or a list of such lists; an assistant's message may have
            tool_calls in OpenAI's form.
        options: as in `generate`.

        Raises ForetokenError for what is no conversation, and for a tokenizer without a template.
        """
        many = isinstance(messages, Sequence) and bool(messages) and not any(isinstance(x, Mapping) for x in messages)
        if many and not isinstance(messages, (str, bytes)):
            for number, conversation in enumerate(messages, start=1):
                check_messages(conversation, f"Conversation {number}")
        else:
            check_messages(messages)
        return self.generate(messages, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        grammar: Grammar | None = None,
        observer: Observer | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Chunk]:
        """Yield what each step adds, as a Chunk; `chunk.index` is the place of its prompt in a list.

        prompt, max_new_tokens, seed, stop, grammar, observer, sampling: as in `generate`.
        """
        requests = self._requests(_as_list(prompt)[0], seed, stop, grammar, streaming=True)
        return self._run(requests, *self._checked(max_new_tokens, sampling, observer))

    def _checked(
        self, max_new_tokens: int, options: SamplingOptions, observer: Observer | None
    ) -> tuple[int, Sampling, Observer | None]:
        """Return the arguments of a call as `_run` takes them; raises ForetokenError for those that cannot be."""
        max_new_tokens = count("max_new_tokens", max_new_tokens)
        for name in sorted(options.keys() - SamplingOptions.__annotations__.keys()):
            check_choice("option", name, GenerateOptions.__annotations__)
        sampling, most = Sampling(**options), self.target.vocab_size - 1
        outside = [token for token in sampling.logit_bias if not 0 <= token <= most]
        if outside:
            raise ForetokenError(f"logit_bias has token id {outside[0]}: ids go from 0 to {most}.")
        if observer is not None and not callable(observer):
            raise ForetokenError(f"observer is {observer!r}: give a function, such as foretoken.Trace(engine).")
        return max_new_tokens, sampling, observer

    def _requests(
        self, prompts: Sequence[Prompt], seed: int | None, stop: str | Sequence[str] | None, grammar: Grammar | None,
        streaming: bool,
    ) -> list[Request]:  # fmt: skip
        seed = secrets.randbelow(2**31) if seed is None else whole("seed", seed)
        check_seed(seed, len(prompts))
        if grammar is not None and (isinstance(grammar, type) or not hasattr(grammar, "constraint")):
            raise ForetokenError(
                f"The grammar is a {type(grammar).__name__}: give foretoken.Grammar.regex(...) or another of its kinds."
            )
        stops = _stops(stop)
        if stops and self.tokenizer is None:
            raise ForetokenError("Stop strings need a tokenizer: pass tokenizer= to foretoken.load.")
        requests, turn = [], None
        if self.tokenizer is not None and any(map(is_conversation, prompts)):
            turn = turn_end(self.tokenizer)
        for i, prompt in enumerate(prompts):
            ids = self.encode(prompt, f"Prompt {i + 1}" if len(prompts) > 1 else "The prompt")
            text = TextStream(self.tokenizer, stops, ids) if self.tokenizer and (streaming or stops) else None
            ends = self.eos_ids | {turn} if turn is not None and is_conversation(prompt) else self.eos_ids
            held = () if grammar is None else (grammar.constraint(self.tokenizer, ends, len(ids)),)
            requests.append(Request(i, ids, ends, seed + i, text, held))
        return requests

    def encode(self, prompt: Prompt, which: str = "The prompt", tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids of a prompt: of a text, or of a conversation up to where the answer begins.

        prompt: one prompt, as in `generate`.
        which: what errors call it.
        tools: functions that the answer to a conversation may call, in OpenAI's form.

        Raises ForetokenError for a prompt that cannot be continued, such as one that fills the context.
        """
        if isinstance(prompt, (bytes, bytearray)):
            raise ForetokenError(f"{which} is {type(prompt).__name__}, which is no text: decode it, as by .decode().")
        if isinstance(prompt, str) or is_conversation(prompt):
            advice = " in the model, which has fewer tokens than the tokenizer: take the one it was made with"
            if self.tokenizer is None:
                raise ForetokenError(
                    "A text prompt needs a tokenizer: pass token ids, or tokenizer= to foretoken.load."
                )
            if isinstance(prompt, str):
                ids = encode(self.tokenizer, prompt, which)
            else:
                ids = chat_prompt(self.tokenizer, cast(Messages, prompt), which, tools)
        else:
            try:
                ids = [index(token) for token in _plain(prompt)]
            except TypeError:
                raise ForetokenError(
                    f"{which} is neither a text nor a list of token ids nor a list of messages: give one of them."
                ) from None
            advice = ""
        if not ids:
            raise ForetokenError(f"{which} is empty: give at least one token.")
        size = self.target.vocab_size
        bad = next((x for x in ids if not 0 <= x < size), None)
        if bad is not None:
            raise ForetokenError(f"{which} has token id {bad}: ids go from 0 to {size - 1}{advice}.")
        context = self.target.lm.context
        if context is not None and len(ids) >= context:
            raise ContextError.of(which, len(ids), self.target.name, context)
        return ids

    def _run(
        self, requests: list[Request], max_new_tokens: int, sampling: Sampling, observer: Observer | None
    ) -> Iterator[Chunk]:
        """Decode all requests, at most `max_batch` at a time, and yield what each step adds to each of them."""
        models_run()
        if not requests:
            return
        limit = self.target.lm.context or 2**62
        slots = max(min(len(r.ids) + max_new_tokens, limit) for r in requests) + self.drafter.max_nodes
        batch = min(self.max_batch, len(requests))
        decoder = Decoder(self.target, self.drafter, self.verifier, batch, slots, observer)
        waiting, active = deque(requests), {}
        while waiting or active:
            while waiting and len(active) < self.max_batch:
                request = waiting.popleft()
                rng = seeded(request.seed)
                new = min(max_new_tokens, limit - len(request.ids))
                own = replace(sampling, processors=(*sampling.processors, *request.constraints))
                sequence = core.Sequence(list(request.ids), own, rng, new, request.eos_ids)
                active[sequence] = request, Stats()
                decoder.join(sequence)
            for sequence, step in decoder.step():
                request, stats = active[sequence]
                tokens, text, reason = read_step(request.stream, sequence, step)
                stats.record(step, len(tokens))
                if reason is not None:
                    del active[sequence]
                    if not sequence.finished:  # at a stop string
                        decoder.leave(sequence)
                yield Chunk(request.index, text, tokens, step.origins[: len(tokens)], reason, replace(stats))


def _as_list(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Return (prompts, whether a single one was given); a text, a list of ids or a list of messages is a single one."""
    given: Any = _plain(prompt)
    if isinstance(given, (str, bytes, bytearray)) or is_conversation(given):
        return [given], True
    if not isinstance(given, Sequence):
        raise ForetokenError(
            f"The prompt is of type {type(given).__name__}: give a text, a list of token ids, or a list of these."
        )
    prompts = [_plain(x) for x in given]
    if prompts and isinstance(prompts[0], Real):
        return [prompts], True
    return prompts, False


def _plain(ids: Any) -> Any:
    """Return ids of a tensor or an array as a list or an int; anything else as it is."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


def _stops(stop: Any) -> tuple[str, ...]:
    """Return the stop strings of a call, which may be a string, several, or None for none."""
    stops = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(stops, Sequence) or isinstance(stops, bytes) or not all(isinstance(s, str) for s in stops):
        raise ForetokenError(f"stop is {stop!r}: give a text, or a list of texts.")
    check_stops(stops)
    return tuple(stops)


def read_step(
    stream: TextStream | None, sequence: core.Sequence, step: core.Step
) -> tuple[list[int], str, FinishReason | None]:
    """Return (ids, text, why the text ends with them) of one step; None for a text that goes on.

    The ids are those up to the one that completes a stop string; the text is what has become certain by them.

    stream: turns the sequence's ids into text; None for a sequence whose text is not needed yet.
    sequence: the text, which has these ids.
    step: what the step brought.

    Raises GrammarError where the parser of the sequence's grammar failed.
    """
    check_grammars(sequence.sampling.processors)
    tokens, text = list(step.tokens), ""
    if stream is not None:
        for i, token in enumerate(tokens if stream.stops else ()):
            text += stream.push([token])
            if stream.stopped:
                return tokens[: i + 1], text, "stop"
        if not stream.stops:
            text = stream.push(tokens)
        if sequence.finished:
            text += stream.finish()
        if stream.stopped:
            return tokens, text, "stop"
    if not sequence.finished:
        return tokens, text, None
    return tokens, text, "stop" if sequence.ids[-1] in sequence.eos_ids else "length"
