"""`python -m benchmarks reproduce NAME`: a paper's figure beside ours."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from benchmarks.pairs import LanguageModel, Text, check_score, score
from benchmarks.papers.global_resolution_acceptance import figure1, temperature
from benchmarks.papers.global_resolution_steps import table4
from benchmarks.papers.global_resolution_times import table1, table2
from benchmarks.papers.gumiho_theorem import gumiho_theorem
from benchmarks.papers.randomised_drafting import randomised_drafting
from benchmarks.papers.run import Artefact, Run
from benchmarks.papers.slrs_table5 import slrs_table5
from benchmarks.papers.slrs_vocabularies import slrs_vocabularies
from benchmarks.papers.spechub_curves import figure1 as spechub_figure1
from benchmarks.papers.spechub_curves import figure6 as spechub_figure6
from benchmarks.papers.spechub_curves import figure7 as spechub_figure7
from benchmarks.papers.spechub_drafts import spechub_drafts
from benchmarks.papers.spechub_figures import spechub_figures
from benchmarks.papers.spechub_table4 import spechub_table4
from benchmarks.papers.spechub_trees import spechub_trees
from foretoken.cli import options
from foretoken.cli.measuring import names, show
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_seed
from foretoken.engine import Engine
from foretoken.heads.checkpoint import load_head
from foretoken.heads.lm import HeadLM, ready
from foretoken.measure.machine import machine
from foretoken.measure.report import Report
from foretoken.measure.teacher_forcing import ScoredText
from foretoken.models.parts import parts
from foretoken.models.text import encode

ARTEFACTS: dict[str, tuple[str, Artefact]] = {  # name -> title, and what fills the report
    "spechub-figures": ("SpecHub, Figures 4-5: three tokens, two drafts", spechub_figures),
    "spechub-table4": ("SpecHub, Table 4: toy distributions", spechub_table4),
    "spechub-tables1-3": ("SpecHub, Tables 1-3: first and second draft by temperature", spechub_drafts),
    "spechub-tables5-7": ("SpecHub, Tables 5-7: tokens per step on binary, ternary and Sequoia trees", spechub_trees),
    "spechub-figure1": ("SpecHub, Figure 1: tokens per step by the nodes of a binary tree", spechub_figure1),
    "spechub-figure6": ("SpecHub, Figure 6: tokens per step by temperature", spechub_figure6),
    "spechub-figure7": ("SpecHub, Figure 7: acceptance of each of ten drafts", spechub_figure7),
    "global-resolution-table1": ("Global Resolution, Tables 1 and 3: solve time and success", table1),
    "global-resolution-table2": ("Global Resolution, Table 2: acceptance in 10 and 100 ms", table2),
    "global-resolution-table4": ("Global Resolution, Table 4: i.i.d. paths of several steps", table4),
    "global-resolution-figure1": ("Global Resolution, Figures 1-3: acceptance by drafts", figure1),
    "global-resolution-temperature": ("Global Resolution, Figures 4-5: the target's temperature", temperature),
    "slrs-table5": ("SLRS, Table 5, Figures 1-3: ways to spell a token", slrs_table5),
    "slrs-tables8-11": ("SLRS, Tables 8-11: overlap of vocabularies, texts that survive", slrs_vocabularies),
    "gumiho-theorem": ("Gumiho, section 3.2: earlier positions count more", gumiho_theorem),
    "randomised-drafting": ("Randomised Drafting: Lemmas 4.1-4.4, Figures 3-4", randomised_drafting),
}
DEMO_VOCABULARIES = ("target", "drafter-1k", "drafter-bytes")


def command(
    name: str | None = None,
    /,
    *,
    list_: bool = False,
    quick: bool = False,
    seed: int = 0,
    cell_seconds: float | None = None,
    target: str | None = None,
    drafter: LanguageModel = None,
    text: Text = None,
    positions: int | None = None,
    markdown: bool = False,
    json_: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Print figures of the papers beside ours. Where a paper's figure does not follow from its text, the notes say so.

    Figures on models are of the demo pair unless another is named; those of SLRS take two with any vocabularies.
    Ctrl-C prints what was measured.

    name: What to reproduce; --list shows the names.
    list_: List the names and leave.
    quick: Fewer pairs, positions and seconds: a first look.
    seed: Seed of everything that is drawn.
    cell_seconds: Time limit of one cell in tables of times. Default: 15, with --quick 2.
    positions: Places in the text to measure at. Default: 240, with --quick 24.
    """
    if list_:
        for known, (what, _) in ARTEFACTS.items():
            print(f"{known:32}{what}")
        return
    if name is None or name not in ARTEFACTS:
        what = "No name was given" if name is None else f"Nothing is known as {name}"
        raise ForetokenError(f"{what}: choose one of {', '.join(ARTEFACTS)}.")
    if cell_seconds is not None and not 0 < cell_seconds < float("inf"):
        raise ForetokenError(f"cell-seconds is {cell_seconds}: it must be a finite number > 0.")
    num_positions = positions if positions is not None else (24 if quick else 240)
    check_counts(positions=num_positions)
    check_seed(seed)
    texts = check_score(target, drafter, text, dtype)

    models = names(target, drafter)
    header = {**machine(torch.device("cpu")), "seed": seed, "quick": quick, **models, "positions": num_positions}
    report = Report(f"{name}: {ARTEFACTS[name][0]}", header)

    @cache
    def scored() -> ScoredText:
        return score(target, drafter, texts, num_positions, device, dtype)

    @cache
    def pair() -> "tuple[Engine, list[list[int]]]":
        engine = options.load_engine(target, drafter, tree="chain:1", device=device, dtype=dtype)
        assert engine.tokenizer is not None, "a target named by folder has a tokenizer"
        ids = [encode(engine.tokenizer, p["prompt"]) for p in options.heldout_prompts()]
        return replace(engine, tokenizer=None, eos_ids=frozenset()), ids

    def head() -> "HeadLM | None":
        if target is not None:
            return None
        folder = str(options.demo_folder() / "heads" / "eagle")
        return ready(load_head(folder, parts(pair()[0].target.lm)), "eagle")

    limit_s = cell_seconds if cell_seconds is not None else (2.0 if quick else 15.0)
    found = _vocabularies(target, drafter)
    given = Run(report, seed, quick, limit_s, scored, options.progress, found, target is not None, pair, head)
    try:
        ARTEFACTS[name][1](given)
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, markdown)


def _vocabularies(target: str | None, drafter: str | None) -> dict[str, str]:
    """Name -> folder: the models named, else the demo models with tokenizers of their own."""
    named = [name for name in (target, drafter) if name is not None]
    folders = [Path(name) for name in named] or [options.demo_folder() / name for name in DEMO_VOCABULARIES]
    return {folder.name: str(folder) for folder in folders}
