"""`foretoken tune`: measure this machine, this pair and this workload, and write down what pays."""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.cli import options
from foretoken.cli.command import command
from foretoken.cli.measuring import WorkOptions, check_forgets, encoded, names, show
from foretoken.cli.prompts import Prompt
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_measured, check_sampling
from foretoken.recipe import NO_DRAFTER, PLAIN, check_alone

if TYPE_CHECKING:
    from foretoken.engine import Engine
    from foretoken.measure.results import Journal

DEFAULT_OUT = "foretoken-profile.json"


@dataclass(frozen=True)
class TunedWork(WorkOptions):
    """What a profile is measured on."""

    prompts: int = 6
    rounds: int = 1


@command
def tune(
    *,
    models: options.PackedModels,
    work: TunedWork,
    temperature: float = 0.8,
    best: int = 3,
    out: str = DEFAULT_OUT,
    json_: bool = False,
) -> None:
    """Measure many trees beside plain decoding, and write the best to a profile.

    After each prompt the slower half of them is left out. Measured are chains, with and without a confidence at which
    they end, trees that branch, and randomised drafting; for a drafter with another vocabulary every method,
    unless --vocab names one.

    The profile is for --profile of generate and bench, and for foretoken.load(profile=...). Takes minutes; interrupted,
    the same command goes on after the last prompt that was finished. docs/choosing.md says how to read the table.

    temperature: Temperature to tune for.
    best: The least number of trees that are kept when the slower half is left out.
    out: Profile file, replaced if it exists; OUT.part holds what is measured so far.
    """
    options.check_own(out, ("format", "configurations"), "profile")
    check_counts(best=best)
    check_sampling(temperature=temperature)
    texts = work.texts()
    check_measured(work.max_new_tokens)
    if models.drafter == NO_DRAFTER:
        raise ForetokenError("There is no drafter to tune: name one with --drafter.")
    check_alone(models.drafter)
    check_forgets(models.drafter)
    options.check_models(**vars(models))
    from foretoken.measure.clocks import WALL, clock_named, seconds
    from foretoken.measure.continuations import Workload
    from foretoken.measure.machine import machine
    from foretoken.measure.report import Report
    from foretoken.recipe import AUTO, VOCABS
    from foretoken.tune.candidates import candidates
    from foretoken.tune.run import halved, profile_of

    engine = options.load_engine(**vars(models))
    device = engine.target.lm.device
    vocabs = [] if engine.kind not in VOCABS else list(VOCABS) if models.vocab in (None, AUTO) else [str(models.vocab)]
    tried, ids = candidates(engine, vocabs, temperature), encoded(engine, texts, work.max_new_tokens)
    with_coins = any(recipe.draft_probability is not None for recipe in tried)  # whose drafter has its own thread
    clock = WALL if with_coins else clock_named(device)
    chosen = Workload(ids, work.max_new_tokens, temperature, seconds(clock, device), work.seed)
    settings = {
        **names(models.target, models.drafter),
        "vocab": models.vocab,
        **vars(work),
        "workload": digest(texts),
        "temperature": temperature,
        "clock": clock,
        "compile": models.compile,
        "quantise": models.quantise,
        "quantise_drafter": models.quantise_drafter,
    }
    report = Report("foretoken tune", {**machine(device), **settings})
    with open_journal(f"{out}.part", engine, settings) as journal:
        measured = halved(engine, chosen, tried, best, work.rounds, journal, options.progress)
    profile = profile_of(engine, measured, report)
    profile.write(out)
    journal.close()
    show(report, json_, False)
    fastest = "plain decoding" if profile.tree == PLAIN else f"{profile.tree} with {profile.verifier}"
    print(f"profile written to {out}, for --profile {out}: {fastest} was fastest", file=sys.stderr)


def digest(prompts: list[Prompt]) -> str:
    """Return 16 hex digits that identify `prompts`."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


@contextmanager
def open_journal(path: str, engine: "Engine", settings: dict[str, Any]) -> "Iterator[Journal]":
    """Open the journal in the file `path` of what was measured so far, for as long as the context lasts.

    Measurements of other settings, models, machines or versions are not used. What becomes of the file is printed on
    stderr.

    engine: whose models are measured.
    settings: all else that the measurements depend on, as JSON values by name.
    """
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
        where = f"after what {journal.path} holds" if len(journal) else "from the beginning: nothing was finished"
        print(f"\nforetoken: interrupted; the same command goes on {where}.", file=sys.stderr)
        raise
