"""`foretoken rules`: which verification rule accepts most drafts."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.bench.figure import check_plot
from foretoken.cli import options
from foretoken.core.errors import ForetokenError
from foretoken.core.files import read_text
from foretoken.core.limits import MOST_DRAWS, check_counts, check_seed

if TYPE_CHECKING:
    from foretoken.compare.rows import ScoredText
    from foretoken.compare.table import Report

CELL_SECONDS = 5.0  # of --speed
DEFAULT_DRAWS = "1,2,3,4,8"
DEFAULT_TEMPERATURES = "1,0.6,0.3"
Text = Annotated[str | None, typer.Option(help="UTF-8 text file to score. Default: the held-out texts of the demo.")]
Positions = Annotated[int, typer.Option(help="Places in the text, spread evenly, at which rules are compared.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of text.")]


def rules(
    toy: Annotated[bool, typer.Option("--toy", help="Enumerate every rule on toy distributions; no model.")] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Time every rule and published solver by vocabulary and drafts; no model.")
    ] = False,
    target: options.Target = None,
    drafter: options.Drafter = None,
    text: Text = None,
    draws: Annotated[str, typer.Option(help="Numbers of drafts to compare, with commas.")] = DEFAULT_DRAWS,
    temperature: Annotated[str, typer.Option(help="Temperatures of both models, with commas.")] = DEFAULT_TEMPERATURES,
    positions: Positions = 240,
    seed: Annotated[int, typer.Option(help="Seed of whatever is sampled.")] = 0,
    plot: Annotated[str | None, typer.Option(help="Draw acceptance to this file (needs matplotlib).")] = None,
    markdown: Markdown = False,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Compare verification rules by acceptance, time and deviation from the target's distribution.

    On a real pair of models over a text (by default the demo pair), or with --toy on the toy distributions of the
    SpecHub paper, where every draw of every rule is enumerated, or with --speed by time alone on random rows of up to
    128,000 tokens. The table goes to stdout.
    """
    numbers = _numbers(draws, "draws", whole=True)
    if max(numbers) > MOST_DRAWS:
        raise ForetokenError(f"--draws is {draws}: give numbers up to {MOST_DRAWS}.")
    temperatures = _numbers(temperature, "temperature")
    if toy and speed:
        raise ForetokenError("--toy and --speed are two comparisons: ask for one at a time.")
    if plot is not None and speed:
        raise ForetokenError("--plot draws acceptance, which --speed does not measure: leave one of them out.")
    if plot is not None:
        check_plot(plot)
    check_counts(positions=positions)
    check_seed(seed)
    texts = [] if toy or speed else check_score(target, drafter, text, dtype)
    from foretoken.bench.machine import machine
    from foretoken.compare.contenders import Effort
    from foretoken.compare.measure import Settings, measure_pair, measure_toy
    from foretoken.compare.plot import plot as draw
    from foretoken.compare.speed import measure_speed
    from foretoken.compare.table import Report

    settings = Settings(numbers, temperatures, Effort(seed=seed))
    scored = None if toy or speed else score(target, drafter, texts, positions, device, dtype)
    import torch

    header = {**machine(torch.device("cpu")), "seed": seed}
    if scored is not None:
        header |= {**names(target, drafter), "text": text or "held-out", "positions": positions}
    report = Report("Verification rules compared", header)

    def tell(line: str) -> None:
        if not (json_ or markdown):
            options.progress("")
            report.print_finished()
        options.progress(line)

    try:
        if speed:
            measure_speed(report, settings.temperatures, seed, CELL_SECONDS, options.progress)
        elif scored is None:
            measure_toy(report, settings, tell)
        else:
            measure_pair(report, scored, settings, options.progress)
    except KeyboardInterrupt:
        report.interrupted = True
    if plot is not None:
        draw(report.tables, report.title, plot)
    show(report, json_, markdown)


def names(target: str | None, drafter: str | None) -> dict[str, str]:
    """The models of a report's header: as they were named, since a full path is of no use elsewhere."""
    return {"target": target or "demo", "drafter": drafter or ("ngram" if target else "demo")}


def check_score(target: str | None, drafter: str | None, text: str | None, dtype: str | None) -> list[str]:
    """The texts to score, by default the held-out ones; refuses what cannot be before torch is imported."""
    options.check_models(target, drafter, dtype=dtype)
    return [read_text(text)] if text else [p["prompt"] + p["reference"] for p in options.heldout_prompts()]


def score(
    target: str | None,
    drafter: str | None,
    texts: list[str],
    positions: int,
    device: str | None,
    dtype: str | None,
) -> "ScoredText":
    """Both models over the texts."""
    from foretoken.compare.rows import score_text

    engine = options.load_engine(target, drafter, "chain:1", None, None, device, dtype)
    options.progress(f"scoring {positions} positions")
    return score_text(engine, texts, positions)


def show(report: "Report", as_json: bool, as_markdown: bool) -> None:
    """The end of a command: print what was measured; exit code 130 where Ctrl-C ended it."""
    options.progress("")
    if as_json:
        print(json.dumps(report.json()))
    elif as_markdown:
        print(report.markdown())
    else:
        report.print()
    if report.interrupted:
        raise typer.Exit(130)


def _numbers(text: str, name: str, whole: bool = False) -> tuple[Any, ...]:
    try:
        found = [(int if whole else float)(part) for part in text.split(",")]
    except ValueError:
        kind = "whole numbers" if whole else "numbers"
        raise ForetokenError(f"--{name} is {text!r}: give {kind} with commas between them.") from None
    return tuple(dict.fromkeys(found))
