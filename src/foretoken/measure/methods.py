"""The methods of generating that are compared: our engine, and transformers' generate with the same models."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from foretoken.decode import NoDrafter
from foretoken.engine import Engine
from foretoken.measure.clocks import Clock, Clocks, forwards_timed
from foretoken.measure.memory import MemoryGrowth

OURS, THEIRS = "foretoken", "transformers"


@dataclass(frozen=True)
class Run:
    """One generation, or one batch of them. Counts are sums over the sequences, a batched forward counting once for
    each; seconds are wall clock from the call to the return. num_first: tokens that came with each sequence's first.

    forward_s: inside calls of the target and the drafter. scoring_s: inside our rows' score, extend and keep, which are
    those calls, masks and cache; None for transformers. texts: the new ids of each sequence. cpu_s: of this thread.
    target_s, drafting_s: inside the target's rows, and of drafting; drafting_s None where it is not measured. own_s: of
    drafting, outside of the drafter's model; None where it is not measured. num_nodes, num_empty: nodes that
    were to have children, and those of them where the drafter drew no token.
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
    cpu_s: float = 0.0
    target_s: float | None = None
    drafting_s: float | None = None
    own_s: float | None = None
    num_nodes: int = 0
    num_empty: int = 0

    def record(self) -> dict[str, Any]:
        """The fields that a line of JSONL has."""
        left_out = ("texts", "cpu_s", "target_s", "drafting_s", "own_s", "num_nodes", "num_empty")
        return {name: value for name, value in vars(self).items() if name not in left_out}


@dataclass(frozen=True)
class Foretoken:
    """Our engine; `engine.tree` is its name. batch: the prompts it takes at a time. top_p: of `Engine.generate`."""

    engine: Engine
    batch: int = 1
    top_p: float = 1.0
    system: str = field(default=OURS, init=False)

    @property
    def name(self) -> str:
        return self.engine.tree

    @property
    def verifier(self) -> str | None:
        return None if isinstance(self.engine.drafter, NoDrafter) else self.engine.verifier.name

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float, seed: int) -> Run:
        device = self.engine.target.lm.device
        clocks, memory = Clocks(device), MemoryGrowth(device)
        target, drafter = clocks.on_target(self.engine.target), clocks.on_drafter(self.engine.drafter)
        engine = replace(self.engine, target=target, drafter=drafter, tokenizer=None)  # ids in, ids out, as theirs
        ttft_s, finished, first = 0.0, [], {}
        texts: tuple[list[int], ...] = tuple([] for _ in prompts)
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        asked = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": self.top_p}
        for chunk in engine.stream(prompts, seed=seed, **asked):
            ttft_s = ttft_s or time.perf_counter() - begin
            first.setdefault(chunk.index, len(chunk.token_ids))
            texts[chunk.index].extend(chunk.token_ids)
            memory.sample(last=chunk.finished)
            if chunk.finished:
                finished.append(chunk.stats)
        wall_s, cpu_s = time.perf_counter() - begin, time.thread_time() - begin_cpu
        num_tokens = sum(stats.num_tokens for stats in finished)
        return Run(
            num_tokens,
            sum(stats.num_target_forwards for stats in finished),
            sum(stats.num_drafted for stats in finished),
            sum(stats.num_accepted for stats in finished),
            wall_s,
            ttft_s,
            clocks.forwards.seconds,
            clocks.target.seconds + clocks.drafter.seconds,
            memory.bytes_per_token(num_tokens),
            sum(first.values()),
            texts,
            cpu_s,
            clocks.target.seconds,
            *((clocks.proposing.seconds, clocks.own_s) if clocks.proposing.count else (None, None)),
            clocks.drafts.nodes,
            clocks.drafts.empty,
        )


@dataclass(frozen=True)
class Transformers:
    """`generate` of transformers.

    arguments: further keyword arguments of generate. assistant: the drafter, if any. assistant_settings: fields set
    on the drafter's generation config, where generate looks for them. top_p: of generate.
    """

    name: str
    model: PreTrainedModel
    batch: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    assistant: PreTrainedModel | None = None
    assistant_settings: dict[str, Any] = field(default_factory=dict)
    top_p: float = 1.0
    system: str = field(default=THEIRS, init=False)
    verifier: None = field(default=None, init=False)

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float, seed: int) -> Run:
        device = self.model.device
        target, drafter, watch = Clock(device), Clock(device), Watch(MemoryGrowth(device))
        arguments = dict(self.arguments)
        if temperature > 0:
            arguments |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": self.top_p}
        else:
            arguments |= {"do_sample": False}
        ids, mask = left_padded(prompts, device)
        torch.manual_seed(seed)
        with ExitStack() as stack:
            stack.enter_context(forwards_timed(self.model, target))
            if self.assistant is not None:
                arguments |= self.assisted(self.assistant, temperature > 0)
                stack.enter_context(forwards_timed(arguments["assistant_model"], drafter))
            watch.begin()
            begin_cpu = time.thread_time()
            out = self.model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, streamer=watch, **arguments
            )
            wall_s, cpu_s = time.perf_counter() - watch.begun, time.thread_time() - begin_cpu
        rows, num_tokens = len(prompts), out.numel() - ids.numel()
        accepted = num_tokens - rows * target.count
        return Run(
            num_tokens,
            rows * target.count,
            drafter.count,  # one drafted token a forward of the drafter
            accepted,
            wall_s,
            watch.first_s,
            target.seconds + drafter.seconds,
            None,
            watch.memory.bytes_per_token(num_tokens),
            watch.num_first,
            tuple(row[ids.shape[1] :].tolist() for row in out),
            cpu_s,
        )

    def assisted(self, assistant: PreTrainedModel, sampled: bool) -> dict[str, Any]:
        """Arguments of generate for the assistant, which is set up. sampled: the temperature is above 0."""
        for key in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
            setattr(assistant.generation_config, key, self.assistant_settings.get(key))
        return {"assistant_model": assistant}


Method = Foretoken | Transformers


class Watch(BaseStreamer):
    """Takes the time of the first tokens, and samples memory at every step."""

    def __init__(self, memory: MemoryGrowth) -> None:
        self.memory = memory
        self.begun = self.first_s = 0.0
        self.num_first = 0
        self._prompt = True

    def begin(self) -> None:
        self.begun = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:  # generate hands over the prompt first
            self._prompt = False
            return
        if not self.num_first:
            self.first_s, self.num_first = time.perf_counter() - self.begun, value.numel()
        self.memory.sample()

    def end(self) -> None:
        self.memory.sample(last=True)


def left_padded(prompts: Sequence[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and attention mask, [b, t] each."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask
