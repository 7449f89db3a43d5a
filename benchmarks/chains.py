"""`python -m benchmarks chains`: chains of fixed and of changing length, on given texts of the target's own."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.given_text import Count, GivenText, decoded, decoded_by_chain, given_text, one_path
from benchmarks.tree_report import Sample, ratio, with_error
from foretoken.cli import options
from foretoken.cli.measuring import Markdown, chosen_prompts, encoded, show
from foretoken.cli.measuring import names as models
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID
from foretoken.core.limits import check_counts
from foretoken.core.policy import TreePolicy
from foretoken.core.shapes import Float
from foretoken.engine import Engine
from foretoken.measure.machine import machine
from foretoken.measure.pair import load_pair
from foretoken.measure.report import Report, Table
from foretoken.measure.teacher_forcing import drafter_lm, written
from foretoken.names import policy_for, tree_policy, verifier_named
from foretoken.trees.grammar import read_tree
from foretoken.trees.static import StaticTree

DRAFTS = 1 << 32  # added to the seed for drafts, which must not be drawn by what the texts were drawn by
NO_MODEL = "is no language model"
COLUMNS = ["tree", "nodes a step", "tokens per step"]
TREES = ["chain:8", "budget:8", "chain:16", "budget:16"]
TEMPERATURES = [1.0, 0.6]


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
        """The sample of chains that draft `nodes` on average, from those of the whole numbers below and above it."""
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
    """Evaluate every policy on the same texts, at the law and the temperature. On Ctrl-C return what is complete."""
    fixed = {name: policy.at(IID, temperature) for name, policy in policies.items()}
    found = Found({name: [] for name in fixed})
    try:
        _measure(course, fixed, temperature, progress, found)
    except KeyboardInterrupt:
        if not found.kept:
            raise
        found.interrupted = True
    return found


def _measure(
    course: Course, fixed: Mapping[str, TreePolicy], temperature: float, progress: Callable[[str], None], found: Found
) -> None:
    target, drafter = course.engine.target.lm, drafter_lm(course.engine, NO_MODEL)
    depth = ahead(fixed)
    rng = torch.Generator().manual_seed(course.seed + DRAFTS)
    for i in range(course.texts):
        where = f"temperature {temperature:g}, texts {i + 1}/{course.texts}"
        progress(f"{where}: the target writes")
        seed, length = course.seed + i * len(course.prompts), course.num_tokens + depth
        own = written(course.engine, course.prompts, length, temperature, seed)
        for j, (prompt, tokens) in enumerate(zip(course.prompts, own, strict=True)):
            progress(f"{where}, prompt {j + 1}/{len(course.prompts)}")
            text = given_text(target, drafter, prompt, tokens, depth, temperature, rng)
            counts = {name: _count(policy, text, course.runs, seed + j) for name, policy in fixed.items()}
            for name, count in counts.items():
                found.counts[name].append(count)
            found.kept.append(text.kept)


def _count(policy: TreePolicy, text: GivenText, runs: int, seed: int) -> Count:
    if isinstance(policy, StaticTree) and policy.floor == 0:
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


def command(
    target: options.Target = None,
    drafter: options.SameVocabulary = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(help=f"chain:D, chain:D@C or budget:N; may be repeated. Default: {', '.join(TREES)}."),
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated. Default: 1 and 0.6.")] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts that the target continues.")] = 31,
    texts: Annotated[int, typer.Option(help="Times that it continues every prompt.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of every text that are decoded.")] = 64,
    runs: Annotated[int, typer.Option(help="Decodings of every text, for trees whose length changes.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of texts and of what is drafted.")] = 0,
    markdown: Markdown = False,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Tokens per step of chains under block verification, by probability on texts of the target's own.

    On the same texts trees that differ by 1% are resolved in minutes, where trees takes days. Trees of one path
    only: a budget tree draws one child a node here.
    """
    temperatures = list(dict.fromkeys(temperature or TEMPERATURES))
    check_counts(texts=texts, max_new_tokens=max_new_tokens, runs=runs)
    if seed < 0:
        raise ForetokenError(f"seed is {seed}: it must be 0 or more.")
    for t in temperatures:
        if not 0 < t < float("inf"):
            raise ForetokenError(f"temperature is {t}: it must be a finite number > 0, since nothing is drawn at 0.")
    names = list(dict.fromkeys(tree or TREES))
    for name in names:
        read_tree(name)
    options.heldout_prompts(prompts)
    options.check_models(target, drafter, dtype=dtype)

    policies = {name: policy_for(one_path(tree_policy(name), name), verifier_named("block")) for name in names}
    source, inner = options.resolve_models(target, drafter)
    options.quiet()
    pair = load_pair(source, inner, device=device, dtype=dtype)
    drafter_lm(pair.engine, NO_MODEL)
    ids = encoded(pair.engine, chosen_prompts(None, prompts), max_new_tokens + ahead(policies))
    course = Course(pair.engine, ids, texts, max_new_tokens, runs, seed)
    lm = pair.engine.target.lm
    header = {
        **machine(lm.device), **models(target, drafter), "dtype": str(lm.dtype).removeprefix("torch."),
        "prompts": prompts, "texts": texts, "max_new_tokens": max_new_tokens, "runs": runs, "seed": seed,
    }  # fmt: skip
    report = Report("Chains on given texts", header)
    try:
        for t in temperatures:
            found = measure(course, policies, t, options.progress)
            columns = [*COLUMNS, f"over {names[0]}", "over a chain of as many nodes"]
            fill(report.table(f"Tokens per step, temperature {t:g}", columns, 2), found)
            if found.interrupted:
                report.interrupted = True
                break
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, markdown)
