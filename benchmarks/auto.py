"""`python -m benchmarks auto`: the run-time controller beside plain decoding and every fixed depth, interleaved.

Three cases: the drafter named; a useless one, its weights random; and a text that is new at first and then repeats what
came before, under prompt lookup: what the target writes there is set by a processor, in all methods alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.arena_clock import controlled
from benchmarks.expand import Expand, load_expanded
from foretoken.build import plain, with_recipe
from foretoken.cli import options
from foretoken.cli.measuring import chosen_prompts, encoded, names, show
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_seed, check_temperatures
from foretoken.draft.lm import LMDrafter
from foretoken.draft.source import Source
from foretoken.engine import Engine
from foretoken.measure.clocks import clock_named, seconds
from foretoken.measure.continuations import Runs, Workload, continued
from foretoken.measure.machine import machine
from foretoken.measure.report import Report, Table
from foretoken.models.causal_lm import CausalLM
from foretoken.models.panels import pack
from foretoken.models.text import encode
from foretoken.recipe import AUTO, NGRAM, PLAIN, Recipe
from foretoken.trees.forms import read_tree

TREES = ["chain:1", "chain:2", "chain:3", "chain:5", "chain:8"]
LOOKUP_TREES = ["chain:3", "chain:8"]
COLUMNS = ["method", "tokens/s", "x plain", "x best fixed", "tokens per step"]


def fill(table: Table, runs: Mapping[str, Runs]) -> None:
    """Add fixed configurations, plain among them, then auto.

    x plain is the median of ratios, each of one prompt and round; x best fixed that of tokens/s to the best one's.
    """
    best = max(of.tokens_per_s for name, of in runs.items() if name != AUTO)
    plain_runs = runs[PLAIN].runs
    for name, of in runs.items():
        ratios = [x.tokens_per_s / y.tokens_per_s for x, y in zip(of.runs, plain_runs, strict=True)]
        table.add(name, of.tokens_per_s, median(ratios), of.tokens_per_s / best, of.tokens_per_step)


def methods(engine: Engine, trees: Sequence[str]) -> dict[str, Engine]:
    """Plain, the drafter with every tree, and the drafter under the controller."""
    fixed = {tree: with_recipe(engine, Recipe(tree)) for tree in trees}
    return {PLAIN: plain(engine), **fixed, AUTO: controlled(engine)}


def useless(engine: Engine, seed: int) -> Engine:
    """The same with random weights in the drafter, also where a recipe is named afterwards."""
    if not isinstance(engine.drafter, LMDrafter) or not isinstance(engine.drafter.lm, CausalLM):
        raise ForetokenError(f"Drafter {engine.drafter.name} has no weights: name a model folder, --drafter.")
    torch.manual_seed(seed)  # transformers draws initial weights from the global generator
    lm = engine.drafter.lm
    model = AutoModelForCausalLM.from_config(lm.model.config).to(device=lm.device, dtype=lm.dtype).eval()
    pack(model)
    source = replace(engine.source, lm=CausalLM(model, "random weights"))
    return with_recipe(replace(engine, source=source), engine.recipe)


@dataclass(frozen=True)
class Replay:
    """A processor that leaves one token at each place: the one of `text`, prompt included."""

    text: list[int]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self.text[ids.shape[1]] if ids.shape[1] < len(self.text) else 0] = 0.0
        return kept


def changing(prompts: Sequence[list[int]], fresh: Sequence[list[int]], length: int) -> list[Replay]:
    """Each prompt, then `length` tokens of a text of its own, then the same again."""
    long = [text for text in fresh if len(text) >= length]
    if len(long) < len(prompts):
        raise ForetokenError(f"{len(long)} held-out texts have {length} tokens: lower --prompts or --max-new-tokens.")
    return [Replay([*ids, *text[:length], *text[:length]]) for ids, text in zip(prompts, long, strict=False)]


def by_lookup(engine: Engine) -> Engine:
    """The engine with prompt lookup in the place of its drafter, also where a recipe is named afterwards."""
    return with_recipe(replace(engine, source=Source(NGRAM, engine.target.vocab_size, None)), Recipe("chain:5"))


def halves(runs: Runs, length: int) -> tuple[float, float]:
    """Tokens per step in the first `length` tokens of a text, and after them."""
    first, second = [], []
    for run in runs.runs:
        for place, tokens in zip(accumulate(run.tokens), run.tokens, strict=True):
            (first if place <= length else second).append(tokens)
    return sum(first) / max(len(first), 1), sum(second) / max(len(second), 1)


def command(
    *,
    target: str | None = None,
    drafter: str | None = None,
    tree: Annotated[
        list[str] | None, typer.Option(help=f"Fixed tree; may be repeated. Default: {', '.join(TREES)}.")
    ] = None,
    temperature: list[float] | None = None,
    workload: str | None = None,
    prompts: int = 6,
    max_new_tokens: int = 128,
    rounds: int = 2,
    expand: Expand = None,
    seed: int = 0,
    markdown: bool = False,
    json_: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Method auto beside plain decoding and fixed trees, interleaved: with the drafter, with one of random weights, and
    by prompt lookup on a text that is new at first and then repeats itself.

    The bars: with the drafter 0.95 of the best fixed method, with the useless one 0.95 of plain decoding.

    temperature: May be repeated. Default: 0 and 0.8.
    rounds: Times that every method continues every prompt.
    seed: Seed of whatever is sampled.
    """
    temperatures = list(dict.fromkeys([0.0, 0.8] if temperature is None else temperature))
    check_temperatures(temperatures)
    check_counts(rounds=rounds, max_new_tokens=max_new_tokens)
    check_seed(seed)
    texts = chosen_prompts(workload, prompts)
    options.check_models(target, drafter, dtype=dtype)
    for name in tree or ():
        read_tree(name)

    engine = load_expanded(target, drafter, expand, seed, device, dtype)
    of_device = engine.target.lm.device
    clock = clock_named(of_device)
    now = seconds(clock, of_device)
    ids = encoded(engine, texts, max_new_tokens)
    header = {
        **machine(of_device), **names(target, drafter), "expand": expand,
        "prompts": prompts, "max_new_tokens": max_new_tokens, "rounds": rounds, "seed": seed, "clock": clock,
    }  # fmt: skip
    report = Report("benchmarks auto", header)
    trees = tree or TREES

    def run(title: str, engines: Mapping[str, Engine], workload: Workload) -> "tuple[Table, Mapping[str, Runs]]":
        table = report.table(title, COLUMNS)
        runs = continued(engines, workload, workload.blocks(rounds), lambda line: options.progress(f"{title}: {line}"))
        fill(table, runs)
        return table, runs

    try:
        for t in temperatures:
            chosen = Workload(ids, max_new_tokens, t, now, seed)
            run(f"With the drafter, temperature {t:g}", methods(engine, trees), chosen)
        chosen = Workload(ids, max_new_tokens, 0.8, now, seed)
        run("With random weights in the drafter, temperature 0.8", methods(useless(engine, seed), trees[-1:]), chosen)
        assert engine.tokenizer is not None
        length = max_new_tokens // 2
        fresh = [encode(engine.tokenizer, p["reference"]) for p in options.heldout_prompts()[::-1]]
        written = changing(ids, fresh, length)
        chosen = Workload([x.text[: -2 * length] for x in written], 2 * length, 1.0, now, seed, tuple(written))
        title = f"By prompt lookup: {length} new tokens, then the same again"
        table, runs = run(title, methods(by_lookup(engine), LOOKUP_TREES), chosen)
        for name, of in runs.items():
            before, after = halves(of, length)
            table.notes.append(
                f"{name}: {before:.2f} tokens per step in the new half, {after:.2f} in the repeated one."
            )
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, markdown)
