"""`foretoken bench chains`: chains of fixed and of changing length, on given texts."""

from typing import Annotated

import typer

from foretoken.cli import options
from foretoken.cli import rules as rules_command
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts
from foretoken.trees.grammar import read_tree

TREES = ["chain:8", "budget:8", "chain:16", "budget:16"]
TEMPERATURES = [1.0, 0.6]


def chains(
    target: options.Target = None,
    drafter: options.SameVocabulary = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(help=f"chain:D, chain:D@C or budget:N; may be repeated. Default: {', '.join(TREES)}."),
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated. Default: 1 and 0.6.")] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts that the target continues.")] = 31,
    texts: Annotated[int, typer.Option(help="Times that it continues every prompt.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of every text that are decoded.")] = 64,
    runs: Annotated[int, typer.Option(help="Decodings of every text, for trees whose length changes.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of texts and of what is drafted.")] = 0,
    markdown: rules_command.Markdown = False,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Tokens a step of chains under block verification, by probability on texts of the target's own.

    On the same texts trees that differ by 1% are told apart in minutes, for which bench trees takes days. Trees of one
    path only: a budget tree draws one child a node here.
    """
    temperatures = list(dict.fromkeys(temperature or TEMPERATURES))
    check_counts(texts=texts, max_new_tokens=max_new_tokens, runs=runs)
    if seed < 0:
        raise ForetokenError(f"seed is {seed}: it must be 0 or more.")
    for t in temperatures:
        if not 0 < t < float("inf"):
            raise ForetokenError(f"temperature is {t}: it must be a finite number > 0, since nothing is drawn at 0.")
    names = list(dict.fromkeys(tree or TREES))
    for name in names:
        read_tree(name)
    options.heldout_prompts(prompts)
    options.check_models(target, drafter, dtype=dtype)
    from foretoken.bench.machine import machine
    from foretoken.bench.pair import load_pair
    from foretoken.cli.workload import chosen_prompts, encoded
    from foretoken.compare.chains import COLUMNS, NO_MODEL, Course, ahead, fill, measure
    from foretoken.compare.given_text import one_path
    from foretoken.compare.rows import drafter_lm
    from foretoken.compare.table import Report
    from foretoken.names import policy_for, tree_policy, verifier_named

    policies = {name: policy_for(one_path(tree_policy(name), name), verifier_named("block")) for name in names}
    source, inner = options.resolve_models(target, drafter)
    options.quiet()
    pair = load_pair(source, inner, device=device, dtype=dtype)
    drafter_lm(pair.engine, NO_MODEL)
    ids = encoded(pair.engine, chosen_prompts(None, prompts), max_new_tokens + ahead(policies))
    course = Course(pair.engine, ids, texts, max_new_tokens, runs, seed)
    lm = pair.engine.target.lm
    header = {
        **machine(lm.device), **rules_command.names(target, drafter), "dtype": str(lm.dtype).removeprefix("torch."),
        "prompts": prompts, "texts": texts, "max_new_tokens": max_new_tokens, "runs": runs, "seed": seed,
    }  # fmt: skip
    report = Report("Chains on given texts", header)
    try:
        for t in temperatures:
            found = measure(course, policies, t, options.progress)
            columns = [*COLUMNS, f"over {names[0]}", "over a chain of as many nodes"]
            fill(report.table(f"Tokens a step, temperature {t:g}", columns, 2), found)
            if found.interrupted:
                report.interrupted = True
                break
    except KeyboardInterrupt:
        report.interrupted = True
    rules_command.show(report, json_, markdown)
