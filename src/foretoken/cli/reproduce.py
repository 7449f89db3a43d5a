"""`foretoken reproduce NAME`: a paper's figure beside ours."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import options
from foretoken.cli import rules as rules_command
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_seed
from foretoken.reproduce import ARTEFACTS, TITLES

if TYPE_CHECKING:
    from foretoken.compare.rows import ScoredText
    from foretoken.engine import Engine
    from foretoken.heads.lm import HeadLM

DEMO_VOCABULARIES = ("target", "drafter-1k", "drafter-bytes")


def reproduce(
    name: Annotated[str | None, typer.Argument(help="What to reproduce; --list shows the names.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the names and leave.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer pairs, positions and seconds: a first look.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    cell_seconds: Annotated[
        float | None, typer.Option(help="Time limit of one cell in tables of times. Default: 15, with --quick 2.")
    ] = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    text: rules_command.Text = None,
    positions: Annotated[
        int | None, typer.Option(help="Places in the text to measure at. Default: 240, with --quick 24.")
    ] = None,
    markdown: rules_command.Markdown = False,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Print figures of the papers beside ours. Where a paper's figure does not follow from its text, the notes say so.

    Figures on models are of the demo pair unless another is named. Ctrl-C prints what was measured.
    """
    if list_:
        for known, what in TITLES.items():
            print(f"{known:32}{what}")
        return
    if name is None or name not in TITLES:
        what = "No name was given" if name is None else f"Nothing is known as {name}"
        raise ForetokenError(f"{what}: choose one of {', '.join(TITLES)}.")
    if cell_seconds is not None and not 0 < cell_seconds < float("inf"):
        raise ForetokenError(f"cell-seconds is {cell_seconds}: it must be a finite number > 0.")
    num_positions = positions if positions is not None else (24 if quick else 240)
    check_counts(positions=num_positions)
    check_seed(seed)
    texts = rules_command.check_score(target, drafter, text, dtype)
    import torch

    from foretoken.bench.machine import machine
    from foretoken.compare.table import Report
    from foretoken.heads.lm import ready
    from foretoken.heads.load import load_head
    from foretoken.models.parts import parts
    from foretoken.models.text import encode
    from foretoken.reproduce.run import Run

    models = rules_command.names(target, drafter)
    header = {**machine(torch.device("cpu")), "seed": seed, "quick": quick, **models, "positions": num_positions}
    report = Report(f"{name}: {TITLES[name]}", header)

    @cache
    def scored() -> "ScoredText":
        return rules_command.score(target, drafter, texts, num_positions, device, dtype)

    @cache
    def pair() -> "tuple[Engine, list[list[int]]]":
        engine = options.load_engine(target, drafter, "chain:1", None, None, device, dtype)
        assert engine.tokenizer is not None, "a target named by folder has a tokenizer"
        ids = [encode(engine.tokenizer, p["prompt"]) for p in options.heldout_prompts()]
        return replace(engine, tokenizer=None, eos_ids=frozenset()), ids

    def head() -> "HeadLM | None":
        if target is not None:
            return None
        folder = str(options.demo_folder() / "heads" / "eagle")
        return ready(load_head(folder, parts(pair()[0].target.lm)), "eagle")

    limit_s = cell_seconds if cell_seconds is not None else (2.0 if quick else 15.0)
    try:
        ARTEFACTS[name](
            Run(report, seed, quick, limit_s, scored, options.progress, _vocabularies(target, drafter), pair, head)
        )
    except KeyboardInterrupt:
        report.interrupted = True
    rules_command.show(report, json_, markdown)


def _vocabularies(target: str | None, drafter: str | None) -> dict[str, str]:
    """Name -> folder: the models named, else the demo models with tokenizers of their own."""
    named = [name for name in (target, drafter) if name is not None]
    folders = [Path(name) for name in named] or [options.demo_folder() / name for name in DEMO_VOCABULARIES]
    return {folder.name: str(folder) for folder in folders}
