"""`python -m benchmarks trees`: shapes and rules compared at equal numbers of nodes."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.execution import numbers
from benchmarks.expand import Expand, check_expansion, expanded
from benchmarks.tree_methods import DEFAULT, at_zero
from benchmarks.tree_methods import method as named
from benchmarks.tree_report import panels, samples, tables
from benchmarks.tree_runs import Cell, Course, TreeRun, measure
from foretoken.cli import options
from foretoken.cli.acceptance import FOLDER, POSITIONS, VectorOptions
from foretoken.cli.command import command as from_function
from foretoken.cli.measuring import Markdown, show
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_folder
from foretoken.core.limits import check_counts
from foretoken.draft.lm import LMDrafter
from foretoken.measure.plot import plot as draw
from foretoken.measure.report import Report
from foretoken.measure.results import Book
from foretoken.trees.grammar import check_size

OUT = "foretoken-trees.jsonl"
NODES = "4,8,16,32,64"
BASE = "sequoia+rrsw"


@from_function
def command(
    *,
    pair: VectorOptions,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="SHAPE+RULE, e.g. budget+transport; may be repeated. Shapes: chain, kary (binary), paths (from the "
            "root, about as many as they are long), sequoia, budget, dynamic, opt-tree (those two with exact-match). "
            "Default: kary, sequoia and budget with five rules each, dynamic+exact-match, chain+block, and block rules."
        ),
    ] = None,
    nodes: Annotated[str, typer.Option(help="Numbers of drafted nodes, with commas.")] = NODES,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of every run, at least.")] = 64,
    rounds: Annotated[int, typer.Option(help="Times that every method continues every prompt.")] = 1,
    batch: Annotated[int, typer.Option(help="Prompts decoded side by side; 1 for times that mean something.")] = 8,
    acceptance: Annotated[
        str, typer.Option(help="Folder of the acceptance vectors; those it lacks are measured into it.")
    ] = FOLDER,
    out: Annotated[
        str, typer.Option(help="File for the single runs, JSONL. It grows: the same command goes on where it stopped.")
    ] = OUT,
    speed: Annotated[bool, typer.Option("--speed", help="Also tokens/s, and the share of building trees.")] = False,
    expand: Expand = None,
    plot: Annotated[str | None, typer.Option(help="Draw the table to this file (needs matplotlib).")] = None,
    markdown: Markdown = False,
    json_: options.Json = False,
) -> None:
    """Tokens a target forward by shape of the tree, verification rule, number of nodes and temperature.

    Interleaved in one process, all methods on the same prompts and seeds. The table is of all runs in the file.
    Tokens per forward do not depend on time, so a busy machine does no harm without --speed. With it methods take turns
    at every prompt, and a round that was stopped begins anew.
    """
    sizes = numbers(nodes, "nodes")
    check_counts(rounds=rounds, batch=batch, nodes=min(sizes))
    check_size(max(sizes))
    pair.check(max_new_tokens)
    check_expansion(expand)
    options.check_outputs(out, plot)
    check_folder(Path(acceptance))
    methods = [named(name) for name in dict.fromkeys(method or DEFAULT)]
    loaded = pair.load(max_new_tokens, small=expand is None)
    inner = loaded.engine.drafter
    if not isinstance(inner, LMDrafter):
        raise ForetokenError(f"Drafter {inner.name} is no language model: name a model folder, --drafter.")
    vectors = loaded.vectors(POSITIONS, acceptance, "--acceptance")
    engine = loaded.engine if expand is None else expanded(loaded.engine, loaded.source, expand)
    settings = {**loaded.settings, "batch": batch, "expand": expand}
    header = loaded.header(settings)
    book = Book(out, TreeRun, settings, {"commit": header["commit"]}, "--out", "runs of benchmarks trees")
    cells = []
    report = Report("Token trees compared", header)
    try:
        for t in pair.temperatures:
            for n in sizes:
                for found in at_zero(methods) if t == 0 else methods:
                    rule = found.verifier
                    tree = found.at(n, inner, lambda rule=rule, t=t: vectors.of(rule, t).acceptance)
                    if tree is not None:
                        cells.append(Cell(t, n, found.name, tree, rule))
        course = Course(engine.target, loaded.texts, max_new_tokens, batch, rounds, pair.seed)
        measure(course, cells, book, options.progress, speed)
    except KeyboardInterrupt:
        report.interrupted = True
    found = samples(book.found)
    tables(report, found, BASE, speed)
    if plot is not None and found:
        draw(panels(found), "Tokens per target forward against drafted nodes", plot)
    show(report, json_, markdown)
