"""Whole continuations, every engine in turn on every prompt, in rotated order: a slow moment slows them all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.sampling import Processor
from foretoken.engine import Engine
from foretoken.measure.harness import WARM_TOKENS, Block, Progress, blocks, interleave
from foretoken.measure.results import Journal


@dataclass(frozen=True)
class Continued:
    """One run. tokens: of each step, the first left out, since it reads the prompt. seconds: of those steps."""

    tokens: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Raises ForetokenError for a run of one step."""
        if not self.tokens:
            raise ForetokenError("A text ends in its first step: ask for more new tokens (--max-new-tokens).")
        return sum(self.tokens) / self.seconds


@dataclass(frozen=True)
class Runs:
    """All runs of one engine, over all prompts and rounds, in order."""

    runs: tuple[Continued, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(sum(run.tokens) for run in self.runs) / sum(run.seconds for run in self.runs)

    @property
    def tokens_per_step(self) -> float:
        return sum(sum(run.tokens) for run in self.runs) / self._num_steps

    @property
    def seconds_per_step(self) -> float:
        return sum(run.seconds for run in self.runs) / self._num_steps

    @property
    def _num_steps(self) -> int:
        """Steps after the first one of each text. Raises ForetokenError where there are none."""
        steps = sum(len(run.tokens) for run in self.runs)
        if not steps:
            raise ForetokenError("All texts end in their first step: ask for more new tokens (--max-new-tokens).")
        return steps


@dataclass(frozen=True)
class Workload:
    """prompts: ids. now: seconds, of the thread or the wall (see clocks.py). processors: one per prompt, or none."""

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

    def blocks(self, rounds: int) -> list[Block]:
        """Every prompt, round after round."""
        return blocks(rounds, len(self.prompts), [self.temperature])

    def run(self, engine: Engine, i: int, seed: int, new: int | None = None) -> Continued:
        """The i-th prompt's continuation by so many tokens; it does not stop at the end of a text."""
        engine = replace(engine, eos_ids=frozenset(), tokenizer=None)
        begin, tokens = None, []
        for chunk in engine.stream(
            self.prompts[i],
            max_new_tokens=new or self.max_new_tokens,
            temperature=self.temperature,
            seed=seed,
            processors=self.processors[i : i + 1],
        ):
            if begin is None:
                begin = self.now()
            else:
                tokens.append(len(chunk.token_ids))
        assert begin is not None
        return Continued(tuple(tokens), self.now() - begin)


def continued(
    engines: Mapping[str, Engine],
    workload: Workload,
    every: Sequence[Block],
    progress: Progress,
    journal: Journal | None = None,
    cold: bool = True,
) -> dict[str, Runs]:
    """Every engine on every block of a workload, in turn.

    journal: remembers whole blocks, which are not run again. cold: whether the engines are to run a little first.
    """
    found: dict[Block, dict[str, Any]] = {}

    def entry(block: Block) -> str:
        return f"{', '.join(engines)}: round {block.round + 1}, prompt {block.prompt + 1}"

    def known(block: Block) -> bool:
        if journal is not None and entry(block) in journal:
            found[block] = journal[entry(block)]
        return block in found

    def run(engine: Engine, block: Block) -> Continued:
        return workload.run(engine, block.prompt, workload.seed + 1000 * block.round + block.prompt)

    def warm(engine: Engine) -> None:
        workload.run(engine, 0, 0, WARM_TOKENS)

    for turn in interleave(engines, every, run, warm if cold else None, progress, known):
        found.setdefault(turn.block, {})[turn.name] = [turn.result.tokens, turn.result.seconds]
        if turn.last and journal is not None:
            journal.add(entry(turn.block), found[turn.block])
    return {
        name: Runs(tuple(Continued(tuple(tokens), seconds) for tokens, seconds in (found[b][name] for b in every)))
        for name in engines
    }
