"""The ways of generating that are compared: our engine, and transformers' generate with the same models."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from foretoken.engine import Engine
from foretoken.measure.clocks import Clock, Clocks, forwards_timed
from foretoken.measure.memory import MemoryGrowth

OURS, THEIRS = "foretoken", "transformers"


@dataclass(frozen=True)
class Run:
    """One generation, or one batch of them. Counts are sums over the sequences, and times are seconds of wall clock.

    num_tokens: new tokens.
    num_target_forwards: forwards of the target; a batched one counts once for each sequence.
    num_drafted, num_accepted: draft tokens, and those of them that were emitted.
    wall_s: from the call to the return.
    ttft_s: from the call to the first token of any sequence.
    forward_s: inside calls of the target and the drafter.
    scoring_s: inside our rows' score, extend and keep, which are those calls, masks and cache; None for transformers.
    memory_bytes_per_token: growth of memory after the first step, per new token; None where it is not known.
    num_first: tokens that came with each sequence's first one, that one included.
    texts: the new ids of each sequence.
    target_s: inside the target's rows; None for transformers.
    drafting_s: of drafting; None where it is not measured.
    num_nodes, num_empty: nodes that were to have children, and those of them where the drafter drew no token.
    """

    num_tokens: int
    num_target_forwards: int
    num_drafted: int
    num_accepted: int
    wall_s: float
    ttft_s: float
    forward_s: float
    scoring_s: float | None
    memory_bytes_per_token: float | None
    num_first: int
    texts: tuple[list[int], ...] = ()
    target_s: float | None = None
    drafting_s: float | None = None
    num_nodes: int = 0
    num_empty: int = 0

    @property
    def decoding_tokens_per_s(self) -> float | None:
        """Tokens per second after the first ones, without the prefill; None where all tokens came at once."""
        later = self.num_tokens - self.num_first
        return later / (self.wall_s - self.ttft_s) if later else None

    def record(self) -> dict[str, Any]:
        """Return the fields that a line of JSONL has, by name."""
        left_out = ("texts", "target_s", "drafting_s", "num_nodes", "num_empty")
        return {name: value for name, value in vars(self).items() if name not in left_out}


@dataclass(frozen=True)
class Foretoken:
    """Our engine as a way of generating, named by its tree; batch: the number of prompts of one run."""

    system: ClassVar[str] = OURS
    engine: Engine
    batch: int = 1
    top_p: float = 1.0

    @property
    def name(self) -> str:
        """The name of the engine's tree, or "plain"."""
        return self.engine.tree

    @property
    def verifier(self) -> str | None:
        """The name of the rule; None where nothing is drafted."""
        return self.engine.rule

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float, seed: int) -> Run:
        """Generate once for all `prompts`, which are token ids, together, and measure it.

        max_new_tokens, temperature, seed: as in `Engine.generate`.
        """
        device = self.engine.target.lm.device
        clocks, memory = Clocks(device), MemoryGrowth(device)
        target, drafter = clocks.on_target(self.engine.target), clocks.on_drafter(self.engine.drafter)
        engine = replace(self.engine, target=target, drafter=drafter, tokenizer=None)  # ids in, ids out, as theirs
        ttft_s, finished, first = 0.0, [], {}
        texts: tuple[list[int], ...] = tuple([] for _ in prompts)
        begin = time.perf_counter()
        asked = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": self.top_p}
        for chunk in engine.stream(prompts, seed=seed, **asked):
            ttft_s = ttft_s or time.perf_counter() - begin
            first.setdefault(chunk.index, len(chunk.token_ids))
            texts[chunk.index].extend(chunk.token_ids)
            memory.sample(last=chunk.finished)
            if chunk.finished:
                finished.append(chunk.stats)
        wall_s = time.perf_counter() - begin
        counts = ("num_tokens", "num_target_forwards", "num_drafted", "num_accepted")
        totals = {name: sum(getattr(stats, name) for stats in finished) for name in counts}
        drafts = clocks.proposing.count > 0
        return Run(
            **totals,
            wall_s=wall_s,
            ttft_s=ttft_s,
            forward_s=clocks.forwards.seconds,
            scoring_s=clocks.target.seconds + clocks.drafter.seconds,
            memory_bytes_per_token=memory.bytes_per_token(totals["num_tokens"]),
            num_first=sum(first.values()),
            texts=texts,
            target_s=clocks.target.seconds,
            drafting_s=clocks.proposing.seconds if drafts else None,
            num_nodes=clocks.drafts.nodes,
            num_empty=clocks.drafts.empty,
        )


