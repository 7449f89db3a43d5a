"""Ways to draft with another vocabulary: ours by method, transformers' own mode, and a drafter with the same one."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from foretoken.build import assembled
from foretoken.core.interfaces import Drafter, DraftSession, Path
from foretoken.core.sequence import Sequence as Running
from foretoken.core.tree import TokenTree
from foretoken.core.verifier import Verifier
from foretoken.decode import NoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.draft.source import Source
from foretoken.draft.wrapped import WrappedDrafter, WrappedSession
from foretoken.engine import Engine
from foretoken.measure.clocks import Clock, TimedLM
from foretoken.models.causal_lm import CausalLM
from foretoken.models.load import load_model, load_tokenizer
from foretoken.models.named import located
from foretoken.models.text import Tokenizer
from foretoken.models.translation import Translation
from foretoken.models.vocabulary import vocabulary
from foretoken.recipe import PLAIN, SAME, Recipe

T = TypeVar("T")
TREES = {SAME: "chain:5", "union": "chain:3", "tli": "chain:3", "slem": "chain:8", "slrs": "chain:3"}
BYTES_TREE = "chain:12"  # of slem where the drafter's tokens are bytes
THEIR_DRAFTS = 5  # transformers' num_assistant_tokens


@dataclass(frozen=True)
class Taken:
    """One continuation. cpu_s: of this thread. own_s: of propose and observe, without the drafter's forwards: what
    translating costs, and growing the tree."""

    ids: list[int]
    num_forwards: int
    num_drafted: int
    num_accepted: int
    wall_s: float
    cpu_s: float
    own_s: float | None


@dataclass
class Meter:
    """What the drafter's session spends besides its model."""

    scoring: Clock = field(default_factory=Clock)
    forwards: Clock = field(default_factory=Clock)
    own_s: float = 0.0

    def timed(self, lm: CausalLM) -> CausalLM:
        return TimedLM(lm, self.scoring, self.forwards)

    def time(self, call: Callable[[], T]) -> T:
        before, inside = time.perf_counter(), self.scoring.seconds
        result = call()
        self.own_s += time.perf_counter() - before - (self.scoring.seconds - inside)
        return result


@dataclass(frozen=True)
class Metered(WrappedDrafter[Drafter]):
    """A drafter whose sessions run under a meter."""

    meter: Meter

    def open(self, batch: int, slots: int) -> "MeteredSession":
        return MeteredSession(self.inner.open(batch, slots), self.meter)


class MeteredSession(WrappedSession[DraftSession]):
    def __init__(self, inner: DraftSession, meter: Meter) -> None:
        super().__init__(inner)
        self.meter = meter

    def propose(self, sequences: Sequence[Running]) -> list[TokenTree]:
        return self.meter.time(lambda: self.inner.propose(sequences))

    def observe(self, sequences: Sequence[Running], trees: Sequence[TokenTree], paths: Sequence[Path]) -> None:
        self.meter.time(lambda: self.inner.observe(sequences, trees, paths))


@dataclass(frozen=True)
class Ours:
    """method: "plain", "same" or one of --vocab."""

    method: str
    drafter_name: str
    tree: str
    engine: Engine
    verifier: Verifier
    drafter: Drafter = field(default_factory=NoDrafter)
    meter: Meter | None = None
    system: str = "foretoken"

    def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Taken:
        drafter = self.drafter if self.meter is None else Metered(self.drafter, self.meter)
        engine = replace(self.engine, drafter=drafter, verifier=self.verifier)
        before = 0.0 if self.meter is None else self.meter.own_s
        wall, cpu = time.perf_counter(), time.thread_time()
        result = engine.generate(ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        own = None if self.meter is None else self.meter.own_s - before
        stats = result.stats
        return Taken(result.token_ids, stats.num_target_forwards, stats.num_drafted, stats.num_accepted, wall, cpu, own)


@dataclass
class Counted:
    """A forward hook."""

    calls: int = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


@dataclass
class Theirs:
    """transformers' generate; with an assistant of another vocabulary its own two-vocabulary mode: strings at
    temperature 0, the intersection above it. It rewrites the assistant, so each temperature gets a copy."""

    method: str
    drafter_name: str
    model: PreTrainedModel
    assistant: PreTrainedModel | None = None
    tokenizer: Tokenizer | None = None
    assistant_tokenizer: Tokenizer | None = None
    tree: str = f"{THEIR_DRAFTS} drafts"
    system: str = "transformers"
    copies: dict[bool, Any] = field(default_factory=dict)

    def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Taken:
        sampled = temperature > 0
        arguments: dict[str, Any] = {"do_sample": sampled}
        if sampled:
            arguments |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        count, drafts = Counted(), Counted()
        hooks = [self.model.register_forward_hook(count)]
        if self.assistant is not None:
            if sampled not in self.copies:
                self.copies[sampled] = copy.deepcopy(self.assistant)
            assistant = self.copies[sampled]
            hooks.append(assistant.register_forward_hook(drafts))
            arguments |= {
                "assistant_model": assistant,
                "tokenizer": self.tokenizer,
                "assistant_tokenizer": self.assistant_tokenizer,
            }
        torch.manual_seed(seed)
        inputs = torch.tensor([ids], device=self.model.device)
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            out = self.model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_new_tokens,
                **arguments,
            )
        finally:
            for one in hooks:
                one.remove()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        new = out[0, len(ids) :].tolist()
        return Taken(new, count.calls, drafts.calls, len(new) - count.calls, wall, cpu, None)


Way = Ours | Theirs


def ways(
    engine: Engine,
    theirs: PreTrainedModel,
    target_tokenizer: Tokenizer,
    drafters: Sequence[str],
    methods: Sequence[str],
    trees: Mapping[str, Sequence[str]],
) -> list[Way]:
    """Plain decoding on both sides, the engine's own drafter if it has one, then every method with every drafter.

    trees: of a method, where not the usual one.
    """
    found: list[Way] = [Ours(PLAIN, "-", "-", engine, engine.verifier), Theirs(PLAIN, "-", theirs, tree="-")]
    if isinstance(engine.drafter, LMDrafter) and isinstance(engine.drafter.lm, CausalLM):
        own, meter = engine.drafter, Meter()
        timed, rule = assembled(Recipe(TREES[SAME]), Source(SAME, own.vocab_size, meter.timed(engine.drafter.lm)))
        found.append(Ours(SAME, own.name, TREES[SAME], engine, rule, timed, meter))
    source, like = vocabulary(target_tokenizer), engine.target.lm
    for name in drafters:
        tokenizer = load_tokenizer(name)
        lm = load_model(name, like.device, like.dtype)
        translation = Translation(source, vocabulary(tokenizer).within(lm.vocab_size))
        for method in methods:
            usual = BYTES_TREE if method == "slem" and translation.dest.longest == 1 else TREES[method]
            for tree in trees.get(method, (usual,)):
                meter = Meter()
                drafting = Source(method, engine.target.vocab_size, meter.timed(lm), translation)
                drafter, rule = assembled(Recipe(tree), drafting)
                found.append(Ours(method, name, tree, engine, rule, drafter, meter))
        model: Any = AutoModelForCausalLM.from_pretrained(located(name), dtype=like.dtype)
        model.generation_config = GenerationConfig(
            pad_token_id=0,
            num_assistant_tokens=THEIR_DRAFTS,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,  # never stops drafting early
        )
        assistant = model.to(like.device).eval()
        found.append(Theirs("two vocabularies", name, theirs, assistant, target_tokenizer, tokenizer))
    return found
