"""`foretoken tune`: measure this machine, this pair and this workload, and write down what pays."""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options
from foretoken.cli.generate import Prompt
from foretoken.cli.rules import show
from foretoken.cli.workload import WorkloadFile, chosen_prompts, encoded
from foretoken.core.limits import check_counts, check_sampling, check_seed

if TYPE_CHECKING:
    from foretoken.engine import Engine
    from foretoken.tune.journal import Journal


app = typer.Typer(cls=options.DefaultCommand, help="Measure what pays here.")
DEFAULT_OUT = "foretoken-profile.json"
DEFAULT_PART = "foretoken-randomised.part"

Prompts = Annotated[int, typer.Option(help="Prompts of the workload that are continued.")]
NewTokens = Annotated[int, typer.Option(help="Tokens of each run; end-of-text does not stop one.")]
Rounds = Annotated[int, typer.Option(help="Times that every configuration continues every prompt.")]
Expand = Annotated[
    str | None,
    typer.Option(help="Give the target the cost of a model of 100m, 300m or 1b parameters, at the same function."),
]


@app.command("configurations")
def tune(
    target: options.Target = None,
    drafter: options.Drafter = None,
    vocab: options.Vocab = None,
    workload: WorkloadFile = None,
    temperature: Annotated[float, typer.Option(help="Temperature to tune for.")] = 0.8,
    prompts: Prompts = 6,
    max_new_tokens: NewTokens = 96,
    rounds: Rounds = 1,
    best: Annotated[int, typer.Option(help="Predicted best configurations that are run.")] = 3,
    expand: Expand = None,
    seed: Annotated[int, typer.Option(help="Seed of whatever is sampled.")] = 0,
    out: Annotated[
        str, typer.Option(help="Profile file, replaced if it exists; OUT.part holds what is measured so far.")
    ] = DEFAULT_OUT,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    compile: options.Compile = "auto",
) -> None:
    """Predict tokens/s of many configurations, plain decoding included, run the best, and write a profile.

    Chains, also such as end early; trees; coins before drafts; for a drafter with another vocabulary and --vocab auto
    every way to draft with it. What no model predicts is ranked by a short run.

    The profile is for --profile of generate and bench, and for foretoken.load(profile=...). Takes minutes; interrupted,
    the same command goes on where it stopped. docs/will-it-be-faster.md has the cost model and how to read the tables.
    """
    options.check_outputs(out)
    check_counts(rounds=rounds, best=best, max_new_tokens=max_new_tokens)
    check_sampling(temperature=temperature)
    check_seed(seed)
    texts = chosen_prompts(workload, prompts)
    options.check_models(target, drafter, expand, vocab=vocab, dtype=dtype, compile=compile)
    from foretoken.bench.execution import clock_named, seconds
    from foretoken.bench.interleaved import Workload
    from foretoken.bench.machine import machine
    from foretoken.choices import AUTO, VOCABS
    from foretoken.compare.table import Report
    from foretoken.drafters import way_of
    from foretoken.tune.run import tune as measure

    engine = load_engine(target, drafter, vocab, expand, seed, device, dtype, compile)
    of_device = engine.target.lm.device
    clock = clock_named(of_device)
    chosen = Workload(
        encoded(engine, texts, max_new_tokens), max_new_tokens, temperature, seconds(clock, of_device), seed
    )
    settings = {
        "target": target or "demo",
        "drafter": drafter or ("ngram" if target else "demo"),
        "vocab": vocab,
        "expand": expand,
        "workload": digest(texts),
        "temperature": temperature,
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "seed": seed,
        "clock": clock,
        "compile": compile,
    }
    header = {**machine(of_device), **settings}
    report = Report("foretoken tune", header)
    vocabs = [] if way_of(engine.drafter) not in VOCABS else list(VOCABS) if vocab == AUTO else [str(vocab)]
    with open_journal(f"{out}.part", engine, settings) as journal:
        profile = measure(engine, chosen, best, rounds, vocabs, journal, report, options.progress)
    profile.write(out)
    journal.close()
    show(report, json_, False)
    print(f"profile written to {out}", file=sys.stderr)


