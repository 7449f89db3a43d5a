"""`foretoken bench acceptance`: the vectors that Sequoia trees are made of, measured for a pair of models."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options
from foretoken.cli.measuring import Markdown, chosen_prompts, encoded, names, show
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_folder
from foretoken.core.limits import MOST_DRAWS, check_counts, check_temperatures
from foretoken.recipe import check_verifier

if TYPE_CHECKING:
    from foretoken.engine import Engine
    from foretoken.measure.child_acceptance import Vectors

FOLDER = "foretoken-acceptance"
RULES = ("rrs", "rrsw", "hub", "kseq", "transport")
TEMPERATURES = (0.0, 0.3, 0.6, 1.0)
POSITIONS = 32  # after each prompt, at which acceptance is measured
Temperatures = Annotated[
    list[float] | None, typer.Option("--temperature", help="May be repeated. Default: 0, 0.3, 0.6 and 1.")
]
Children = Annotated[int, typer.Option(help="Children of a node, at most.")]
HeldOut = Annotated[int, typer.Option(help="Held-out prompts to continue.")]
Folder = Annotated[str, typer.Option(help="Folder of the acceptance vectors; those it lacks are measured into it.")]


def acceptance(
    target: options.Target = None,
    drafter: options.SameVocabulary = None,
    verifier: Annotated[
        list[str] | None, typer.Option(help="Rule; may be repeated. Default: rrs, rrsw, hub, kseq and transport.")
    ] = None,
    temperature: Temperatures = None,
    children: Children = 4,
    prompts: HeldOut = 31,
    max_new_tokens: Annotated[
        int, typer.Option(help="Positions after each prompt: tokens of the target's own.")
    ] = POSITIONS,
    seed: Annotated[int, typer.Option(help="Seed of the continuations and of what is drafted.")] = 0,
    out: Folder = FOLDER,
    markdown: Markdown = False,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Measure how often the first, second, .. child of a node is the accepted one, for --tree sequoia:N@FILE.

    Writes one file RULE-TEMPERATURE.json a rule into a folder; files already there are kept, and refused if they were
    measured with other settings. At temperature 0 every rule is exact-match.
    """
    check(target, drafter, prompts, max_new_tokens, children, seed, dtype, temperature)
    for name in verifier or ():
        check_verifier(name)
    check_folder(Path(out))
    from foretoken.measure.report import Report
    from foretoken.names import verifier_named

    loaded = load(target, drafter, prompts, max_new_tokens, children, seed, device, dtype)
    vectors = loaded.vectors(max_new_tokens, out, "--out")
    report = Report("Acceptance of each child", loaded.header(loaded.settings))
    table = report.table(
        "P(child b is the accepted one)", ["T", "rule", "law", *(f"b={b}" for b in range(1, children + 1)), "file"]
    )
    try:
        for t in temperatures_or_default(temperature):
            for name in dict.fromkeys("exact-match" if t == 0 else rule for rule in verifier or RULES):
                found = vectors.of(verifier_named(name), t)
                table.add(f"{t:g}", name, found.law, *found.acceptance, str(vectors.path(found.verifier, t)))
                table.notes = [f"Standard errors up to {max(found.standard_error):.3f}; {found.positions} positions."]
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, markdown)


def temperatures_or_default(asked: list[float] | None) -> list[float]:
    return list(dict.fromkeys(TEMPERATURES if asked is None else asked))


def check(
    target: str | None,
    drafter: str | None,
    prompts: int,
    max_new_tokens: int,
    children: int,
    seed: int,
    dtype: str | None,
    temperatures: list[float] | None,
) -> None:
    """Refuse what cannot be before torch is imported."""
    check_counts(max_new_tokens=max_new_tokens, children=children)
    if children > MOST_DRAWS:
        raise ForetokenError(f"children is {children}: it must be at most {MOST_DRAWS}.")
    if seed < 0:
        raise ForetokenError(f"seed is {seed}: it must be 0 or more.")
    check_temperatures(temperatures)
    options.heldout_prompts(prompts)
    options.check_models(target, drafter, dtype=dtype)


@dataclass(frozen=True)
class Loaded:
    """The pair as it is, the prompts' ids, and the settings without which figures cannot be compared. source: of the
    target."""

    engine: "Engine"
    source: str
    texts: list[list[int]]
    settings: dict[str, Any]

    def vectors(self, num_tokens: int, folder: str, option: str) -> "Vectors":
        from foretoken.measure.child_acceptance import Vectors

        settings = {**self.settings, "max_new_tokens": num_tokens}
        children, seed = settings["children"], settings["seed"]
        return Vectors(
            self.engine, self.texts, num_tokens, children, seed, Path(folder), settings, options.progress, option
        )

    def header(self, settings: dict[str, Any]) -> dict[str, Any]:
        from foretoken.measure.machine import machine

        return {**machine(self.engine.target.lm.device), **settings}


def load(
    target: str | None,
    drafter: str | None,
    prompts: int,
    max_new_tokens: int,
    children: int,
    seed: int,
    device: str | None,
    dtype: str | None,
    small: bool = True,
) -> Loaded:
    """small: the target may run in one thread; not if it is to be expanded."""
    from foretoken.measure.pair import load_pair
    from foretoken.models.identity import device_name, fingerprint

    options.quiet()
    source, inner = options.resolve_models(target, drafter)
    pair = load_pair(source, inner, verifier="rrsw", device=device, dtype=dtype)
    if small:
        options.spare_threads(pair.num_params)
    texts = encoded(pair.engine, chosen_prompts(None, prompts), max_new_tokens)
    engine = replace(pair.engine, tokenizer=None)
    lm = engine.target.lm
    settings = {
        **names(target, drafter),
        "weights": [fingerprint(lm), engine.fingerprint],
        "device": device_name(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "children": children,
        "seed": seed,
    }
    return Loaded(engine, source, texts, settings)
