"""`foretoken generate`: the main job."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options
from foretoken.cli.comparison import compared, warm
from foretoken.cli.groups import EngineOptions, TextOptions, grouped
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts
from foretoken.core.messages import Message, check_messages, check_text

if TYPE_CHECKING:
    from foretoken.cli.tints import Tints
    from foretoken.engine import Chunk, Engine
    from foretoken.stats import Stats
    from foretoken.trace import Trace

Prompt = str | list[Message]  # a text to continue, or a conversation to answer


@grouped
def generate(
    engine: EngineOptions,
    text: TextOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from stdin. Default: a demo prompt.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer the prompt as a user's message, by the model's chat template.")
    ] = False,
    batch_file: Annotated[
        str | None,
        typer.Option(
            help='JSONL of prompts, {"prompt": "..."} or {"messages": [...]} (a conversation) a line; line i uses seed '
            "+ i."
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Prompts of a batch file decoded side by side.")] = 8,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also run plain decoding, three times in turn with this method, and print the speed-up."
        ),
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Write a page that shows every step in a browser: the drafted tree, the accepted path, p and q of its "
            "tokens. FILE.html; it needs no network."
        ),
    ] = None,
    json_: options.Json = False,
) -> None:
    """Continue a text, faster than plain decoding and with the same output distribution.

    The text streams to stdout, statistics follow on stderr. With --chat it is the answer to a user's message.
    """
    if batch_file is not None and compare:
        raise ForetokenError("--compare measures one prompt: leave it out, or --batch-file.")
    if text.show_drafts and json_:
        raise ForetokenError("--show-drafts tints printed text: leave it out, or --json.")
    if trace is not None:
        from foretoken.core.files import check_file

        check_file(Path(trace))
    prompts = _prompts(prompt, batch_file, engine.target, chat or text.system is not None, text.system)
    options.check_prompts([each for each in prompts if isinstance(each, str)])
    check_counts(max_batch=max_batch)
    text.check(len(prompts))
    loaded = engine.load(text.seed, max_batch)
    order = Order(
        text.max_new_tokens,
        text.first_seed(),
        text.arguments(),
        text.show_drafts,
        json_,
        _trace(loaded) if trace is not None else None,
    )
    try:
        if batch_file is None:
            _one(loaded, prompts[0], order, compare)
        else:
            _batch(loaded, prompts, order)
    finally:
        if trace is not None and order.trace is not None and order.trace.texts:
            order.trace.save(trace)


@dataclass(frozen=True)
class Order:
    """What is wanted of the prompts. arguments: of `Engine.generate`, besides those that have a field of their own."""

    max_new_tokens: int
    seed: int
    arguments: dict[str, Any]
    show_drafts: bool
    as_json: bool
    trace: "Trace | None"

    @property
    def options(self) -> dict[str, Any]:
        """Of `Engine.stream`."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "observer": self.trace,
            **self.arguments,
        }

    def tints(self, engine: "Engine", prompt: Prompt) -> "Tints | None":
        if not self.show_drafts:
            return None
        from foretoken.cli.tints import Tints

        return Tints(engine, prompt, self.arguments["stop"])


def _trace(engine: "Engine") -> "Trace":
    from foretoken.trace import Trace

    return Trace(engine)


def _prompts(prompt: str | None, batch_file: str | None, target: str | None, chat: bool, system: str | None) -> list:
    """Those asked for. chat: whether texts are messages of a user, after the system's where there is one."""
    if batch_file is not None:
        if prompt is not None:
            raise ForetokenError("Both a prompt and --batch-file were given: give one of them.")
        prompts = read_batch(batch_file)
    elif prompt is not None:
        prompts = [_stdin() if prompt == "-" else prompt]
        check_text(prompts[0], "The prompt")
    elif target is not None or chat:
        raise ForetokenError("No prompt was given: write one, or - to read it from stdin.")
    else:
        prompts = [options.heldout_prompts()[0]["prompt"]]
        last = prompts[0].rstrip("\n").rsplit("\n", 1)[-1].strip()
        print(f"foretoken: no prompt named; the text begins with a demo prompt, up to {last!r}.\n", file=sys.stderr)
    return [_asked(each, system) if chat else each for each in prompts]