@app.command("randomised")
def randomised(
    target: options.Target = None,
    drafter: options.Drafter = None,
    cost_ratio: Annotated[
        float | None,
        typer.Option(help="Give the drafter the cost of this share of the target's parameters, at the same function."),
    ] = None,
    workload: WorkloadFile = None,
    temperature: Annotated[float, typer.Option(help="Temperature to tune for.")] = 1.0,
    prompts: Prompts = 6,
    max_new_tokens: NewTokens = 96,
    rounds: Rounds = 1,
    expand: Expand = None,
    seed: Annotated[int, typer.Option(help="Seed of whatever is sampled.")] = 0,
    plot: Annotated[str | None, typer.Option(help="Draw Figures 3 and 4 to this file (needs matplotlib).")] = None,
    part: Annotated[
        str, typer.Option(help="File that holds what is measured so far, removed when all is done.")
    ] = DEFAULT_PART,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """The draft probability that pays (paper 002): both optima, exactly, and tokens/s predicted and measured against a.

    One draft a step. Where a coin says no, drafter and target run at the same time, for which they need a core each.
    Interrupted, the same command goes on where it stopped.
    """
    check_counts(rounds=rounds, max_new_tokens=max_new_tokens)
    check_sampling(temperature=temperature)
    check_seed(seed)
    options.check_outputs(part, plot)
    texts = chosen_prompts(workload, prompts)
    options.check_models(target, drafter, expand, dtype=dtype)
    import time

    from foretoken.bench.interleaved import Workload
    from foretoken.bench.machine import machine
    from foretoken.compare.table import Report
    from foretoken.tune.randomised import plot as draw
    from foretoken.tune.randomised import randomised as measure

    engine = load_engine(target, drafter, None, expand, seed, device, dtype, "auto", cost_ratio)
    chosen = Workload(encoded(engine, texts, max_new_tokens), max_new_tokens, temperature, time.perf_counter, seed)
    settings = {
        "target": target or "demo", "drafter": drafter or "demo", "expand": expand, "cost_ratio": cost_ratio,
        "temperature": temperature, "prompts": prompts, "max_new_tokens": max_new_tokens, "rounds": rounds,
        "seed": seed, "clock": "wall", "workload": digest(texts),
    }  # fmt: skip
    report = Report("foretoken tune randomised", {**machine(engine.target.lm.device), **settings})
    with open_journal(part, engine, settings) as journal:
        points = measure(engine, chosen, rounds, journal, report, options.progress)
    journal.close()
    show(report, json_, False)
    if plot is not None:
        draw(points, f"{settings['target']}, drafter {settings['drafter']}, temperature {temperature:g}", plot)


def digest(prompts: list[Prompt]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


@contextmanager
def open_journal(path: str, engine: "Engine", settings: dict[str, Any]) -> "Iterator[Journal]":
    """Of what was measured with these settings, models, machine and versions; says on stderr what becomes of it."""
    from foretoken.drafters import fingerprint_of
    from foretoken.models.identity import fingerprint, host, versions
    from foretoken.tune.journal import Journal

    models = [fingerprint(engine.target.lm), fingerprint_of(engine.drafter)]
    key = {**settings, "models": models, "host": host(engine.target.lm), "versions": versions()}
    journal = Journal(path, key)
    if journal.replaces:
        print(f"{journal.path} is of other settings, models or versions: it is replaced", file=sys.stderr)
    if len(journal):
        print(f"going on after {len(journal)} measurements in {journal.path}", file=sys.stderr)
    try:
        yield journal
    except KeyboardInterrupt:
        print("\nforetoken: interrupted; the same command goes on from here.", file=sys.stderr)
        raise


def load_engine(
    target: str | None, drafter: str | None, vocab: str | None, expansion: str | None, seed: int,
    device: str | None, dtype: str | None, compile: str, cost_ratio: float | None = None,
) -> "Engine":  # fmt: skip
    """expansion: of the target; cost_ratio: of the drafter, by parameters."""
    from foretoken.bench.pair import expanded, with_cost_ratio
    from foretoken.build import load
    from foretoken.models.named import size_named

    options.quiet()
    size = None if expansion is None else size_named(expansion)
    target, drafter = options.resolve_models(target, drafter)
    engine = load(target, drafter=drafter, vocab=vocab, device=device, dtype=dtype, compile=compile)
    options.spare_threads(size or engine.target.lm.model.num_parameters())
    if expansion is not None:
        engine = expanded(engine, target, expansion, seed, compile)
    return engine if cost_ratio is None else with_cost_ratio(engine, drafter, cost_ratio, seed, compile)