@dataclass(frozen=True)
class Transformers:
    """transformers' `generate` as a way of generating.

    name: of this way, for example "plain" or "assisted 5".
    model: the target.
    assistant: the drafter; None where no model drafts.
    batch: the number of prompts of one run.
    arguments: further keyword arguments of generate.
    assistant_settings: fields that are set in the drafter's generation config, where generate looks for them.
    """

    system: ClassVar[str] = THEIRS
    verifier: ClassVar[None] = None  # its rule has no name here
    name: str
    model: PreTrainedModel
    batch: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    assistant: PreTrainedModel | None = None
    assistant_settings: dict[str, Any] = field(default_factory=dict)
    top_p: float = 1.0

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float, seed: int) -> Run:
        device = self.model.device
        target, drafter = Clock(device), Clock(device)
        arguments = dict(self.arguments)
        if temperature > 0:
            arguments |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": self.top_p}
        else:
            arguments |= {"do_sample": False}
        rows = [torch.tensor(prompt, device=device) for prompt in prompts]
        ids = pad_sequence(rows, batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        torch.manual_seed(seed)
        with ExitStack() as stack:
            stack.enter_context(forwards_timed(self.model, target))
            if self.assistant is not None:
                arguments |= self.assisted(self.assistant, temperature > 0)
                stack.enter_context(forwards_timed(arguments["assistant_model"], drafter))
            watch = Watch(MemoryGrowth(device))
            out = self.model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, streamer=watch, **arguments
            )
            wall_s = time.perf_counter() - watch.begun
        num_tokens, num_forwards = out.numel() - ids.numel(), len(prompts) * target.count
        return Run(
            num_tokens,
            num_forwards,
            drafter.count,  # one drafted token a forward of the drafter
            num_tokens - num_forwards,
            wall_s,
            watch.first_s,
            target.seconds + drafter.seconds,
            None,
            watch.memory.bytes_per_token(num_tokens),
            watch.num_first,
            tuple(row[ids.shape[1] :].tolist() for row in out),
        )

    def assisted(self, assistant: PreTrainedModel, sampled: bool) -> dict[str, Any]:
        """Set up the assistant and return the arguments of generate for it.

        assistant: the drafter; its generation config is changed.
        sampled: whether the temperature is above 0, for subclasses to which that matters.
        """
        for key in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
            setattr(assistant.generation_config, key, self.assistant_settings.get(key))
        return {"assistant_model": assistant}


Method = Foretoken | Transformers


class Watch(BaseStreamer):
    """A streamer of transformers that takes the time of the first tokens, and samples memory at every step.

    begun: when it was made, as the run began, in seconds of `time.perf_counter`.
    first_s: seconds from then to the first new tokens.
    num_first: the number of these.
    """

    def __init__(self, memory: MemoryGrowth) -> None:
        """Begin one run now; memory: samples its memory."""
        self.memory = memory
        self.first_s, self.num_first = 0.0, 0
        self._prompt = True
        self.begun = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """Take `value`, the new ids of one step, from generate; its first call brings the prompt instead."""
        if self._prompt:
            self._prompt = False
            return
        if not self.num_first:
            self.first_s, self.num_first = time.perf_counter() - self.begun, value.numel()
        self.memory.sample()

    def end(self) -> None:
        """Take note that the run is over."""
        self.memory.sample(last=True)
