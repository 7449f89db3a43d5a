"""`foretoken bench trees` and `foretoken bench acceptance`: shapes and rules compared at equal numbers of nodes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import execution, options
from foretoken.cli import rules as rules_command
from foretoken.core.errors import ForetokenError

if TYPE_CHECKING:
    from foretoken.compare.child_acceptance import Vectors
    from foretoken.engine import Engine

ACCEPTANCE, OUT = "foretoken-acceptance", "foretoken-trees.jsonl"
NODES = "4,8,16,32,64"
TEMPERATURES = (0.0, 0.3, 0.6, 1.0)
BASE = "sequoia+rrsw"
POSITIONS = 32  # after each prompt, at which acceptance is measured
Temperatures = Annotated[
    list[float] | None, typer.Option("--temperature", help="May be repeated. Default: 0, 0.3, 0.6 and 1.")
]
Children = Annotated[int, typer.Option(help="Children of a node, at most.")]
Prompts = Annotated[int, typer.Option(help="Held-out prompts to continue.")]
Folder = Annotated[str, typer.Option(help="Folder of the acceptance vectors; those it lacks are measured into it.")]


def acceptance(
    target: options.Target = None,
    drafter: options.Drafter = None,
    verifier: Annotated[
        list[str] | None, typer.Option(help="Rule; may be repeated. Default: rrs, rrsw, hub, kseq and transport.")
    ] = None,
    temperature: Temperatures = None,
    children: Children = 4,
    prompts: Prompts = 31,
    max_new_tokens: Annotated[
        int, typer.Option(help="Positions after each prompt: tokens of the target's own.")
    ] = POSITIONS,
    seed: Annotated[int, typer.Option(help="Seed of the continuations and of what is drafted.")] = 0,
    out: Folder = ACCEPTANCE,
    markdown: rules_command.Markdown = False,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Measure how often the first, second, .. child of a node is the accepted one, for --tree sequoia:N@FILE.

    Writes one file RULE-TEMPERATURE.json a rule into a folder; files already there are kept if they were measured with
    the same settings. At temperature 0 every rule is exact-match.
    """
    from foretoken.compare.table import Report
    from foretoken.compare.tree_methods import MATCH, RULES
    from foretoken.names import verifier_named

    engine, texts, settings = _loaded(target, drafter, prompts, max_new_tokens, seed, device, dtype)
    vectors = _vectors(engine, texts, max_new_tokens, children, seed, out, settings)
    report = Report("Acceptance of each child", _header(engine, settings))
    table = report.table(
        "P(child b is the accepted one)", ["T", "rule", "law", *(f"b={b}" for b in range(1, children + 1)), "file"]
    )
    try:
        for t in _temperatures(temperature):
            for name in dict.fromkeys(MATCH if t == 0 else rule for rule in verifier or RULES):
                found = vectors.of(verifier_named(name), t)
                table.add(f"{t:g}", name, found.law, *found.acceptance, str(Path(out) / f"{found.verifier}-{t:g}.json"))
                table.notes = [f"Standard errors up to {max(found.standard_error):.3f}; {found.positions} positions."]
    except KeyboardInterrupt:
        report.interrupted = True
    options.progress("")
    rules_command.show(report, json_, markdown)
    if report.interrupted:
        raise typer.Exit(130)


