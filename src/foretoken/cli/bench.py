"""`foretoken bench`: how fast, against plain decoding and against transformers' own generate."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import acceptance, options
from foretoken.cli.measuring import WorkloadFile, chosen_prompts, encoded, show
from foretoken.core.limits import check_counts, check_seed, check_temperatures
from foretoken.trees.grammar import read_tree

if TYPE_CHECKING:
    from foretoken.measure.comparison import Measurement


app = typer.Typer(cls=options.DefaultCommand, help="Measure speed.")
DEFAULT_TREES = ["chain:5", "kary:2x2"]
DEFAULT_OUT = "foretoken-bench.jsonl"


@app.command("decoding")
def bench(
    target: options.Target = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help='Model folder or hub id with the same vocabulary, "ngram" (prompt lookup), or "none". '
            "Default: the demo drafter for the demo target, else ngram."
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(help=f"Token tree; may be repeated. Default: {' and '.join(DEFAULT_TREES)}."),
    ] = None,
    verifier: options.Verifier = None,
    profile: options.Profile = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Temperature; may be repeated. Default: 0 and 1.")
    ] = None,
    workload: WorkloadFile = None,
    prompts: Annotated[int, typer.Option(help="Prompts of the workload that are continued.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of every run; end-of-text does not stop one.")] = 96,
    rounds: Annotated[int, typer.Option(help="Times that every method continues every prompt.")] = 3,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Prompts decoded side by side; may be repeated, e.g. 1 and 8. Default: 1."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first round; round i uses seed + i.")] = 0,
    out: Annotated[str, typer.Option(help="File for the single runs, JSONL; replaced if it exists.")] = DEFAULT_OUT,
    plot: Annotated[str | None, typer.Option(help="Draw the table to this file (needs matplotlib).")] = None,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    compile: options.Compile = "auto",
) -> None:
    """Compare our decoding with transformers' generate, interleaved in one process.

    Ours: plain, and every tree. Theirs: plain, and assisted by the same drafter. The table goes to stdout.
    """
    temperatures = tuple(dict.fromkeys(temperature or (0.0, 1.0)))
    check_temperatures(temperatures)
    check_counts(max_new_tokens=max_new_tokens, rounds=rounds)
    for size in batch or ():
        check_counts(batch=size)
    check_seed(seed, rounds)
    texts = chosen_prompts(workload, prompts)
    options.check_outputs(out, plot)
    options.check_models(target, drafter, profile, verifier=verifier, dtype=dtype, compile=compile)
    for name in tree or ():
        read_tree(name)
    from foretoken.build import check_profile
    from foretoken.measure.comparison import bars, compare, report, summarise
    from foretoken.measure.harness import until_interrupted
    from foretoken.measure.machine import machine
    from foretoken.measure.pair import load_pair, methods
    from foretoken.measure.plot import plot as draw
    from foretoken.measure.results import write_lines
    from foretoken.profile import read_profile
    from foretoken.recipe import KINDS, PLAIN

    options.quiet()
    tuned = None if profile is None else read_profile(profile)
    if tuned is not None:
        options.spare_threads_as(tuned)
    target, drafter = options.resolve_models(target, drafter)
    vocab, coins = None if tuned is None else tuned.vocab, None
    pair = load_pair(target, drafter, verifier=verifier, vocab=vocab, device=device, dtype=dtype, compile=compile)
    if tuned is not None and profile is not None:
        check_profile(tuned, profile, pair.engine.target.lm, pair.engine.fingerprint)
        if tree is None and verifier is None and tuned.tree != PLAIN:
            tree, verifier, coins = [tuned.tree], tuned.verifier, tuned.draft_probability
    if profile is None:
        options.spare_threads(pair.num_params)
    usual = DEFAULT_TREES[:1] if KINDS[pair.engine.kind].own_draws else DEFAULT_TREES
    trees, batches = list(dict.fromkeys(tree or usual)), list(dict.fromkeys(batch or [1]))
    compared = methods(pair, trees, verifier, batches, coins)
    ids = encoded(pair.engine, texts, max_new_tokens)
    lm = pair.engine.target.lm
    header = {
        **machine(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "label": pair.label,
        "num_params": pair.num_params,
        "target": target,
        "drafter": drafter,
        "execution": lm.execution,
    }
    done: list[Measurement] = []
    runs = compare(compared, ids, temperatures, max_new_tokens, rounds, seed, options.progress)
    interrupted = until_interrupted(runs, done)
    write_lines(out, (each.record() for each in done), header)
    options.progress("")
    print(f"{len(done)} runs written to {out}", file=sys.stderr)
    rows = summarise(done)
    if plot is not None:
        draw(bars(rows), f"{target}, {pair.label}", plot)
    counts = {"max_new_tokens": max_new_tokens, "num_prompts": len(ids), "rounds": rounds, "seed": seed}
    show(report(header | counts, rows, interrupted), json_, False)


app.command("acceptance")(acceptance.acceptance)
