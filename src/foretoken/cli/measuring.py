"""What the commands that measure have in common: the prompts that they continue, and how a report is printed."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from foretoken.cli import options
from foretoken.cli.prompts import Prompt, check_prompts, read_batch
from foretoken.core.errors import ForetokenError
from foretoken.core.interrupts import exit_code
from foretoken.core.limits import check_counts, check_seed
from foretoken.recipe import AUTO, NGRAM, SUFFIX, in_a_row

if TYPE_CHECKING:
    from foretoken.engine import Engine
    from foretoken.measure.report import Report


def check_forgets(drafter: str | None) -> None:
    """Refuse a `drafter` that keeps earlier texts, for commands that continue the same prompts again and again."""
    if SUFFIX in (drafter, in_a_row(drafter)[0]):
        raise ForetokenError(
            f"Drafter {drafter} remembers the texts of earlier runs, and every prompt is run several times here: take "
            f"{NGRAM} in place of {SUFFIX}, since it looks up words in the same text alone."
        )


@dataclass(frozen=True)
class WorkOptions:
    """Which prompts are continued, how far, and how often.

    workload: JSONL of prompts like yours, one per line: {"prompt": "..."} or {"messages": [...]}. Default: held-out
    excerpts beside the demo models.
    prompts: Prompts of the workload that are continued.
    max_new_tokens: Tokens of each run; end-of-text does not stop one.
    rounds: Times that every configuration continues every prompt.
    seed: Seed of the first round; round i uses seed + i.
    """

    workload: str | None = None
    prompts: int = 3
    max_new_tokens: int = 96
    rounds: int = 3
    seed: int = 0

    def texts(self) -> list[Prompt]:
        """Return the prompts, before models are loaded. Raises ForetokenError for values that are out of range."""
        check_counts(max_new_tokens=self.max_new_tokens, rounds=self.rounds)
        check_seed(self.seed, self.rounds)
        return chosen_prompts(self.workload, self.prompts)


def chosen_prompts(workload: str | None, count: int | None) -> list[Prompt]:
    """Return the first `count` prompts of a workload, None: all of them; torch is not imported for it.

    workload: a JSONL file; None: the held-out excerpts beside the demo models.
    Raises ForetokenError where there are fewer, or one is empty.
    """
    if workload is None:
        return [each["prompt"] for each in options.heldout_prompts(count)]
    found = list(read_batch(workload).values())
    count = len(found) if count is None else count
    if not 1 <= count <= len(found):
        raise ForetokenError(f"Cannot take {count} prompts of the workload: it has {len(found)}, take 1 or more.")
    check_prompts(found[:count])
    return found[:count]


def encoded(engine: "Engine", prompts: list[Prompt], max_new_tokens: int) -> list[list[int]]:
    """Return the token ids, by the engine's tokenizer, of each of the `prompts`, texts or conversations.

    Raises ForetokenError for one that leaves no room for `max_new_tokens` after it in the target's context.
    """
    found = [engine.encode(prompt, f"Prompt {number}") for number, prompt in enumerate(prompts, start=1)]
    context = engine.target.lm.context
    for number, ids in enumerate(found, start=1):
        if context is not None and len(ids) + max_new_tokens > context:
            raise ForetokenError(
                f"Prompt {number} has {len(ids)} tokens and {max_new_tokens} new ones do not fit the context of "
                f"{context}: lower --max-new-tokens, or shorten it."
            )
    return found


def names(target: str | None, drafter: str | None) -> dict[str, str]:
    """Return the models for a report's header.

    target, drafter: as the command line names them, since a full path is of no use elsewhere; None: the default.
    """
    return {"target": target or "demo", "drafter": drafter or (AUTO if target else "demo")}


def show(report: "Report", as_json: bool, as_markdown: bool) -> None:
    """Print the `report` of what a command has measured; where it was interrupted, exit with the code for that.

    as_json, as_markdown: the form; plain text where both are False.
    """
    options.progress("")
    if as_json:
        print(json.dumps(report.json()))
    elif as_markdown:
        print(report.markdown())
    else:
        report.print()
    if report.interrupted:
        raise typer.Exit(exit_code())
