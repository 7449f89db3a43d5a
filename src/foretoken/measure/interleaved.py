"""Whole continuations, every engine in turn on every prompt, in rotated order: a slow moment slows them all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.sampling import Processor
from foretoken.engine import Engine

WARM_TOKENS = 12


@dataclass(frozen=True)
class Continued:
    """One run. tokens: of each step, the first left out, since it reads the prompt. seconds: of those steps."""

    tokens: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.seconds


@dataclass(frozen=True)
class Runs:
    """Of one engine over all prompts and rounds, in order."""

    runs: tuple[Continued, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(sum(run.tokens) for run in self.runs) / sum(run.seconds for run in self.runs)

    @property
    def tokens_per_step(self) -> float:
        return sum(sum(run.tokens) for run in self.runs) / sum(len(run.tokens) for run in self.runs)

    @property
    def seconds_per_step(self) -> float:
        return sum(run.seconds for run in self.runs) / sum(len(run.tokens) for run in self.runs)

    def scaled(self, by: float) -> "Runs":
        """With all times multiplied: to the scale of another clock."""
        return Runs(tuple(replace(run, seconds=by * run.seconds) for run in self.runs))


@dataclass(frozen=True)
class Workload:
    """prompts: ids. now: seconds, of the thread or the wall (measure/clocks.py). processors: one a prompt, or none."""

    prompts: Sequence[list[int]]
    max_new_tokens: int
    temperature: float
    now: Callable[[], float]
    seed: int = 0
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ForetokenError("The workload has no prompts: give one or more.")
        if self.max_new_tokens < 16:
            raise ForetokenError(f"max_new_tokens is {self.max_new_tokens}: runs below 16 tokens measure nothing.")
        if not 0 <= self.temperature < float("inf"):
            raise ForetokenError(f"temperature is {self.temperature}: it must be a finite number >= 0.")

    def run(self, engine: Engine, i: int, seed: int, new: int | None = None) -> tuple[Continued, list[int]]:
        """The i-th prompt's continuation by so many tokens, and its ids; it does not stop at the end of a text."""
        engine = replace(engine, eos_ids=frozenset(), tokenizer=None)
        begin, tokens, ids = 0.0, [], []
        for chunk in engine.stream(
            self.prompts[i],
            max_new_tokens=new or self.max_new_tokens,
            temperature=self.temperature,
            seed=seed,
            processors=self.processors[i : i + 1],
        ):
            if ids:
                tokens.append(len(chunk.token_ids))
            else:
                begin = self.now()
            ids += chunk.token_ids
        return Continued(tuple(tokens), self.now() - begin), ids


def interleaved(
    engines: Mapping[str, Engine],
    workload: Workload,
    rounds: int,
    progress: Callable[[str], None],
    once: Callable[[str, Callable[[], Any]], Any] = lambda _, measure: measure(),
) -> dict[str, Runs]:
    """Every engine warm, then timed. once: remembers what was measured, by a name."""
    found: dict[str, list[Continued]] = {name: [] for name in engines}
    blocks = [(r, i) for r in range(rounds) for i in range(len(workload.prompts))]
    warm = False

    def block(number: int, round_: int, i: int) -> dict[str, Any]:
        nonlocal warm
        if not warm:  # compile, and page in
            for name, engine in engines.items():
                progress(f"warming up {name}")
                workload.run(engine, 0, 0, WARM_TOKENS)
            warm = True
        names = list(engines)
        turn = number % len(names)
        runs = {}
        for order, name in enumerate([*names[turn:], *names[:turn]]):
            progress(f"[{number * len(names) + order + 1}/{len(blocks) * len(names)}] {name}, prompt {i + 1}")
            seed = workload.seed + 1000 * round_ + i
            run, _ = workload.run(engines[name], i, seed)
            runs[name] = [run.tokens, run.seconds]
        return runs

    for number, (round_, i) in enumerate(blocks):
        label = f"{', '.join(engines)}: round {round_ + 1}, prompt {i + 1}"
        runs = once(label, lambda n=number, r=round_, j=i: block(n, r, j))
        for name, (tokens, seconds) in runs.items():
            found[name].append(Continued(tuple(tokens), seconds))
    return {name: Runs(tuple(runs)) for name, runs in found.items()}
