"""`foretoken bench acceptance`: the vectors that Sequoia trees are made of, measured for a pair of models."""

from dataclasses import dataclass, replace
from pathlib import Path

from foretoken.cli import options
from foretoken.cli.command import command
from foretoken.cli.measuring import chosen_prompts, encoded, names, show
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_folder
from foretoken.core.limits import MOST_DRAWS, check_choice, check_counts, check_seed, check_temperatures
from foretoken.verify import VERIFIERS

FOLDER = "foretoken-acceptance"
RULES = ("rrs", "rrsw", "hub", "kseq", "transport")
TEMPERATURES = (0.0, 0.3, 0.6, 1.0)
POSITIONS = 32  # positions after each prompt at which acceptance is measured


@dataclass(frozen=True)
class OneVocabulary(options.Models):
    """drafter: Model folder or hub id with the same vocabulary. Default: the demo drafter for the demo target."""


@command
def acceptance(
    *,
    models: OneVocabulary,
    temperature: list[float] | None = None,
    children: int = 4,
    prompts: int = 31,
    seed: int = 0,
    verifier: list[str] | None = None,
    max_new_tokens: int = POSITIONS,
    out: str = FOLDER,
    markdown: bool = False,
    json_: bool = False,
) -> None:
    """Measure how often the first, second, .. child of a node is the accepted one, for --tree sequoia:N@FILE.

    Writes one file RULE-TEMPERATURE.json per rule into a folder; files already there are kept, and refused if they were
    measured with other settings. At temperature 0 every rule is exact-match.

    temperature: May be repeated. Default: 0, 0.3, 0.6 and 1.
    children: Children of a node, at most.
    prompts: Held-out prompts to continue.
    seed: Seed of the continuations and of what is drafted.
    verifier: Rule; may be repeated. Default: rrs, rrsw, hub, kseq and transport.
    max_new_tokens: Positions after each prompt: tokens of the target's own.
    out: Folder of the acceptance vectors; those it lacks are measured into it.
    """
    check_counts(max_new_tokens=max_new_tokens, children=children)
    if children > MOST_DRAWS:
        raise ForetokenError(f"children is {children}: it must be at most {MOST_DRAWS}.")
    check_seed(seed, prompts)
    check_temperatures(temperature)
    texts = chosen_prompts(None, prompts)
    options.check_models(**vars(models))
    for name in verifier or ():
        check_choice("verifier", name, VERIFIERS, optional=False)
    check_folder(Path(out))
    from foretoken.measure.child_acceptance import check_children, child_acceptance, continued, read, write
    from foretoken.measure.machine import machine
    from foretoken.measure.pair import load_pair
    from foretoken.measure.report import Report
    from foretoken.models.identity import device_name, fingerprint
    from foretoken.names import verifier_named

    temperatures = TEMPERATURES if temperature is None else temperature
    if any(temperatures):
        for name in verifier or RULES:
            check_children(verifier_named(name), children)
    options.quiet()
    source, drafter = options.resolve_models(models.target, models.drafter)
    pair = load_pair(source, drafter, device=models.device, dtype=models.dtype)
    options.spare_threads(pair.num_params)
    lm = pair.engine.target.lm
    ids = encoded(pair.engine, texts, max_new_tokens)
    engine = replace(pair.engine, tokenizer=None)
    settings = {
        **names(models.target, models.drafter),
        "weights": [fingerprint(lm), engine.fingerprint],
        "device": device_name(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "children": children,
        "seed": seed,
    }
    report = Report("Acceptance of each child", {**machine(lm.device), **settings})
    columns = ["T", "rule", "law", *(f"b={b}" for b in range(1, children + 1)), "file"]
    table = report.table("P(child b is the accepted one)", columns)
    errors: tuple[float, ...] = ()
    try:
        for t in dict.fromkeys(temperatures):
            text = None
            for name in dict.fromkeys("exact-match" if t == 0 else rule for rule in verifier or RULES):
                path = Path(out) / f"{name}-{t:g}.json"
                rule = verifier_named(name)
                found = read(path, {**settings, "verifier": rule.name, "temperature": t})
                if found is None:
                    options.progress(f"acceptance of the children of {name}, temperature {t:g}")
                    text = text or continued(engine, ids, max_new_tokens, t, seed)
                    found = child_acceptance(rule, rule.laws[0], children, text, t, seed)
                    write(found, path, settings)
                table.add(f"{t:g}", name, found.law, *found.acceptance, str(path))
                errors += found.standard_error
                table.notes = [f"Standard errors up to {max(errors):.3f}; {found.positions} positions per row."]
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, markdown)