def trees(
    target: options.Target = None,
    drafter: options.Drafter = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="SHAPE+RULE, e.g. budget+transport; may be repeated. Shapes: chain, kary (binary), sequoia, budget, "
            "dynamic, opt-tree. Default: kary, sequoia and budget with five rules each, dynamic, chain+block, and "
            "block rules."
        ),
    ] = None,
    nodes: Annotated[str, typer.Option(help="Numbers of drafted nodes, with commas.")] = NODES,
    temperature: Temperatures = None,
    children: Children = 4,
    prompts: Prompts = 31,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of every run, at least.")] = 64,
    rounds: Annotated[int, typer.Option(help="Times that every method continues every prompt.")] = 1,
    batch: Annotated[int, typer.Option(help="Prompts decoded side by side; 1 for times that mean something.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt in the first round.")] = 0,
    acceptance: Folder = ACCEPTANCE,
    out: Annotated[
        str, typer.Option(help="File for the single runs, JSONL. It grows: the same command goes on where it stopped.")
    ] = OUT,
    speed: Annotated[bool, typer.Option("--speed", help="Also tokens/s, and the share of building trees.")] = False,
    expand: Annotated[
        str | None, typer.Option(help="Give the target the cost of 100m, 300m or 1b parameters, at the same function.")
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Draw the table to this file (needs matplotlib).")] = None,
    markdown: rules_command.Markdown = False,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Tokens a target forward by shape of the tree, verification rule, number of nodes and temperature.

    Interleaved in one process, all methods on the same prompts and seeds. The table is of all runs in the file.
    Tokens a forward do not depend on time, so a busy machine does no harm without --speed.
    """
    from foretoken.bench.plot import check_plot
    from foretoken.compare.table import Report
    from foretoken.compare.tree_methods import DEFAULT, at_zero
    from foretoken.compare.tree_methods import method as named
    from foretoken.compare.tree_report import plot as draw
    from foretoken.compare.tree_report import samples, tables
    from foretoken.compare.tree_runs import Cell, Course, RunBook, measure
    from foretoken.draft.lm import LMDrafter

    sizes = execution.numbers(nodes, "nodes")
    for name, value in (("rounds", rounds), ("batch", batch), ("nodes", min(sizes))):
        if value < 1:
            raise ForetokenError(f"{name} is {value}: it must be at least 1.")
    methods = [named(name) for name in dict.fromkeys(method or DEFAULT)]
    if plot is not None:
        check_plot(plot)
    engine, texts, settings = _loaded(target, drafter, prompts, max_new_tokens, seed, device, dtype, expand)
    if not isinstance(engine.drafter, LMDrafter):
        raise ForetokenError(f"Drafter {engine.drafter.name} is no language model: name a model folder, --drafter.")
    vectors = _vectors(engine, texts, POSITIONS, children, seed, acceptance, settings)
    book = RunBook(out, settings | {"batch": batch}, {"commit": _header(engine, {})["commit"]})
    cells = []
    report = Report("Token trees compared", _header(engine, settings | {"batch": batch}))
    try:
        for t in _temperatures(temperature):
            for n in sizes:
                for found in at_zero(methods) if t == 0 else methods:
                    rule = found.verifier
                    tree = found.at(n, engine.drafter, lambda rule=rule, t=t: vectors.of(rule, t).acceptance)
                    if tree is not None:
                        cells.append(Cell(t, n, found.name, tree, rule))
        measure(Course(engine.target, texts, max_new_tokens, batch, rounds, seed), cells, book, options.progress)
    except KeyboardInterrupt:
        report.interrupted = True
    options.progress("")
    found = samples(list(book.runs.values()))
    tables(report, found, BASE, speed)
    rules_command.show(report, json_, markdown)
    if plot is not None and found:
        draw(found, "Tokens a target forward against drafted nodes", plot)
    if report.interrupted:
        raise typer.Exit(130)


def _temperatures(asked: list[float] | None) -> list[float]:
    found = list(dict.fromkeys(TEMPERATURES if asked is None else asked))
    for temperature in found:
        if not 0 <= temperature < float("inf"):
            raise ForetokenError(f"temperature is {temperature}: it must be a finite number >= 0.")
    return found


def _loaded(
    target: str | None,
    drafter: str | None,
    prompts: int,
    max_new_tokens: int,
    seed: int,
    device: str | None,
    dtype: str | None,
    expand: str | None = None,
) -> "tuple[Engine, list[list[int]], dict[str, Any]]":
    """The pair, the prompts' ids, and the settings without which figures cannot be compared."""
    from dataclasses import replace

    from foretoken.bench.pair import load_pair
    from foretoken.cli.bench import chosen_prompts

    if max_new_tokens < 1:
        raise ForetokenError(f"max-new-tokens is {max_new_tokens}: it must be at least 1.")
    options.quiet()
    names = rules_command.names(target, drafter)
    pair = load_pair(
        *options.resolve_models(target, drafter), verifier="rrsw", device=device, dtype=dtype, expansion=expand
    )
    options.spare_threads(pair.num_params)
    texts = [prompt.ids for prompt in chosen_prompts(pair, prompts, max_new_tokens)]
    settings = {**names, "prompts": prompts, "max_new_tokens": max_new_tokens, "seed": seed}
    if expand is not None:
        settings["label"] = pair.label
    return replace(pair.engine, tokenizer=None), texts, settings


def _vectors(
    engine: "Engine", texts: list[list[int]], num_tokens: int, children: int, seed: int, folder: str, settings: Any
) -> "Vectors":
    from foretoken.compare.child_acceptance import Vectors

    kept = {**settings, "max_new_tokens": num_tokens, "children": children}
    kept.pop("label", None)  # an expanded target is the same function
    return Vectors(engine, texts, num_tokens, children, seed, Path(folder), kept, options.progress)


def _header(engine: "Engine", settings: dict[str, Any]) -> dict[str, Any]:
    from foretoken.bench.machine import machine

    lm = engine.target.lm
    return {**machine(lm.device), "dtype": str(lm.dtype).removeprefix("torch."), **settings}
