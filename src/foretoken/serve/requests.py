"""The one place where a request becomes jobs: prompts are encoded, settings checked, defaults filled in."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.core.errors import ContextError, ForetokenError
from foretoken.core.sampling import CHECKED, Sampling
from foretoken.engine import Engine
from foretoken.models.text import turn_end
from foretoken.serve import schema
from foretoken.serve.calls import CallForm
from foretoken.serve.errors import ApiError, refusing
from foretoken.serve.jobs import Job
from foretoken.serve.structure import grammar_of
from foretoken.serve.tools import check_history, for_template, tool_use, wanted_form

SEEDS = 2**32  # number of seeds
SAMPLING = tuple(name for name in CHECKED if name != "logit_bias")  # its token ids are texts in JSON


@dataclass(frozen=True)
class Asked:
    """A checked request for texts.

    jobs: one per choice, prompt by prompt.
    n: number of choices of each prompt.
    seed: that of choice 0.
    stream: whether the text is sent as it grows.
    options: what a stream sends besides the text.
    echoed: the prompt's text before each choice; None where it was not asked for.
    calls: how tool calls are written in the texts; None where none are read.
    """

    jobs: tuple[Job, ...]
    n: int
    seed: int
    stream: bool
    options: schema.StreamOptions
    echoed: tuple[str, ...] | None = None
    calls: CallForm | None = None


class Intake:
    """Checks the requests for one model, and turns them into jobs.

    Its methods raise ApiError for a request that cannot be served.

    engine: the model, with a copy of the tokenizer that the model's thread does not use.
    name: the model's name for clients.
    context: the most tokens of a text, its prompt included.
    most: the most texts that one request may ask for.
    use: what the model's chat template can do with tools.
    turn_ends: ids that end an answer in a conversation.
    """

    def __init__(self, engine: Engine, name: str, context: int, most: int) -> None:
        if engine.tokenizer is None:
            raise ForetokenError("A server needs a tokenizer: pass tokenizer= to foretoken.load.")
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.name, self.context, self.most = name, context, most
        end = turn_end(engine.tokenizer)
        self.use = tool_use(engine.tokenizer)
        self.turn_ends = engine.eos_ids if end is None else engine.eos_ids | {end}

    def chat(self, body: schema.ChatRequest) -> Asked:
        """Return the checked request for an answer to a conversation. body: the request as the client sent it."""
        self._check_model(body)
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise ApiError(400, "max_tokens and max_completion_tokens mean the same: give one of them.", "max_tokens")
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set it to true.", "top_logprobs")
        calls = wanted_form(body, self.use)
        ids = self._conversation(body.messages, body.tools)
        top = (body.top_logprobs or 0) if body.logprobs else None
        new = body.max_tokens or body.max_completion_tokens or self.context
        return self._asked(body, [ids], new, top, self.turn_ends, calls=calls)

    def completion(self, body: schema.CompletionRequest) -> Asked:
        """Return the checked request for a continuation of each prompt. body: the request as the client sent it."""
        self._check_model(body)
        scores = bool(body.echo) and body.logprobs is not None
        if body.max_tokens == 0 and not scores:
            said = "max_tokens should be greater than or equal to 1, but for echo with logprobs: ask for a token."
            raise ApiError(400, said, "max_tokens")
        n = body.n or 1
        if body.best_of not in (None, n):
            said = f"best_of is {body.best_of}, and n is {n}: texts are not ranked here, so leave out best_of."
            raise ApiError(400, said, "best_of")
        given: Any = body.prompt
        single = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
        prompts = [given] if single else given
        if not prompts:
            raise ApiError(400, "prompt is empty: give at least one text.", "prompt")
        self._check_number(body, len(prompts))
        names = ["The prompt"] if single else [f"Prompt {i}" for i, _ in enumerate(prompts, start=1)]
        ids = [self._encode(prompt, name, "prompt") for prompt, name in zip(prompts, names, strict=True)]
        echoed = None
        if body.echo:
            texts = [prompt if isinstance(prompt, str) else self.decode(prompt) for prompt in prompts]
            echoed = tuple(text for text in texts for _ in range(n))
        new = schema.COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return self._asked(body, ids, new, body.logprobs, self.engine.eos_ids, scores, echoed)

    def tokenize(self, body: schema.TokenizeRequest) -> list[int]:
        """Return the token ids of the text or the conversation in `body`."""
        self._check_model(body)
        if (body.prompt is None) is (body.messages is None):
            raise ApiError(400, "Give a prompt or messages, one of them.", "prompt")
        if body.messages is not None:
            return self._conversation(body.messages, body.tools)
        if body.tools is not None:
            raise ApiError(400, "tools is for messages: give some, or leave it out.", "tools")
        return self._encode(body.prompt, "The prompt", "prompt")

    def detokenize(self, body: schema.DetokenizeRequest) -> str:
        """Return the text of the token ids in `body`, special tokens included."""
        self._check_model(body)
        bad = [x for x in body.tokens if not 0 <= x < self.engine.target.vocab_size]
        if bad:
            last = self.engine.target.vocab_size - 1
            raise ApiError(400, f"tokens has token id {bad[0]}: ids go from 0 to {last}.", "tokens")
        return self.decode(body.tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _asked(
        self,
        body: schema.Sampled,
        prompts: list[list[int]],
        max_new_tokens: int,
        top_logprobs: int | None,
        eos_ids: frozenset[int],
        scores_prompt: bool = False,
        echoed: tuple[str, ...] | None = None,
        calls: CallForm | None = None,
    ) -> Asked:
        """Return the checked request, with n jobs for each prompt.

        body: the request as the client sent it.
        prompts: token ids of each prompt.
        max_new_tokens, top_logprobs, scores_prompt: as in `Job`.
        eos_ids: tokens that end a text, unless the request ignores them.
        echoed, calls: as in `Asked`.
        """
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options is for stream: set it to true.", "stream_options")
        self._check_number(body, len(prompts))
        n = body.n or 1
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed % SEEDS
        stops = (body.stop,) if body.stop and isinstance(body.stop, str) else tuple(body.stop or ())
        try:
            sampling = self._sampling(body)
        except ForetokenError as error:
            first = str(error).split(" ", 1)[0]  # where it is the name of a field, that is the field that is wrong
            raise ApiError(400, str(error), first if first in type(body).model_fields else None) from error
        options = body.stream_options or schema.StreamOptions()
        # A seed that the client names fixes the text: where drafts depend on measured times, nothing is drafted.
        fixed = body.seed is None or sampling.temperature == 0 or self.engine.seeds_fix_texts
        depth = 0 if body.speculation == "off" or (body.speculation is None and not fixed) else body.speculation
        ends = frozenset() if body.ignore_eos else eos_ids
        grammar, param = grammar_of(body, calls, self.tokenizer)

        def held(ids: list[int]) -> Sampling:  # to the grammar, by a parser of its own
            if grammar is None:
                return sampling
            with refusing(param):
                constraint = grammar.constraint(self.tokenizer, ends, len(ids))
            return replace(sampling, processors=(*sampling.processors, constraint))

        alike = max_new_tokens, ends, stops, top_logprobs, depth, bool(options.include_steps), scores_prompt
        jobs = [
            Job(tuple(ids), held(ids), (seed + i * n + k) % SEEDS, *alike)
            for i, ids in enumerate(prompts)
            for k in range(n)
        ]
        return Asked(tuple(jobs), n, seed, bool(body.stream), options, echoed, calls)

    def _sampling(self, body: schema.Sampled) -> Sampling:
        """Return the sampling settings of `body`; those left out have OpenAI's defaults, which `Sampling` has too."""
        given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
        bias: dict[int, float] = {}
        if body.top_k == -1:  # vLLM's word for all
            given["top_k"] = 0
        size = self.engine.target.vocab_size
        for token, added in (body.logit_bias or {}).items():
            if not (token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < size):
                raise ForetokenError(f"logit_bias has token id {token[:20]!a}: ids go from 0 to {size - 1}.")
            bias[int(token)] = added
        return Sampling(**given, logit_bias=bias)

    def _conversation(self, messages: Sequence[schema.ChatMessage], tools: Sequence[schema.Tool] | None) -> list[int]:
        """Return the ids that the chat template writes for messages and tools."""
        if not messages:
            raise ApiError(400, "The conversation is empty: give at least one message.", "messages")
        offered = for_template(tools, self.use)
        check_history(messages, self.use)
        return self._encode([_message(message) for message in messages], "The conversation", "messages", offered)

    def _encode(self, prompt: Any, which: str, param: str, tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids of a text or conversation. which: its name in errors. param: the field that they name."""
        with refusing(param):
            try:
                ids = self.engine.encode(prompt, which, tools)
                count = len(ids)
            except ContextError as error:  # its sentence names the model's path
                ids, count = [], error.num_tokens
        if count >= self.context:
            error = ContextError.of(which, count, self.name, self.context)
            raise ApiError(400, str(error), param, "context_length_exceeded")
        return ids

    def _check_model(self, body: schema.Named) -> None:
        if body.model is not None and body.model != self.name:
            said = f"There is no model {body.model[:100]!a} here: the one that is served is {self.name}."
            raise ApiError(404, said, "model", "model_not_found")

    def _check_number(self, body: schema.Sampled, prompts: int) -> None:
        texts = (body.n or 1) * prompts
        if texts > self.most:
            param = "n" if prompts == 1 else "prompt"
            raise ApiError(400, f"{param} asks for {texts} texts at once, and {self.most} are the most.", param)


def _message(message: schema.ChatMessage) -> dict[str, Any]:
    """Return a message as the engine takes it; text parts are joined by line ends."""
    made = message.model_dump(exclude_none=True)
    if not isinstance(message.content, str | None):
        made["content"] = "\n".join(part.text for part in message.content)
    return made
