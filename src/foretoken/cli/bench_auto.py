"""`foretoken bench auto`: does the run-time controller pay."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import options
from foretoken.cli.rules import show
from foretoken.cli.tune import Expand, NewTokens, Prompts, load_engine
from foretoken.cli.workload import WorkloadFile, chosen_prompts, encoded
from foretoken.core.limits import check_counts, check_seed, check_temperatures
from foretoken.trees.grammar import read_tree

if TYPE_CHECKING:
    from foretoken.bench.interleaved import Runs
    from foretoken.compare.table import Table
    from foretoken.engine import Engine

TREES = ["chain:1", "chain:2", "chain:3", "chain:5", "chain:8"]
LOOKUP_TREES = ["chain:3", "chain:8"]
COLUMNS = ["method", "tokens/s", "x plain", "x best fixed", "tokens a step"]


def auto(
    target: options.Target = None,
    drafter: options.Drafter = None,
    tree: Annotated[
        list[str] | None, typer.Option(help=f"Fixed tree; may be repeated. Default: {', '.join(TREES)}.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated. Default: 0 and 0.8.")] = None,
    workload: WorkloadFile = None,
    prompts: Prompts = 6,
    max_new_tokens: NewTokens = 128,
    rounds: Annotated[int, typer.Option(help="Times that every method continues every prompt.")] = 2,
    expand: Expand = None,
    seed: Annotated[int, typer.Option(help="Seed of whatever is sampled.")] = 0,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Method auto beside plain decoding and fixed trees, interleaved: with the drafter, with one of random weights, and
    by prompt lookup on a text that is new at first and then repeats itself.

    The bars: with the drafter 0.95 of the best fixed method, with the useless one 0.95 of plain decoding.
    """
    temperatures = list(dict.fromkeys([0.0, 0.8] if temperature is None else temperature))
    check_temperatures(temperatures)
    check_counts(rounds=rounds, max_new_tokens=max_new_tokens)
    check_seed(seed)
    texts = chosen_prompts(workload, prompts)
    options.check_models(target, drafter, expand, dtype=dtype)
    for name in tree or ():
        read_tree(name)
    from foretoken.bench.auto import by_lookup, changing, halves, methods, useless
    from foretoken.bench.execution import clock_named, seconds
    from foretoken.bench.interleaved import Workload, interleaved
    from foretoken.bench.machine import machine
    from foretoken.compare.table import Report
    from foretoken.models.text import encode

    engine = load_engine(target, drafter, None, expand, seed, device, dtype, "auto")
    of_device = engine.target.lm.device
    clock = clock_named(of_device)
    now = seconds(clock, of_device)
    ids = encoded(engine, texts, max_new_tokens)
    header = {
        **machine(of_device), "target": target or "demo", "drafter": drafter or "demo", "expand": expand,
        "prompts": prompts, "max_new_tokens": max_new_tokens, "rounds": rounds, "seed": seed, "clock": clock,
    }  # fmt: skip
    report = Report("foretoken bench auto", header)
    trees = tree or TREES

    def run(title: str, engines: "Mapping[str, Engine]", workload: Workload) -> "tuple[Table, Mapping[str, Runs]]":
        table = report.table(title, COLUMNS)
        runs = interleaved(engines, workload, rounds, lambda line: options.progress(f"{title}: {line}"))
        _fill(table, runs)
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
            table.notes.append(f"{name}: {before:.2f} tokens a step in the new half, {after:.2f} in the repeated one.")
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, False)


def _fill(table: "Table", runs: "Mapping[str, Runs]") -> None:
    from foretoken.bench.auto import rows

    for row in rows(runs):
        table.add(row.name, row.tokens_per_s, row.vs_plain, row.vs_best, row.tokens_per_step)
