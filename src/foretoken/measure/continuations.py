"""The speed of several engines that continue the same prompts in turn, so that a slow moment slows them all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_measured
from foretoken.core.sampling import Processor
from foretoken.engine import Engine
from foretoken.measure.harness import WARM_TOKENS, Block, Progress, blocks, interleave
from foretoken.measure.results import Journal


@dataclass(frozen=True)
class Continued:
    """One run, without its first step, which reads the prompt.

    tokens: the number of tokens of each step.
    seconds: of all these steps together.
    """

    tokens: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second. Raises ForetokenError for a run whose first step was its only one."""
        if not self.tokens:
            raise ForetokenError("A text ends in its first step: ask for more new tokens (--max-new-tokens).")
        return sum(self.tokens) / self.seconds


@dataclass(frozen=True)
class Runs:
    """All runs of one engine, over all prompts and rounds, in order; each rate is over all runs together."""

    runs: tuple[Continued, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second."""
        return sum(sum(run.tokens) for run in self.runs) / sum(run.seconds for run in self.runs)

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens of a step."""
        return sum(sum(run.tokens) for run in self.runs) / self._num_steps

    @property
    def seconds_per_step(self) -> float:
        """The mean time of a step, in seconds."""
        return sum(run.seconds for run in self.runs) / self._num_steps

    @property
    def _num_steps(self) -> int:
        """The number of steps after the first one of each text. Raises ForetokenError where there are none."""
        steps = sum(len(run.tokens) for run in self.runs)
        if not steps:
            raise ForetokenError("All texts end in their first step: ask for more new tokens (--max-new-tokens).")
        return steps


@dataclass(frozen=True)
class Workload:
    """The prompts to continue, and how.

    prompts: the ids of each prompt, at least one prompt.
    max_new_tokens: the number of new tokens of each text, at least 16.
    now: reads the clock, in seconds; see `clocks.seconds`.
    processors: one logits processor per prompt; empty for none.

    Raises ForetokenError for fewer prompts or tokens.
    """

    prompts: Sequence[list[int]]
    max_new_tokens: int
    temperature: float
    now: Callable[[], float]
    seed: int = 0
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ForetokenError("The workload has no prompts: give one or more.")
        check_measured(self.max_new_tokens)

    def blocks(self, rounds: int) -> list[Block]:
        """Return the blocks of a measurement: every prompt, round after round; rounds: their number."""
        return blocks(rounds, len(self.prompts), [self.temperature])

    def run(self, engine: Engine, i: int, seed: int, new: int | None = None) -> Continued:
        """Let an `engine` continue the prompt with index `i`; the run does not stop at an end-of-text token.

        seed: that of the draws.
        new: the number of new tokens; None for `max_new_tokens`.
        """
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
    """Run every engine on the blocks `every` of a workload, in turn, and return the runs of each, by name.

    engines: {name: engine}.
    workload: what is run.
    progress: shows what runs.
    journal: keeps what was measured, block by block, so that it is not run again; None for no such file.
    cold: whether each engine is to run a few tokens first, unmeasured.
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
