"""Draft heads side by side on one target: tokens a step, speed against plain decoding, and where the time goes.

Processor time of this thread, not wall clock: runs are interleaved, and other programs do not count. On an accelerator
the clock is the wall's, after it has finished what it was given.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.build import HEAD_TREES, check_pair, policy_for, tree_policy, verifier_named
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence as Running
from foretoken.core.shapes import Float
from foretoken.core.verifier import Verifier
from foretoken.decode import Decoder, NoDrafter
from foretoken.draft.heads import HeadDrafter, HeadDraftSession
from foretoken.draft.lm import LMDrafter
from foretoken.draft.ranked import ProductDrafter
from foretoken.draft.wrapped import WrappedDrafter, WrappedSession
from foretoken.heads.rows import HeadLM
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.models.target import LMTarget

PARTS = ("prefill", "1st level", "2nd level", "later levels", "parallel levels")


@dataclass(frozen=True)
class Method:
    """drafter None: plain decoding."""

    name: str
    drafter: HeadDrafter | LMDrafter | None
    verifier: Verifier


@dataclass
class Tally:
    """Sums over the runs of one method at one temperature. parts: seconds of the head by component."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    total_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def tau(self) -> float:
        """Tokens a step, the bonus token included."""
        return self.tokens / self.steps

    def record(self) -> dict[str, Any]:
        ms = 1000 / self.steps
        return {
            "tokens_per_step": self.tau,
            "accepted_per_step": self.accepted / self.steps,
            "nodes_per_step": self.drafted / self.steps,
            "ms_per_token": 1000 * self.total_s / self.tokens,
            "draft_ms_per_step": self.draft_s * ms,
            "target_ms_per_step": self.target_s * ms,
            "other_ms_per_step": (self.total_s - self.draft_s - self.target_s) * ms,
            "components_ms_per_step": {name: seconds * ms for name, seconds in self.parts.items()},
        }


class Watch:
    """Adds up the seconds spent inside calls."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def now(self) -> float:
        if self.device.type == "cpu":
            return time.thread_time()
        torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin = self.now()
            try:
                return call(*arguments)
            finally:
                self.seconds += self.now() - begin

        return run


@dataclass(frozen=True)
class Narrow:
    """How a head of a small model reads the states of its expansion: the first d of each layer's, from where the small
    model's layers stand in the large one (models/expand.py)."""

    hidden: int
    wide: int
    small_layers: int
    layers: int

    def layer(self, layer: int) -> int:
        return layer if layer == FINAL else layer * self.layers // self.small_layers

    def states(self, features: Float[Tensor, "t f"]) -> Float[Tensor, "t _"]:
        return features.view(len(features), -1, self.wide)[..., : self.hidden].flatten(1)


@dataclass(frozen=True)
class OnExpansion(WrappedDrafter[HeadDrafter]):
    """A head's drafter in front of the expansion of its target."""

    narrow: Narrow

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.narrow.layer(layer) for layer in self.inner.feature_layers)

    def open(self, batch: int, slots: int) -> "ExpansionSession":
        return ExpansionSession(self.inner.open(batch, slots), self.narrow)


class ExpansionSession(WrappedSession[HeadDraftSession]):
    def __init__(self, inner: HeadDraftSession, narrow: Narrow) -> None:
        super().__init__(inner)
        self.narrow = narrow

    @property
    def rows(self) -> Any:
        return self.inner.rows

    def learn(self, features: list[Float[Tensor, "_ f"]]) -> None:
        self.inner.learn([self.narrow.states(of_row) for of_row in features])


def method(lm: CausalLM | HeadLM, tree: str, rule: str | None, family: Any, vocab_size: int) -> Method:
    """A head (or a drafter LM) with a tree and a rule; refused where the pair would not be lossless."""
    of_head = HEAD_TREES.get(tree.partition(":")[0])
    verifier = verifier_named(rule or ("exact-match" if of_head else "rrsw"))
    policy = policy_for(tree_policy(tree), verifier)
    family = family or verifier.laws[0]
    drafter: HeadDrafter | LMDrafter
    if isinstance(lm, HeadLM):
        if of_head is ProductDrafter:
            lm.check_parallel()
        drafter = (of_head or HeadDrafter)(lm, policy, family, vocab_size)
    else:
        drafter = LMDrafter(lm, policy, family, vocab_size)
    check_pair(drafter, verifier)
    return Method(f"{lm.name} {tree} {verifier.name}", drafter, verifier)


