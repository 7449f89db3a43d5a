"""`python -m benchmarks optimum`: how much of what any joint rule can accept each rule accepts, on small trees."""

from statistics import mean

import torch

from benchmarks.joint import Drawn, accepted, drawn, optimum
from foretoken.cli import options
from foretoken.cli.measuring import show
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID
from foretoken.core.limits import check_counts, check_seed
from foretoken.core.policy import TreePolicy
from foretoken.core.verifier import Verifier
from foretoken.measure.machine import machine
from foretoken.measure.report import Cell, Report
from foretoken.names import tree_policy, verifier_named

TREES = ("chain:3/2", "kary:3x1/3", "kary:2x2/2", "kary:2x2/3", "delayed:0+2x2/3", "delayed:0+3x2/2", "delayed:0+2x3/2")
RULES = ("block", "rrsw", "transport", "traversal", "block-transport", "gbv")


def read_case(text: str) -> tuple[TreePolicy, int]:
    """The policy and the number of tokens of e.g. "kary:2x2/3"."""
    tree, slash, tokens = text.rpartition("/")
    if not slash or not tokens.isascii() or not tokens.isdigit() or int(tokens) < 2:
        raise ForetokenError(f"Case {text!r} is not TREE/V: write e.g. kary:2x2/3, for that tree and 3 tokens.")
    return tree_policy(tree), int(tokens)


def share(rule: Verifier, policy: TreePolicy, cases: list[Drawn], best: list[float]) -> Cell:
    """The mean of what the rule accepts over the optimum, and the least; None where it does not take the tree."""
    if not all(rule.accepts(law) for law in policy.laws(IID)):
        return None
    shares = [accepted(rule, case) / most for case, most in zip(cases, best, strict=True)]
    return f"{mean(shares):.3f} ({min(shares):.3f})"


def command(
    *,
    case: list[str] | None = None,
    verifier: list[str] | None = None,
    pairs: int = 10,
    seed: int = 0,
    markdown: bool = False,
    json_: bool = False,
) -> None:
    """Share of the joint optimum that each rule accepts, for i.i.d. draws: exact, by enumeration and a linear program.

    The optimum is over all lossless rules that are given the whole drawn tree. Needs scipy.

    case: TREE/V: a tree and the number of tokens; may be repeated.
    verifier: A rule; may be repeated.
    pairs: Random pairs of a target and a drafter.
    seed: Seed of the first pair.
    """
    check_counts(pairs=pairs)
    check_seed(seed)
    rules = [verifier_named(name) for name in verifier or RULES]
    read = {text: read_case(text) for text in case or TREES}
    report = Report("Share of the joint optimum", {"pairs": pairs, "seed": seed, **machine(torch.device("cpu"))})
    table = report.table(
        "Draft tokens accepted, over the optimum", ["tree/tokens", "optimum", *(r.name for r in rules)]
    )
    table.notes.append(
        "Mean over pairs, in brackets the least. Optimum: draft tokens accepted a step, mean over pairs."
    )
    try:
        for text, (policy, v) in read.items():
            options.progress(text)
            cases = [drawn(policy, v, seed + i) for i in range(pairs)]
            best = [optimum(one).accepted for one in cases]
            table.add(text, mean(best), *(share(rule, policy, cases, best) for rule in rules))
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, markdown)
