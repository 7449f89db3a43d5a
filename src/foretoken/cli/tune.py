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
from foretoken.cli.measuring import NewTokens, Prompts, WorkloadFile, chosen_prompts, encoded, show
from foretoken.core.limits import check_counts, check_sampling, check_seed

if TYPE_CHECKING:
    from foretoken.engine import Engine
    from foretoken.measure.results import Journal


DEFAULT_OUT = "foretoken-profile.json"

Rounds = Annotated[int, typer.Option(help="Times that every configuration continues every prompt.")]


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
    options.check_models(target, drafter, vocab=vocab, dtype=dtype, compile=compile)
    from foretoken.measure.clocks import clock_named, seconds
    from foretoken.measure.continuations import Workload
    from foretoken.measure.machine import machine
    from foretoken.measure.report import Report
    from foretoken.recipe import AUTO, VOCABS
    from foretoken.tune.run import tune as measure

    engine = options.load_engine(target, drafter, None, None, None, device, dtype, vocab=vocab, compile=compile)
    of_device = engine.target.lm.device
    clock = clock_named(of_device)
    chosen = Workload(
        encoded(engine, texts, max_new_tokens), max_new_tokens, temperature, seconds(clock, of_device), seed
    )
    settings = {
        "target": target or "demo",
        "drafter": drafter or ("ngram" if target else "demo"),
        "vocab": vocab,
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
    vocabs = [] if engine.kind not in VOCABS else list(VOCABS) if vocab == AUTO else [str(vocab)]
    with open_journal(f"{out}.part", engine, settings) as journal:
        profile = measure(engine, chosen, best, rounds, vocabs, journal, report, options.progress)
    profile.write(out)
    journal.close()
    show(report, json_, False)
    print(f"profile written to {out}", file=sys.stderr)


def digest(prompts: list[Prompt]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


@contextmanager
def open_journal(path: str, engine: "Engine", settings: dict[str, Any]) -> "Iterator[Journal]":
    """Of what was measured with these settings, models, machine and versions; says on stderr what becomes of it."""
    from foretoken.measure.results import Journal
    from foretoken.models.identity import fingerprint, host, versions

    models = [fingerprint(engine.target.lm), engine.fingerprint]
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
