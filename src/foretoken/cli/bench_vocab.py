"""`foretoken bench vocab`: every way to draft with another vocabulary."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.choices import VOCABS
from foretoken.cli import options
from foretoken.cli import rules as rules_command
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_seed, check_temperatures
from foretoken.trees.grammar import read_tree


def bench_vocab(
    target: options.Target = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Folder of a drafter with another vocabulary; may be repeated. Default: the demo ones."),
    ] = None,
    same: Annotated[
        str | None,
        typer.Option(help="Folder of a drafter with the target's vocabulary, to compare with. Default: the demo one."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="union, tli, slem or slrs; may be repeated. Default: all.")
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(help="METHOD=TREE, e.g. tli=chain:2, for another tree than the usual one; may be repeated."),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Temperature; may be repeated. Default: 0 and 1.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts to continue.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of every run; end-of-text does not stop one.")] = 64,
    rounds: Annotated[int, typer.Option(help="Times that every way continues every prompt.")] = 2,
    samples: Annotated[
        int, typer.Option(help="Generations for the test of each way's law above temperature 0; 0: none.")
    ] = 300,
    expand: Annotated[
        str | None,
        typer.Option(help="Give the target the cost of a model of 100m, 300m or 1b parameters, at the same function."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    markdown: rules_command.Markdown = False,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Compare union, TLI, SLEM and SLRS, a drafter with the same vocabulary, and transformers' two-vocabulary mode.

    Interleaved in one process, each with a measured losslessness column. The table goes to stdout.
    """
    methods = list(dict.fromkeys(method or VOCABS))
    if unknown := [name for name in methods if name not in VOCABS]:
        raise ForetokenError(f"Unknown method {unknown[0]}: choose among {', '.join(VOCABS)}.")
    trees: dict[str, list[str]] = {}
    for one in tree or ():
        name, equals, spec = one.partition("=")
        if not equals or name not in methods:
            raise ForetokenError(f"--tree {one} must be METHOD=TREE, with a method of {', '.join(methods)}.")
        read_tree(spec)
        trees.setdefault(name, []).append(spec)
    if samples < 0 or rounds < 1 or max_new_tokens < 2:
        raise ForetokenError("samples must be at least 0, rounds at least 1 and max-new-tokens at least 2.")
    check_temperatures(temperature)
    check_seed(seed, rounds)
    options.heldout_prompts(prompts)
    if target is None:
        demo = options.demo_folder()
        drafters = drafter or [str(demo / "drafter-1k"), str(demo / "drafter-bytes")]
        target, same = str(demo / "target"), same or str(demo / "drafter")
    elif drafter is None:
        raise ForetokenError("Name the drafter with --drafter: only the demo target has ones of its own.")
    else:
        drafters = drafter
    for name in drafters:
        options.check_models(target, name, expand, dtype=dtype)
    from foretoken.bench.machine import machine
    from foretoken.bench.pair import load_pair
    from foretoken.cli.workload import chosen_prompts, encoded
    from foretoken.compare.table import Report
    from foretoken.compare.vocab_bench import Settings, bench
    from foretoken.compare.vocab_ways import ways
    from foretoken.models.load import load_model
    from foretoken.models.target import LMTarget

    options.quiet()
    pair = load_pair(target, same, device=device, dtype=dtype, expansion=expand, seed=seed)
    options.spare_threads(pair.num_params)
    lm, tokenizer = pair.engine.target.lm, pair.engine.tokenizer
    assert tokenizer is not None, "a target named by folder has a tokenizer"
    chosen = encoded(pair.engine, chosen_prompts(None, prompts), max_new_tokens)
    settings = Settings(tuple(temperature or (0.0, 1.0)), chosen, max_new_tokens, rounds, samples, seed)
    small = pair.engine.target if expand is None else LMTarget(load_model(target, lm.device, lm.dtype))
    found = ways(pair.engine, pair.target, tokenizer, drafters, methods, trees)
    header = {
        **machine(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "target": Path(target).name,
        "label": pair.label,
        "num_params": pair.num_params,
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "samples": samples,
        "seed": seed,
    }
    report = Report("Drafters with another vocabulary", header)
    try:
        bench(report, found, small, settings, options.progress)
    except KeyboardInterrupt:
        report.interrupted = True
    rules_command.show(report, json_, markdown)
