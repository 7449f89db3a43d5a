"""Draft heads side by side on one target: tokens a step, speed against plain decoding, and where the time goes.

Methods take turns prompt by prompt. What a whole run takes is processor time where one thread does all the work, so
that other programs do not count; what the parts of a step take is wall clock, the median over steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foretoken.bench.clock import Clock, TimedLM
from foretoken.bench.execution import clock_named, seconds
from foretoken.bench.head_clocks import PARTS, TimedHeadLM, TimedSession
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence as Running
from foretoken.core.shapes import Float
from foretoken.core.verifier import Verifier
from foretoken.decode import Decoder, NoDrafter
from foretoken.draft.heads import HeadDrafter, HeadDraftSession
from foretoken.draft.lm import LMDrafter
from foretoken.draft.wrapped import WrappedDrafter, WrappedSession
from foretoken.drafters import lm_drafter
from foretoken.heads.lm import HeadLM
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.models.target import LMTarget, LMTargetSession
from foretoken.names import verifier_named

STEP, DRAFT, TARGET = "step", "draft", "target"


@dataclass(frozen=True)
class Method:
    """drafter None: plain decoding. sampled: children are drawn, so that at temperature 0 it has nothing to show."""

    name: str
    drafter: LMDrafter | None
    verifier: Verifier
    sampled: bool = False


@dataclass
class Tally:
    """Counts over the runs of one method at one temperature, and the seconds of every step by what was running.

    total_s: of all runs, by the clock of bench.execution, which costs too much to be read at every step.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    total_s: float = 0.0
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in (STEP, DRAFT, TARGET, *PARTS)}
    )

    @property
    def steps(self) -> int:
        return len(self.seconds[STEP])

    @property
    def tau(self) -> float:
        """Tokens a step, the bonus token included."""
        return self.tokens / self.steps

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.total_s / self.tokens

    def ms(self, name: str) -> float:
        """Of a step, the median."""
        return 1000 * median(self.seconds[name])

    def record(self) -> dict[str, Any]:
        return {
            "tokens_per_step": self.tau,
            "accepted_per_step": self.accepted / self.steps,
            "nodes_per_step": self.drafted / self.steps,
            "steps": self.steps,
            "ms_per_token": self.ms_per_token,
            "draft_ms_per_step": self.ms(DRAFT),
            "target_ms_per_step": self.ms(TARGET),
            "other_ms_per_step": self.ms(STEP) - self.ms(DRAFT) - self.ms(TARGET),
            "components_ms_per_step": {name: self.ms(name) for name in PARTS},
        }


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

    def learn(self, features: list[Float[Tensor, "_ f"]]) -> None:
        self.inner.learn([self.narrow.states(of_row) for of_row in features])


def method(lm: CausalLM | HeadLM, tree: str, rule: str | None = None, sampled: bool = False) -> Method:
    """A head (or a drafter LM) with a tree and a rule; refused where the pair would not be lossless."""
    drafter, verifier = lm_drafter(lm, tree, rule, lm.vocab_size)
    return Method(f"{lm.name} {tree} {verifier.name}", drafter, verifier, sampled)


def run(
    target: CausalLM, chosen: Method, narrow: Narrow | None, prompt: list[int], new: int, temperature: float,
    seed: int, tally: Tally,
) -> list[int]:  # fmt: skip
    """One continuation; the prompt's prefill is not counted."""
    clocks = {name: Clock(target.device) for name in tally.seconds}
    drafter: Any = chosen.drafter or NoDrafter()
    if isinstance(drafter, HeadDrafter):
        drafter = replace(drafter, lm=TimedHeadLM(drafter.lm, clocks))
        if narrow is not None:
            drafter = OnExpansion(drafter, narrow)
    timed = TimedLM(target, clocks[TARGET], Clock(target.device))
    decoder = Decoder(LMTarget(timed), drafter, chosen.verifier, 1, len(prompt) + new + drafter.max_nodes)
    sequence = Running(list(prompt), Sampling(temperature=temperature), torch.Generator().manual_seed(seed), new)
    decoder.join(sequence)
    assert isinstance(decoder.target, LMTargetSession)
    decoder.target.catch_up([sequence])
    if chosen.drafter is not None:
        decoder.drafter = TimedSession(decoder.drafter, clocks[DRAFT])
    clocks[TARGET].lap()
    now = seconds(clock_named(target.device), target.device)
    begin = now()
    while decoder.sequences:
        for _, step in clocks[STEP].time(decoder.step):
            tally.tokens += len(step.tokens)
            tally.drafted += step.num_drafted
            tally.accepted += step.num_accepted
        for name, clock in clocks.items():
            tally.seconds[name].append(clock.lap())
    tally.total_s += now() - begin
    return sequence.ids[len(prompt) :]


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
    found: list[Result] = []
    for t in temperatures:
        every = [plain, *(chosen for chosen in methods if t > 0 or not chosen.sampled)]
        tallies = [Tally() for _ in every]
        for chosen in every:  # compile and warm up
            run(target, chosen, narrow, prompts[0], 8, t, seed, Tally())
        for i in range(rounds):
            for number, prompt in enumerate(prompts, start=1):
                progress(f"temperature {t:g}, round {i + 1}/{rounds}, prompt {number}/{len(prompts)}")
                wanted: list[int] | None = None
                for chosen, tally in zip(every, tallies, strict=True):
                    got = run(target, chosen, narrow, prompt, new, t, seed + i, tally)
                    if t == 0:
                        wanted = wanted or got
                        assert got == wanted, f"{chosen.name} wrote another text than plain decoding"
        base = tallies[0].ms_per_token
        found += [
            Result(chosen.name, t, tally, base / tally.ms_per_token)
            for chosen, tally in zip(every, tallies, strict=True)
        ]
    return found
