"""`foretoken bench heads`: draft heads side by side on one target."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import options
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_seed, check_temperatures
from foretoken.models.named import check_head_folder
from foretoken.trees.grammar import check_size, read_tree

if TYPE_CHECKING:
    from foretoken.bench.heads import Method, Result
    from foretoken.compare.table import Report
    from foretoken.heads.lm import HeadLM

# Sampled trees, measured above temperature 0.
SAMPLED = (
    ("kary:2x3", "rrsw"), ("kary:2x3", "hub"), ("kary:2x3", "transport"), ("budget:{}", "transport"),
    ("budget:{}", "block-transport"),
)  # fmt: skip


def heads(
    head: Annotated[
        list[str] | None, typer.Option(help="Folder of a head; may be repeated. Default: the demo ones.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="A drafter LM beside them; none leaves it out.")] = None,
    target: options.Target = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the deterministic trees, drafted ones.")] = 20,
    tree: Annotated[
        list[str] | None, typer.Option(help="Also every head with this tree and its usual rule; may be repeated.")
    ] = None,
    levels: Annotated[
        list[int] | None,
        typer.Option(help="Also Gumiho's head cut to so many levels, 2 of them serial; may be repeated."),
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated. Default: 0 and 1.")] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts to continue.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of every run.")] = 64,
    rounds: Annotated[int, typer.Option(help="Times that every method continues every prompt.")] = 1,
    expand: Annotated[
        str | None, typer.Option(help="Give the target the cost of 100m, 300m or 1b parameters, at the same function.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first round.")] = 0,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Tokens a step, speed-up over plain decoding and time by component, of every head with deterministic trees
    (dynamic, and product where levels are parallel) and, above temperature 0, sampled trees and their rules."""
    check_counts(nodes=nodes, prompts=prompts, max_new_tokens=max_new_tokens, rounds=rounds)
    temperatures = list(dict.fromkeys([0.0, 1.0] if temperature is None else temperature))
    check_temperatures(temperatures)
    check_seed(seed, rounds)
    check_size(nodes)
    for name in tree or ():
        read_tree(name)
    texts = [str(p["prompt"]) for p in options.heldout_prompts()[:prompts]]
    options.check_models(target, drafter, expand, dtype=dtype)
    for folder in head or ():
        check_head_folder(folder)
    from foretoken.bench.heads import Narrow, measure, method
    from foretoken.bench.machine import machine
    from foretoken.heads.lm import ready
    from foretoken.heads.load import load_head
    from foretoken.heads.serial import Gumiho
    from foretoken.models.causal_lm import CausalLM
    from foretoken.models.expand import expand as expanded
    from foretoken.models.load import choose_device, choose_dtype, load_frozen, load_model, load_tokenizer
    from foretoken.models.named import size_named
    from foretoken.models.panels import pack
    from foretoken.models.parts import parts
    from foretoken.models.text import encode

    options.quiet()
    source = target or str(options.demo_folder() / "target")
    chosen, narrow = choose_device(device), None
    small = load_model(source, chosen, choose_dtype(dtype))
    kind = small.dtype
    plain = load_frozen(source, chosen, kind).model  # packing takes the weights off the list of parameters
    scored, params = small, plain.num_parameters()
    if expand is not None:
        big = expanded(plain, size_named(expand), seed)
        params = big.num_parameters()
        pack(big)
        scored = CausalLM(big, f"{source} expanded to {expand}")
        narrow = Narrow(small.hidden_size, scored.hidden_size, small.num_layers, scored.num_layers)
    options.spare_threads(params)
    borrowed = parts(small)
    folders = head or [str(path) for path in sorted((options.demo_folder() / "heads").glob("*/"))]
    if not folders:
        raise ForetokenError("There are no demo heads here: name a folder with --head.")
    methods: list[Method] = []
    for folder in folders:
        lm = ready(load_head(folder, borrowed), Path(folder).name)
        methods += [*(method(lm, spec) for spec in tree or ()), *_methods(lm, nodes)]
        for number in levels or ():
            fewer = load_head(folder, borrowed)
            if isinstance(fewer, Gumiho):
                fewer.cut(number)
                methods += _methods(ready(fewer, f"{Path(folder).name}, {number} levels"), nodes, sampled=False)
    if drafter != "none" and (drafter is not None or target is None):
        path = drafter or str(options.demo_folder() / "drafter")
        model = load_model(path, chosen, kind)
        if model.vocab_size != small.vocab_size:
            raise ForetokenError(
                f"Drafter {path} has {model.vocab_size} tokens and target {source} {small.vocab_size}: take a drafter "
                "with the target's vocabulary, or none."
            )
        model.name = Path(path).name  # as the heads are called in the table
        methods += [method(model, spec) for spec in ("chain:5", f"dynamic:{nodes}")]
        methods.append(method(model, "kary:2x3", sampled=True))
    tokenizer = load_tokenizer(source)
    ids = [encode(tokenizer, text) for text in texts]
    found = measure(scored, methods, narrow, ids, temperatures, max_new_tokens, rounds, seed, options.progress)
    options.progress("")
    header = {**machine(chosen), "target": scored.name, "num_params": params, "prompts": len(ids),
              "max_new_tokens": max_new_tokens, "rounds": rounds, "seed": seed}  # fmt: skip
    if json_:
        print(json.dumps({**header, "results": [result.record() for result in found]}))
    else:
        _tables(header, found).print()


def _methods(lm: "HeadLM", nodes: int, sampled: bool = True) -> "list[Method]":
    from foretoken.bench.heads import method
    from foretoken.heads.flat import Medusa
    from foretoken.heads.serial import Gumiho

    trees = (
        ["dynamic", "product"] if isinstance(lm.head, Gumiho | Medusa) and lm.depth != Gumiho.SERIAL else ["dynamic"]
    )
    methods = [method(lm, f"{tree}:{nodes}") for tree in trees]
    if sampled:
        methods += [method(lm, tree.format(nodes), rule, sampled=True) for tree, rule in SAMPLED]
    return methods


def _tables(header: dict[str, object], found: "list[Result]") -> "Report":
    from foretoken.bench.head_clocks import PARTS
    from foretoken.compare.table import Report

    report = Report("foretoken bench heads", header)
    fields = {"ms/token": "ms_per_token", "tokens/step": "tokens_per_step", "nodes": "nodes_per_step",
              "draft ms": "draft_ms_per_step", "target ms": "target_ms_per_step",
              "other ms": "other_ms_per_step"}  # fmt: skip
    for t in dict.fromkeys(result.temperature for result in found):
        table = report.table(f"temperature {t:g}", ["method", "x plain", *fields, *PARTS], digits=2)
        for result in found:
            if result.temperature == t:
                record = result.record()
                parts = record["components_ms_per_step"].values()
                table.add(result.method, result.speedup, *(record[name] for name in fields.values()), *parts)
    report.tables[-1].notes += [
        "tokens/step: with the bonus. ms/token and x plain: processor time of whole runs where one thread does all the "
        "work; other ms: wall clock, medians over steps.",
    ]
    return report
