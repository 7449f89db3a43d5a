"""Chains of fixed and of changing length compared on texts of the target's own: `foretoken bench chains`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foretoken.compare.given_text import Count, GivenText, decoded, decoded_by_chain, given_text
from foretoken.compare.rows import drafter_lm, written
from foretoken.compare.table import Table
from foretoken.compare.tree_report import Sample, ratio, with_error
from foretoken.core.laws import IID
from foretoken.core.policy import TreePolicy
from foretoken.core.shapes import Float
from foretoken.engine import Engine
from foretoken.trees.static import StaticTree

DRAFTS = 1 << 32  # added to the seed for drafts, which must not be drawn by what the texts were drawn by
NO_MODEL = "is no language model"
COLUMNS = ["tree", "nodes a step", "tokens a step"]


@dataclass(frozen=True)
class Course:
    """Every prompt continued `texts` times by `num_tokens` tokens, each text decoded `runs` times."""

    engine: Engine
    prompts: Sequence[list[int]]
    texts: int
    num_tokens: int
    runs: int
    seed: int


@dataclass
class Found:
    """At one temperature, of every text: counts by tree, and kept, from which chains of any depth follow. interrupted:
    whether there were to be more."""

    counts: dict[str, list[Count]]
    kept: list[Float[Tensor, "n d1"]] = field(default_factory=list)
    interrupted: bool = False

    def sample(self, name: str) -> Sample:
        return _sample(self.counts[name])

    def chain(self, nodes: float) -> Sample:
        """Of chains that draft so many nodes on average, by the two whole numbers beside it."""
        depth = min(math.floor(nodes), self.kept[0].shape[1] - 2)
        shorter, longer = (_sample([decoded_by_chain(kept, d) for kept in self.kept]) for d in (depth, depth + 1))
        share = nodes - depth  # of steps
        of_shorter, of_longer = (1 - share) / shorter.steps.sum(), share / longer.steps.sum()
        tokens = of_shorter * shorter.tokens + of_longer * longer.tokens
        return Sample(tokens, of_shorter * shorter.steps + of_longer * longer.steps, np.zeros(len(self.kept)))


def _sample(counts: Sequence[Count]) -> Sample:
    return Sample(*(np.array([getattr(count, name) for count in counts]) for name in ("tokens", "steps", "drafted")))


def ahead(policies: Mapping[str, TreePolicy]) -> int:
    """Tokens that a text needs behind its last place: those of the longest path, and one more for `Found.chain`."""
    return max(min(len(policy.sizes()), policy.max_nodes) for policy in policies.values())


def measure(
    course: Course, policies: Mapping[str, TreePolicy], temperature: float, progress: Callable[[str], None]
) -> Found:
    """Of every policy, told the law and the temperature here, on the same texts; those there are if interrupted."""
    told = {name: policy.at(IID, temperature) for name, policy in policies.items()}
    found = Found({name: [] for name in told})
    try:
        _measure(course, told, temperature, progress, found)
    except KeyboardInterrupt:
        if not found.kept:
            raise
        found.interrupted = True
    return found


def _measure(
    course: Course, told: Mapping[str, TreePolicy], temperature: float, progress: Callable[[str], None], found: Found
) -> None:
    target, drafter = course.engine.target.lm, drafter_lm(course.engine, NO_MODEL)
    depth = ahead(told)
    rng = torch.Generator().manual_seed(course.seed + DRAFTS)
    for i in range(course.texts):
        where = f"temperature {temperature:g}, texts {i + 1}/{course.texts}"
        progress(f"{where}: the target writes")
        seed, length = course.seed + i * len(course.prompts), course.num_tokens + depth
        own = written(course.engine, course.prompts, length, temperature, seed)
        for j, (prompt, tokens) in enumerate(zip(course.prompts, own, strict=True)):
            progress(f"{where}, prompt {j + 1}/{len(course.prompts)}")
            text = given_text(target, drafter, prompt, tokens, depth, temperature, rng)
            counts = {name: _count(policy, text, course.runs, seed + j) for name, policy in told.items()}
            for name, count in counts.items():
                found.counts[name].append(count)
            found.kept.append(text.kept)


def _count(policy: TreePolicy, text: GivenText, runs: int, seed: int) -> Count:
    if type(policy) is StaticTree:
        return decoded_by_chain(text.kept, policy.chain_depth)
    return decoded(policy, text, runs, np.random.default_rng(seed))


def fill(table: Table, found: Found) -> None:
    """A row a tree. Columns: COLUMNS, over the first tree, over a chain of as many nodes."""
    samples = {name: found.sample(name) for name in found.counts}
    first = next(iter(samples.values()))
    for name, sample in samples.items():
        nodes = float(sample.drafted.sum() / sample.steps.sum())
        against = (ratio(sample, other) for other in (first, found.chain(nodes)))
        cells = (with_error(value, error, 3) for value, error in against)
        table.add(name, round(nodes, 2), with_error(sample.efficiency, sample.error, 3), *cells)
    table.notes = [
        f"{len(found.kept)} texts; bonus included; ±: standard error over texts, paired in ratios. Block verification.",
        "Nodes: drafted a step, on texts so short. A chain of as many: between the two of whole numbers beside it.",
    ]