def _asked(prompt: Prompt, system: str | None) -> list[Message]:
    """The prompt as a conversation, with the system's message unless it has one."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is None or messages[0]["role"] == "system":
        return messages
    check_text(system, "The system message")
    return [{"role": "system", "content": system}, *messages]


def _stdin() -> str:
    if sys.stdin is None:
        raise ForetokenError("The prompt is - and stdin is closed: write the prompt itself, or open stdin.")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ForetokenError(f"The prompt on stdin is not UTF-8: {error.reason} at byte {error.start + 1}.") from None


def read_batch(path: str) -> list[Prompt]:
    """The prompts of a JSONL file: {"prompt": "..."}, {"messages": [...]}, or a text by itself, a line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # with the mark that some editors put first
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ForetokenError(f"Cannot read batch file {path}: {why}.") from error
    prompts = [_prompt_of(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ForetokenError(f"Batch file {path} has no prompts.")
    return prompts


def _prompt_of(line: str, number: int, path: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict) and "messages" in record and "prompt" not in record:
        check_messages(record["messages"], f"The conversation of line {number} of {path}")
        return record["messages"]
    prompt = record.get("prompt") if isinstance(record, dict) and "messages" not in record else record
    if not isinstance(prompt, str):
        raise ForetokenError(
            f'Line {number} of {path} is not a prompt: write {{"prompt": "..."}} or {{"messages": [...]}} on each line.'
        )
    check_text(prompt, f"The prompt of line {number} of {path}")
    return prompt


def _one(engine: "Engine", prompt: Prompt, order: Order, compare: bool) -> None:
    if compare:
        warm(engine, prompt, order.max_new_tokens, order.seed, order.arguments)
    tints = order.tints(engine, prompt)
    text, ids, last, interrupted = "", [], None, False
    try:
        for chunk in engine.stream(prompt, **order.options):
            if last is None and not order.as_json:
                _begin(prompt, tints is not None)  # not before the input has proved good
            last = chunk
            text += last.text
            ids += last.token_ids
            if not order.as_json:
                _write(tints.push(last) if tints else last.text)
    except KeyboardInterrupt:
        print("\nforetoken: interrupted; this is what was generated.", file=sys.stderr)
        compare, interrupted = False, True
    if last is None:
        raise KeyboardInterrupt
    record = _record(engine, text, ids, last, order.seed)
    if compare:
        try:
            record |= compared(engine, prompt, len(ids), order.seed, order.arguments)
        except KeyboardInterrupt:
            print("\nforetoken: interrupted while comparing; the text is complete.", file=sys.stderr)
            interrupted = True
    if order.as_json:
        print(json.dumps(record))
    else:
        _write("\n")
        print(_summary(engine, record, last.stats), file=sys.stderr)
    if interrupted:
        raise typer.Exit(130)


def _begin(prompt: Prompt, tinted: bool) -> None:
    """The text to continue; of a conversation only the answer is written."""
    if tinted:
        from foretoken.cli.tints import legend

        print(f"foretoken: {legend()}\n", file=sys.stderr)
    if isinstance(prompt, str):
        _write(prompt)


def _batch(engine: "Engine", prompts: list[Prompt], order: Order) -> None:
    """Each result is printed when its prompt is done, so that an interrupt loses only what is under way."""
    texts: dict[int, str] = {}
    shown: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    tints = {i: order.tints(engine, prompt) for i, prompt in enumerate(prompts)} if order.show_drafts else {}
    if tints:
        _begin([], True)
    for chunk in engine.stream(prompts, **order.options):
        i = chunk.index
        texts[i] = texts.get(i, "") + chunk.text
        tint = tints.get(i)
        shown[i] = shown.get(i, "") + (tint.push(chunk) if tint else chunk.text)
        ids.setdefault(i, []).extend(chunk.token_ids)
        if chunk.finished:
            record = _record(engine, texts.pop(i), ids.pop(i), chunk, order.seed + i)
            _print_finished(chunk, prompts[i], shown.pop(i), record if order.as_json else None)


def _print_finished(chunk: "Chunk", prompt: Prompt, shown: str, record: dict[str, Any] | None) -> None:
    """record: where JSON is wanted."""
    if record is not None:
        asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        print(json.dumps({"index": chunk.index, **asked, **record}), flush=True)
    else:
        print(f"--- {chunk.index + 1}: {_num(chunk.stats.num_tokens, 'token')}, {chunk.finish_reason}", file=sys.stderr)
        _write((prompt if isinstance(prompt, str) else "") + shown + "\n")


def _record(engine: "Engine", text: str, ids: list[int], last: "Chunk", seed: int) -> dict[str, Any]:
    """finish_reason: None for a text that was interrupted."""
    stats = last.stats
    return {
        "text": text,
        "token_ids": ids,
        "finish_reason": last.finish_reason,
        "tokens_per_s": stats.tokens_per_s,
        "block_efficiency": stats.block_efficiency,
        "acceptance_rate": stats.acceptance_rate,
        "num_target_forwards": stats.num_target_forwards,
        "num_plain": stats.num_plain,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "ttft_s": stats.ttft_s,
        "seed": seed,
        "target": engine.target.name,
        "drafter": engine.drafter.name,
        "vocab": engine.recipe.vocab,
        "tree": engine.tree,
        "verifier": engine.verifier.name,
    }


def _summary(engine: "Engine", record: dict[str, Any], stats: "Stats") -> str:
    from foretoken.decode import NoDrafter

    lines = [f"\n{_num(stats.num_tokens, 'token')} in {stats.wall_s:.2f} s: {stats.tokens_per_s:.1f} tokens/s"]
    if "speedup" in record:
        decoding = record["decoding_speedup"]
        after = "" if decoding is None else f" ({decoding:.2f} x once the prompt is read)"
        lines.append(
            f"without printing   {record['tokens_per_s']:.1f} tokens/s, plain decoding in turn with it "
            f"{record['plain_tokens_per_s']:.1f}: speed-up {record['speedup']:.2f} x{after}, same output distribution"
        )
    if isinstance(engine.drafter, NoDrafter):
        settings = "plain decoding: no drafter"
    else:
        lines += [
            f"block efficiency   {record['block_efficiency']:.2f} tokens per target forward, bonus included",
            f"acceptance rate    {record['acceptance_rate']:.2f} of {_num(record['num_drafted'], 'drafted token')}"
            if stats.num_drafted
            else "nothing was drafted",
        ]
        by = f" by {record['vocab']}" if record["vocab"] else ""
        settings = f"{record['tree']}, {record['verifier']}, drafter {record['drafter']}{by}"
    return "\n".join(
        [
            *lines,
            f"first token after  {record['ttft_s'] * 1000:.0f} ms",
            f"finish reason      {record['finish_reason'] or 'interrupted'}",
            *_plain_steps(engine, stats),
            f"seed {record['seed']}, {settings}",
        ]
    )


def _plain_steps(engine: "Engine", stats: "Stats") -> list[str]:
    """Of method auto: at how many steps it did not draft, and what that was decided by."""
    from foretoken.draft.auto import AutoDrafter

    if not isinstance(engine.drafter, AutoDrafter):
        return []
    acceptance, cost = engine.drafter.outlook
    return [
        f"decoded plainly    at {stats.num_plain} of {_num(stats.num_target_forwards, 'step')}: a draft is expected "
        f"to be accepted at {acceptance:.2f}, a step with one takes {cost:.2f} plain steps and pays below "
        f"{1 + acceptance:.2f}"
    ]


def _num(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
