"""What commands that measure share: their options, the prompts that they continue, and how a report is printed."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import options
from foretoken.cli.generate import Prompt, read_batch
from foretoken.core.errors import ForetokenError

if TYPE_CHECKING:
    from foretoken.engine import Engine
    from foretoken.measure.report import Report

WorkloadFile = Annotated[
    str | None,
    typer.Option(
        help='JSONL of prompts like yours, one per line: {"prompt": "..."} or {"messages": [...]}. Default: held-out '
        "excerpts beside the demo models."
    ),
]
Prompts = Annotated[int, typer.Option(help="Prompts of the workload that are continued.")]
NewTokens = Annotated[int, typer.Option(help="Tokens of each run; end-of-text does not stop one.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of text.")]


def chosen_prompts(workload: str | None, count: int) -> list[Prompt]:
    """The first `count` prompts, read without torch.

    workload: the file; None: the held-out excerpts.
    Raises ForetokenError where there are fewer, or one is empty.
    """
    if workload is None:
        return [each["prompt"] for each in options.heldout_prompts(count)]
    found = read_batch(workload)
    if not 1 <= count <= len(found):
        raise ForetokenError(f"Cannot take {count} prompts of the workload: it has {len(found)}, take 1 or more.")
    options.check_prompts([each for each in found[:count] if isinstance(each, str)])
    return found[:count]


def encoded(engine: "Engine", prompts: list[Prompt], max_new_tokens: int) -> list[list[int]]:
    """Token ids of each prompt, of a conversation by the tokenizer's chat template.

    Raises ForetokenError for a prompt that leaves no room for so many new tokens in the target's context.
    """
    from foretoken.models.text import chat_prompt, encode

    tokenizer, context = engine.tokenizer, engine.target.lm.context
    assert tokenizer is not None, "a target named by folder has a tokenizer"
    found = []
    for number, prompt in enumerate(prompts, start=1):
        ids = encode(tokenizer, prompt) if isinstance(prompt, str) else chat_prompt(tokenizer, prompt)
        if not ids:
            raise ForetokenError(f"Prompt {number} is empty: give at least one token.")
        if context is not None and len(ids) + max_new_tokens > context:
            raise ForetokenError(
                f"Prompt {number} has {len(ids)} tokens and {max_new_tokens} new ones do not fit the context of "
                f"{context}: lower --max-new-tokens, or shorten it."
            )
        found.append(ids)
    return found


def names(target: str | None, drafter: str | None) -> dict[str, str]:
    """The models of a report's header: as they were named, since a full path is of no use elsewhere."""
    return {"target": target or "demo", "drafter": drafter or ("ngram" if target else "demo")}


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