def run(
    target: CausalLM, chosen: Method, narrow: Narrow | None, prompt: list[int], new: int, temperature: float,
    seed: int, tally: Tally,
) -> list[int]:  # fmt: skip
    """One continuation; the prompt's prefill is not counted."""
    drafter: Any = chosen.drafter or NoDrafter()
    if isinstance(drafter, HeadDrafter) and narrow is not None:
        drafter = OnExpansion(drafter, narrow)
    decoder = Decoder(LMTarget(target), drafter, chosen.verifier, 1, len(prompt) + new + drafter.max_nodes)
    sequence = Running(list(prompt), Sampling(temperature=temperature), torch.Generator().manual_seed(seed), new)
    decoder.join(sequence)
    session: Any = decoder.target
    session.catch_up([sequence])
    whole, drafting, scoring = Watch(target.device), Watch(target.device), Watch(target.device)
    session.score, session.keep = scoring.timed(session.score), scoring.timed(session.keep)
    parts = _watch_parts(decoder.drafter, target.device)
    drafts: Any = decoder.drafter
    if chosen.drafter is not None:
        drafts.propose, drafts.observe = drafting.timed(drafts.propose), drafting.timed(drafts.observe)
    while decoder.sequences:
        for _, step in whole.timed(decoder.step)():
            tally.steps += 1
            tally.tokens += len(step.tokens)
            tally.drafted += step.num_drafted
            tally.accepted += step.num_accepted
    tally.total_s += whole.seconds
    tally.draft_s += drafting.seconds
    tally.target_s += scoring.seconds
    for name, watch in parts.items():
        tally.parts[name] += watch.seconds
    return sequence.ids[len(prompt) :]


def _watch_parts(session: Any, device: torch.device) -> dict[str, Watch]:
    """Clocks around the head's forwards; a call of `score` is counted by its place in the step."""
    watches = {name: Watch(device) for name in PARTS}
    if not isinstance(session, HeadDraftSession | ExpansionSession):
        return watches
    rows: Any = session.rows
    score, propose, calls = rows.score, session.propose, [0]
    order = [watches[name].timed(score) for name in PARTS[1:4]]

    def counted_score(*arguments: Any) -> Any:
        calls[0] += 1
        return order[min(calls[0], 3) - 1](*arguments)

    def counted_propose(*arguments: Any) -> Any:
        calls[0] = 0
        return propose(*arguments)

    rows.score, rows.extend = counted_score, watches["prefill"].timed(rows.extend)
    setattr(session, "propose", counted_propose)  # noqa: B010
    if hasattr(rows, "_run_parallel"):
        rows._run_parallel = watches["parallel levels"].timed(rows._run_parallel)
    return watches


@dataclass(frozen=True)
class Result:
    method: str
    temperature: float
    tally: Tally
    speedup: float

    def record(self) -> dict[str, Any]:
        return {"method": self.method, "temperature": self.temperature, "speedup": self.speedup, **self.tally.record()}


def measure(
    target: CausalLM,
    methods: Sequence[Method],
    narrow: Narrow | None,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    new: int,
    rounds: int,
    seed: int,
    progress: Callable[[str], None],
) -> list[Result]:
    """Every method continues every prompt, in turn. At temperature 0 all must write what plain decoding writes.

    Raises AssertionError where they do not: then the benchmark itself has shown a method to be wrong.
    """
    plain = Method("plain", None, verifier_named("exact-match"))
    every = [plain, *methods]
    tallies = {(chosen.name, t): Tally() for chosen in every for t in temperatures}
    for chosen in every:  # compile and warm up
        for t in temperatures:
            run(target, chosen, narrow, prompts[0], 8, t, seed, Tally())
    for t in temperatures:
        for i in range(rounds):
            for number, prompt in enumerate(prompts, start=1):
                progress(f"temperature {t:g}, round {i + 1}/{rounds}, prompt {number}/{len(prompts)}")
                wanted: list[int] | None = None
                for chosen in every:
                    got = run(target, chosen, narrow, prompt, new, t, seed + i, tallies[chosen.name, t])
                    if t == 0:
                        wanted = wanted or got
                        assert got == wanted, f"{chosen.name} wrote another text than plain decoding"
    return [
        Result(
            chosen.name,
            t,
            tallies[chosen.name, t],
            _per_token(tallies["plain", t]) / _per_token(tallies[chosen.name, t]),
        )
        for t in temperatures
        for chosen in every
    ]


def _per_token(tally: Tally) -> float:
    return tally.total_s / tally.tokens
