"""Interleaved measuring: in every round every method runs once on the same prompt, in rotated order, so that a machine
that slows down for a while slows them all."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.measure.methods import Method, Run

WARM_TOKENS = 16


@dataclass(frozen=True)
class Prompt:
    id: str
    ids: list[int]


@dataclass(frozen=True)
class Settings:
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 128
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ForetokenError(f"{name} is {getattr(self, name)}: it must be at least 1.")
        for temperature in self.temperatures:
            if not 0 <= temperature < float("inf"):
                raise ForetokenError(f"temperature is {temperature}: it must be a finite number >= 0.")


@dataclass(frozen=True)
class Measurement:
    """One run in its place. verifier: the rule that drafts passed. prompt: id of the first of its prompts. order: its
    place in the round. Methods are compared where temperature, prompt, round and batch are equal."""

    system: str
    method: str
    verifier: str | None
    batch: int
    temperature: float
    prompt: str
    round: int
    order: int
    seed: int
    run: Run

    @property
    def tokens_per_s(self) -> float:
        return self.run.num_tokens / self.run.wall_s

    @property
    def decoded_per_s(self) -> float | None:
        """Tokens a second after the first ones: without the prefill. None where all came at once."""
        left = self.run.num_tokens - self.run.num_first
        return left / (self.run.wall_s - self.run.ttft_s) if left else None

    @property
    def outside_forwards(self) -> float:
        """Share of the wall clock outside calls of the models."""
        return 1 - self.run.forward_s / self.run.wall_s

    @property
    def outside_scoring(self) -> float | None:
        """Share outside our rows' score, extend and keep; None for transformers."""
        return None if self.run.scoring_s is None else 1 - self.run.scoring_s / self.run.wall_s

    def record(self) -> dict[str, Any]:
        """A line of JSONL. Block efficiency counts the bonus token."""
        fields = {name: value for name, value in vars(self).items() if name != "run"}
        run = self.run
        return fields | asdict(run) | {
            "tokens_per_s": self.tokens_per_s,
            "decoded_per_s": self.decoded_per_s,
            "block_efficiency": run.num_tokens / run.num_target_forwards,
            "acceptance_rate": run.num_accepted / run.num_drafted if run.num_drafted else None,
            "outside_forwards": self.outside_forwards,
            "outside_scoring": self.outside_scoring,
        }  # fmt: skip


def measure(
    methods: Sequence[Method], prompts: Sequence[Prompt], settings: Settings, progress: Callable[[str], None]
) -> Iterator[Measurement]:
    """Warm up, then measure; yields as it goes. A batch takes the round's prompt and those after it, around the end."""
    warm = [p.ids for p in prompts]
    for temperature in settings.temperatures:
        for method in methods:
            progress(f"warming up: {method.system} {method.name}, temperature {temperature:g}")
            batch = [warm[j % len(warm)] for j in range(method.batch)]
            method.run(batch, min(WARM_TOKENS, settings.max_new_tokens), temperature, settings.seed)
    blocks = [(t, r, i) for r in range(settings.rounds) for i in range(len(prompts)) for t in settings.temperatures]
    for number, (temperature, round_, first) in enumerate(blocks):
        turn = number % len(methods)
        seed = settings.seed + number
        for order, method in enumerate([*methods[turn:], *methods[:turn]]):
            progress(
                f"round {round_ + 1}/{settings.rounds}, prompt {first + 1}/{len(prompts)}, temperature "
                f"{temperature:g}: {method.system} {method.name}, batch {method.batch} "
                f"[{number * len(methods) + order + 1}/{len(blocks) * len(methods)}]"
            )
            batch = [prompts[(first + j) % len(prompts)].ids for j in range(method.batch)]
            run = method.run(batch, settings.max_new_tokens, temperature, seed)
            yield Measurement(
                *(method.system, method.name, method.verifier, method.batch, temperature),
                *(prompts[first].id, round_, order, seed, run),
            )
