"""`foretoken bench trees` and `foretoken bench acceptance`: shapes and rules compared at equal numbers of nodes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.choices import check_verifier
from foretoken.cli import execution, options
from foretoken.cli import rules as rules_command
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_folder
from foretoken.core.limits import MOST_DRAWS, check_counts, check_temperatures
from foretoken.trees.grammar import check_size

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
    drafter: options.SameVocabulary = None,
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

    Writes one file RULE-TEMPERATURE.json a rule into a folder; files already there are kept, and refused if they were
    measured with other settings. At temperature 0 every rule is exact-match.
    """
    _check(target, drafter, prompts, max_new_tokens, children, seed, dtype, temperature)
    for name in verifier or ():
        check_verifier(name)
    check_folder(Path(out))
    from foretoken.compare.table import Report
    from foretoken.compare.tree_methods import MATCH, RULES
    from foretoken.names import verifier_named

    loaded = _loaded(target, drafter, prompts, max_new_tokens, children, seed, device, dtype)
    vectors = loaded.vectors(max_new_tokens, out, "--out")
    report = Report("Acceptance of each child", loaded.header(loaded.settings))
    table = report.table(
        "P(child b is the accepted one)", ["T", "rule", "law", *(f"b={b}" for b in range(1, children + 1)), "file"]
    )
    try:
        for t in _temperatures(temperature):
            for name in dict.fromkeys(MATCH if t == 0 else rule for rule in verifier or RULES):
                found = vectors.of(verifier_named(name), t)
                table.add(f"{t:g}", name, found.law, *found.acceptance, str(vectors.path(found.verifier, t)))
                table.notes = [f"Standard errors up to {max(found.standard_error):.3f}; {found.positions} positions."]
    except KeyboardInterrupt:
        report.interrupted = True
    rules_command.show(report, json_, markdown)


def trees(
    target: options.Target = None,
    drafter: options.SameVocabulary = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="SHAPE+RULE, e.g. budget+transport; may be repeated. Shapes: chain, kary (binary), sequoia, budget, "
            "dynamic, opt-tree (those two with exact-match). Default: kary, sequoia and budget with five rules each, "
            "dynamic+exact-match, chain+block, and block rules."
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
    Tokens a forward do not depend on time, so a busy machine does no harm without --speed. With it methods take turns
    at every prompt, and a round that was stopped begins anew.
    """
    sizes = execution.numbers(nodes, "nodes")
    check_counts(rounds=rounds, batch=batch, nodes=min(sizes))
    check_size(max(sizes))
    _check(target, drafter, prompts, max_new_tokens, children, seed, dtype, temperature, expand)
    options.check_outputs(out, plot)
    check_folder(Path(acceptance))
    from foretoken.bench.pair import expanded
    from foretoken.compare.table import Report
    from foretoken.compare.tree_methods import DEFAULT, at_zero
    from foretoken.compare.tree_methods import method as named
    from foretoken.compare.tree_report import plot as draw
    from foretoken.compare.tree_report import samples, tables
    from foretoken.compare.tree_runs import Cell, Course, RunBook, measure
    from foretoken.draft.lm import LMDrafter

    methods = [named(name) for name in dict.fromkeys(method or DEFAULT)]
    loaded = _loaded(target, drafter, prompts, max_new_tokens, children, seed, device, dtype, expand)
    inner = loaded.engine.drafter
    if not isinstance(inner, LMDrafter):
        raise ForetokenError(f"Drafter {inner.name} is no language model: name a model folder, --drafter.")
    vectors = loaded.vectors(POSITIONS, acceptance, "--acceptance")
    engine = loaded.engine if expand is None else expanded(loaded.engine, loaded.source, expand)
    settings = {**loaded.settings, "batch": batch, "expand": expand}
    header = loaded.header(settings)
    book = RunBook(out, settings, {"commit": header["commit"]})
    cells = []
    report = Report("Token trees compared", header)
    try:
        for t in _temperatures(temperature):
            for n in sizes:
                for found in at_zero(methods) if t == 0 else methods:
                    rule = found.verifier
                    tree = found.at(n, inner, lambda rule=rule, t=t: vectors.of(rule, t).acceptance)
                    if tree is not None:
                        cells.append(Cell(t, n, found.name, tree, rule))
        course = Course(engine.target, loaded.texts, max_new_tokens, batch, rounds, seed)
        measure(course, cells, book, options.progress, speed)
    except KeyboardInterrupt:
        report.interrupted = True
    found = samples(list(book.runs.values()))
    tables(report, found, BASE, speed)
    if plot is not None and found:
        draw(found, "Tokens a target forward against drafted nodes", plot)
    rules_command.show(report, json_, markdown)


def _temperatures(asked: list[float] | None) -> list[float]:
    return list(dict.fromkeys(TEMPERATURES if asked is None else asked))


def _check(
    target: str | None,
    drafter: str | None,
    prompts: int,
    max_new_tokens: int,
    children: int,
    seed: int,
    dtype: str | None,
    temperatures: list[float] | None,
    expand: str | None = None,
) -> None:
    """Refuse what cannot be before torch is imported."""
    check_counts(max_new_tokens=max_new_tokens, children=children)
    if children > MOST_DRAWS:
        raise ForetokenError(f"children is {children}: it must be at most {MOST_DRAWS}.")
    if seed < 0:
        raise ForetokenError(f"seed is {seed}: it must be 0 or more.")
    check_temperatures(temperatures)
    options.heldout_prompts(prompts)
    options.check_models(target, drafter, expand, dtype=dtype)


@dataclass(frozen=True)
class Loaded:
    """The pair as it is, the prompts' ids, and the settings without which figures cannot be compared. source: of the
    target."""

    engine: "Engine"
    source: str
    texts: list[list[int]]
    settings: dict[str, Any]

    def vectors(self, num_tokens: int, folder: str, option: str) -> "Vectors":
        from foretoken.compare.child_acceptance import Vectors

        settings = {**self.settings, "max_new_tokens": num_tokens}
        children, seed = settings["children"], settings["seed"]
        return Vectors(
            self.engine, self.texts, num_tokens, children, seed, Path(folder), settings, options.progress, option
        )

    def header(self, settings: dict[str, Any]) -> dict[str, Any]:
        from foretoken.bench.machine import machine

        return {**machine(self.engine.target.lm.device), **settings}


def _loaded(
    target: str | None,
    drafter: str | None,
    prompts: int,
    max_new_tokens: int,
    children: int,
    seed: int,
    device: str | None,
    dtype: str | None,
    expand: str | None = None,
) -> Loaded:
    from foretoken.bench.pair import load_pair
    from foretoken.cli.workload import chosen_prompts, encoded
    from foretoken.drafters import fingerprint_of
    from foretoken.models.identity import device_name, fingerprint

    options.quiet()
    source, inner = options.resolve_models(target, drafter)
    pair = load_pair(source, inner, verifier="rrsw", device=device, dtype=dtype)
    if expand is None:  # else the target will be no small one
        options.spare_threads(pair.num_params)
    texts = encoded(pair.engine, chosen_prompts(None, prompts), max_new_tokens)
    engine = replace(pair.engine, tokenizer=None)
    lm = engine.target.lm
    settings = {
        **rules_command.names(target, drafter),
        "weights": [fingerprint(lm), fingerprint_of(engine.drafter)],
        "device": device_name(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "children": children,
        "seed": seed,
    }
    return Loaded(engine, source, texts, settings)
