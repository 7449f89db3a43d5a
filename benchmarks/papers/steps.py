"""Tokens per step of a drafter and a rule, counted on the real engine: the tables of the papers are of these."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.decoding import opened
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence as Running
from foretoken.core.verifier import Verifier
from foretoken.draft.lm import LMDrafter
from foretoken.models.target import LMTarget


@dataclass(frozen=True)
class Course:
    """The prompts' ids, `batch` of them side by side, each continued by at least `num_tokens` tokens. Prompt i draws by
    seed + i."""

    target: LMTarget
    prompts: Sequence[list[int]]
    num_tokens: int
    batch: int = 8
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Sample:
    """tokens, steps: of each prompt, the bonus counted. wall_s: of all steps, once the target has read the prompts."""

    tokens: np.ndarray
    steps: np.ndarray
    wall_s: float = 0.0

    @property
    def efficiency(self) -> float:
        """Tokens per step."""
        return float(self.tokens.sum() / self.steps.sum())

    @property
    def error(self) -> float:
        """Standard error of `efficiency`, from the influence of each prompt on its logarithm; nan of one prompt."""
        n = len(self.tokens)
        influence = (self.tokens - self.efficiency * self.steps) / self.tokens.sum()
        return self.efficiency * float((influence**2).sum() * n / (n - 1)) ** 0.5 if n > 1 else float("nan")


def run(drafter: LMDrafter, verifier: Verifier, temperature: float, course: Course) -> Sample:
    """Continue every prompt by steps, until it has `num_tokens` new tokens or more.

    The last step's tree is as deep as any other and counts in full: steps are counted up to a stopping time, so that
    tokens over steps is the mean of a step.
    """
    found = [_run(drafter, verifier, temperature, course, at) for at in range(0, len(course.prompts), course.batch)]
    tokens, steps = (np.concatenate(each) for each in zip(*((s.tokens, s.steps) for s in found), strict=True))
    return Sample(tokens, steps, sum(sample.wall_s for sample in found))


def _run(drafter: LMDrafter, verifier: Verifier, temperature: float, course: Course, first: int) -> Sample:
    """The prompts that are decoded side by side with prompt `first`."""
    target, prompts = course.target, course.prompts
    deepest = course.num_tokens + len(drafter.policy.sizes())
    limit = target.lm.context or deepest + max(map(len, prompts))
    slots = max(map(len, prompts)) + deepest + drafter.max_nodes
    sequences = [
        Running(list(ids), Sampling(temperature=temperature), seeded(course.seed + i), min(deepest, limit - len(ids)))
        for i, ids in enumerate(prompts[first : first + course.batch], start=first)
    ]
    place = {sequence: i for i, sequence in enumerate(sequences)}
    tokens, steps = np.zeros(len(sequences), int), np.zeros(len(sequences), int)
    decoder = opened(target, drafter, verifier, sequences, slots)
    begin = time.perf_counter()
    while decoder.sequences:
        for sequence, _ in decoder.step():
            i = place[sequence]
            steps[i] += 1
            tokens[i] = sequence.num_new
            if sequence.num_new >= course.num_tokens and not sequence.finished:
                decoder.leave(sequence)
    return Sample(tokens, steps, time.perf_counter() - begin)
