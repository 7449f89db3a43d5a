"""`python -m benchmarks repetitive`: greedy texts that repeat their prompts, or each other, by every drafter in turn.

Four kinds of prompts: edits of code, logs of agents, articles to be summarised with quotes, and open chat, where
nothing repeats and nothing may be lost. Of whole runs, and of decoding alone; no text stops early. At the first prompt
of a kind, in every round, the texts of earlier requests are forgotten: what a drafter remembers are the kind's earlier
prompts and their answers, never its own answer to the same prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.by_kind import rows, tables
from benchmarks.ngram_rule import NgramRule
from benchmarks.peers import DEFAULT_MODEL, Answered, in_process
from foretoken.build import load, plain
from foretoken.cli import options
from foretoken.cli.measuring import encoded, show
from foretoken.core.interfaces import Drafter
from foretoken.core.limits import check_choice, check_counts
from foretoken.draft.auto import AutoDrafter, auto_drafter
from foretoken.draft.hybrid import HybridDrafter
from foretoken.draft.lookup import LookupDrafter
from foretoken.draft.store import Store
from foretoken.engine import Engine
from foretoken.measure.harness import WARM_TOKENS, Block, Turn, blocks, interleave, until_interrupted
from foretoken.measure.machine import machine
from foretoken.measure.methods import Foretoken
from foretoken.measure.report import Report
from foretoken.names import tree_policy, verifier_named
from foretoken.recipe import AUTO, METHODS, NGRAM, OWN, PLAIN, SUFFIX, Recipe, usual_tree

PROMPTS = Path(__file__).with_suffix(".jsonl")
KINDS = ("edits", "logs", "quotes", "chat")
SHOWN = 6  # prompts of each kind that constants were chosen on; --unseen takes the others
RULE = "former lookup"  # prompt lookup by 4 tokens or fewer, as it was before the present one


def read_prompts(kinds: Sequence[str], unseen: bool) -> tuple[list[str], list[Any]]:
    """(the kind of each prompt, the prompts), kind by kind."""
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    found = [(kind, each) for kind in kinds for each in lines if each["kind"] == kind]
    chosen = [(kind, x.get("prompt") or x["messages"]) for kind, x in found if (_number(x) > SHOWN) == unseen]
    return [kind for kind, _ in chosen], [prompt for _, prompt in chosen]


def _number(line: Mapping[str, Any]) -> int:
    return int(str(line["id"]).rpartition("/")[2])


def engines(target: str, method: str) -> dict[str, Engine]:
    """Plain decoding and every drafter, all with the same target in memory; no text stops early."""
    own = replace(load(target, drafter=OWN, method=method, device="cpu", max_batch=1), eos_ids=frozenset())
    device, exact = own.target.lm.device, verifier_named("exact-match")
    model = own.drafter.inner if isinstance(own.drafter, AutoDrafter) else own.drafter
    longest = tree_policy(usual_tree(NGRAM, method))
    of_model, of_rule = tree_policy(METHODS[method]), tree_policy(METHODS[method])

    def chosen(drafter: Drafter, sizes: tuple[int, ...]) -> Drafter:
        return auto_drafter(drafter, sizes, device) if method == AUTO else drafter

    def looked_up(drafter: Drafter, sizes: tuple[int, ...], store: Store | None = None) -> Engine:
        source = replace(own.source, store=store)
        return replace(own, drafter=chosen(drafter, sizes), verifier=exact, source=source)

    store, beside = Store(), Store()
    both = HybridDrafter(chosen(model, of_model.sizes()), LookupDrafter(longest, beside), of_model.sizes())
    return {
        PLAIN: plain(own),
        RULE: looked_up(NgramRule(of_rule.max_nodes - 1), of_rule.sizes()),
        NGRAM: looked_up(LookupDrafter(longest), longest.sizes()),
        SUFFIX: looked_up(LookupDrafter(longest, store), longest.sizes(), store),
        OWN: own,
        f"{SUFFIX}+{OWN}": replace(own, drafter=both, source=replace(own.source, store=beside)),
    }


def command(
    *,
    target: Annotated[str, typer.Option(help=f"Model folder or name. Default: {DEFAULT_MODEL}.")] = DEFAULT_MODEL,
    kind: Annotated[list[str] | None, typer.Option(help=f"May be repeated. Default: {', '.join(KINDS)}.")] = None,
    unseen: bool = False,
    method: str = AUTO,
    max_new_tokens: int = 256,
    rounds: int = 2,
    markdown: bool = False,
    json_: bool = False,
) -> None:
    """Greedy texts that repeat their prompts or each other: plain decoding and every drafter, in turn.

    unseen: Prompts that no constant was chosen on.
    method: fixed or auto, of all drafters.
    """
    kinds = list(dict.fromkeys(kind or KINDS))
    for each in kinds:
        check_choice("kind", each, KINDS)
    check_counts(rounds=rounds, max_new_tokens=max_new_tokens)
    Recipe(method=method)
    options.check_models(target, OWN)
    options.quiet()
    of_prompt, prompts = read_prompts(kinds, unseen)
    made = engines(target, method)
    ids = encoded(made[PLAIN], prompts, max_new_tokens)
    peers = {name: in_process(Foretoken(engine), ids) for name, engine in made.items()}

    def run(name: str, block: Block) -> Answered:
        store = made[name].source.store
        if store is not None and of_prompt.index(of_prompt[block.prompt]) == block.prompt:
            store.clear()
        return peers[name](block.prompt, max_new_tokens)

    def warm(name: str) -> None:
        peers[name](0, min(WARM_TOKENS, max_new_tokens))

    lm = made[PLAIN].target.lm
    header = {
        "date": date.today().isoformat(), **machine(lm.device), "target": target, "execution": lm.execution,
        "dtype": str(lm.dtype).removeprefix("torch."), "method": method, "temperature": 0, "unseen": unseen,
        "max_new_tokens": max_new_tokens, "rounds": rounds,
    }  # fmt: skip
    done: list[Turn[Block, Answered]] = []
    turns = interleave({name: name for name in made}, blocks(rounds, len(ids), [0.0]), run, warm, options.progress)
    interrupted = until_interrupted(turns, done)
    found = rows(done, of_prompt, RULE)
    report = Report("benchmarks repetitive", header, [], interrupted, {"rows": [asdict(row) for row in found]})
    tables(report, found, RULE)
    show(report, json_, markdown)
