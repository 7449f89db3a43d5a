"""`foretoken bench acceptance`: the vectors that Sequoia trees are made of, measured for a pair of models."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli import options
from foretoken.cli.command import command
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


@dataclass(frozen=True)
class VectorOptions(options.Models):
    """Whose acceptance vectors are measured, and on what.

    temperature: May be repeated. Default: 0, 0.3, 0.6 and 1.
    children: Children of a node, at most.
    prompts: Held-out prompts to continue.
    seed: Seed of the continuations and of what is drafted.
    """

    drafter: options.SameVocabulary = None
    temperature: list[float] | None = None
    children: int = 4
    prompts: int = 31
    seed: int = 0

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(TEMPERATURES if self.temperature is None else self.temperature))

    def check(self, max_new_tokens: int) -> None:
        """Refuse what cannot be before torch is imported."""
        check_counts(max_new_tokens=max_new_tokens, children=self.children)
        if self.children > MOST_DRAWS:
            raise ForetokenError(f"children is {self.children}: it must be at most {MOST_DRAWS}.")
        if self.seed < 0:
            raise ForetokenError(f"seed is {self.seed}: it must be 0 or more.")
        check_temperatures(self.temperature)
        options.heldout_prompts(self.prompts)
        options.check_models(self.target, self.drafter, device=self.device, dtype=self.dtype)

    def load(self, max_new_tokens: int) -> "Loaded":
        """The pair as it is, the target in one thread where it is small."""
        from foretoken.measure.pair import load_pair
        from foretoken.models.identity import device_name, fingerprint

        options.quiet()
        source, drafter = options.resolve_models(self.target, self.drafter)
        pair = load_pair(source, drafter, verifier="rrsw", device=self.device, dtype=self.dtype)
        options.spare_threads(pair.num_params)
        lm = pair.engine.target.lm
        settings = {
            **names(self.target, self.drafter),
            "weights": [fingerprint(lm), pair.engine.fingerprint],
            "device": device_name(lm.device),
            "dtype": str(lm.dtype).removeprefix("torch."),
            "prompts": self.prompts,
            "max_new_tokens": max_new_tokens,
            "children": self.children,
            "seed": self.seed,
        }
        texts = encoded(pair.engine, chosen_prompts(None, self.prompts), max_new_tokens)
        return Loaded(replace(pair.engine, tokenizer=None), source, texts, settings)


@dataclass(frozen=True)
class Loaded:
    """The pair, the prompts' ids, and the settings without which figures cannot be compared. source: of the target."""

    engine: "Engine"
    source: str
    texts: list[list[int]]
    settings: dict[str, Any]

    def vectors(self, num_tokens: int, folder: str, option: str) -> "Vectors":
        """The vectors in `folder`, which `option` names: those it lacks are measured when they are asked for."""
        from foretoken.measure.child_acceptance import Vectors

        settings = {**self.settings, "max_new_tokens": num_tokens}
        children, seed = settings["children"], settings["seed"]
        return Vectors(
            self.engine, self.texts, num_tokens, children, seed, Path(folder), settings, options.progress, option
        )

    def header(self, settings: dict[str, Any]) -> dict[str, Any]:
        from foretoken.measure.machine import machine

        return {**machine(self.engine.target.lm.device), **settings}


@command
def acceptance(
    *,
    pair: VectorOptions,
    verifier: list[str] | None = None,
    max_new_tokens: int = POSITIONS,
    out: str = FOLDER,
    markdown: Markdown = False,
    json_: bool = False,
) -> None:
    """Measure how often the first, second, .. child of a node is the accepted one, for --tree sequoia:N@FILE.

    Writes one file RULE-TEMPERATURE.json per rule into a folder; files already there are kept, and refused if they were
    measured with other settings. At temperature 0 every rule is exact-match.

    verifier: Rule; may be repeated. Default: rrs, rrsw, hub, kseq and transport.
    max_new_tokens: Positions after each prompt: tokens of the target's own.
    out: Folder of the acceptance vectors; those it lacks are measured into it.
    json_: Print JSON instead of text.
    """
    pair.check(max_new_tokens)
    for name in verifier or ():
        check_verifier(name)
    check_folder(Path(out))
    from foretoken.measure.report import Report
    from foretoken.names import verifier_named

    loaded = pair.load(max_new_tokens)
    vectors = loaded.vectors(max_new_tokens, out, "--out")
    report = Report("Acceptance of each child", loaded.header(loaded.settings))
    children = [f"b={b}" for b in range(1, pair.children + 1)]
    table = report.table("P(child b is the accepted one)", ["T", "rule", "law", *children, "file"])
    try:
        for t in pair.temperatures:
            for name in dict.fromkeys("exact-match" if t == 0 else rule for rule in verifier or RULES):
                found = vectors.of(verifier_named(name), t)
                table.add(f"{t:g}", name, found.law, *found.acceptance, str(vectors.path(found.verifier, t)))
                table.notes = [f"Standard errors up to {max(found.standard_error):.3f}; {found.positions} positions."]
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, markdown)
