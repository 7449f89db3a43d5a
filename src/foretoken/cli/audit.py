"""`foretoken audit`: is the output distribution really the target's own?"""

import json
import sys
from typing import Annotated

import typer

from foretoken.cli import options
from foretoken.core.limits import check_counts, check_sampling


def audit(
    target: options.Target = None,
    drafter: options.Drafter = None,
    tree: options.Tree = "kary:2x3",
    verifier: options.Verifier = None,
    law: options.Law = None,
    vocab: options.Vocab = None,
    draft_probability: options.DraftProbability = None,
    temperature: Annotated[float, typer.Option(help="Temperature of the goodness-of-fit test; above 0.")] = 1.0,
    samples: Annotated[int, typer.Option(help="Generations for the goodness-of-fit test.")] = 4000,
    seed: Annotated[int, typer.Option(help="Seed of the whole audit.")] = 0,
    exact_only: Annotated[
        bool, typer.Option("--exact-only", help="Only the exact enumerations; loads no model.")
    ] = False,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    compile: options.Compile = "auto",
) -> None:
    """Prove losslessness: exact enumeration of every rule, then tests on the given models. Exit code 1 on failure."""
    check_sampling(temperature=temperature)
    check_counts(samples=samples)
    engine = None
    if not exact_only:
        engine = options.load_engine(
            *(target, drafter, tree, verifier, law, device, dtype),
            vocab=vocab,
            draft_probability=draft_probability,
            compile=compile,
        )
    from foretoken.audit import run

    def progress(line: str) -> None:
        print(line, file=sys.stderr)

    report = run(engine, temperature=temperature, samples=samples, seed=seed, progress=progress)
    print(json.dumps(report.json()) if json_ else report.text())
    if not report.passed:
        raise typer.Exit(1)
