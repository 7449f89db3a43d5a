"""`foretoken generate`: the main job."""

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options
from foretoken.cli.comparison import compared, warm
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_sampling, check_seed, check_stops

if TYPE_CHECKING:
    from foretoken.engine import Chunk, Engine
    from foretoken.stats import Stats


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from stdin. Default: a demo prompt.")
    ] = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    method: options.Method = None,
    tree: options.LargestTree = None,
    verifier: options.Verifier = None,
    law: options.Law = None,
    vocab: options.Vocab = None,
    draft_probability: options.DraftProbability = None,
    profile: options.Profile = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; 1 is the model's own distribution.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens with this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Divide scores of tokens seen before.")] = 1.0,
    frequency_penalty: Annotated[float, typer.Option(help="Subtract this for every earlier occurrence.")] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="Subtract this once from tokens generated before.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be repeated.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    seed: options.Seed = None,
    batch_file: Annotated[
        str | None, typer.Option(help='JSONL of prompts, {"prompt": "..."} a line; line i uses seed + i.')
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Prompts of a batch file decoded side by side.")] = 8,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also run plain decoding, three times in turn with this method, and print the speed-up."
        ),
    ] = False,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    compile: options.Compile = "auto",
) -> None:
    """Continue a text, faster than plain decoding and with the same output distribution.

    The text streams to stdout, statistics follow on stderr.
    """
    prompts = _prompts(prompt, batch_file, target)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
    }
    options.check_prompts(prompts)
    check_counts(max_new_tokens=max_new_tokens, max_batch=max_batch)
    check_seed(seed, len(prompts))
    check_sampling(**sampling)
    check_stops(stop or ())
    method = method or options.method_for(seed, profile, tree, verifier, law, draft_probability)
    engine = options.load_engine(
        *(target, drafter, tree, verifier, law, device, dtype, max_batch, vocab, method, compile),
        draft_probability=draft_probability,
        profile=profile,
    )
    arguments = {"stop": tuple(stop or ()), **sampling}
    if seed is None:
        seed = random.randrange(2**31)
    if batch_file is None:
        _one(engine, prompts[0], max_new_tokens, seed, arguments, compare, json_)
    else:
        _batch(engine, prompts, max_new_tokens, seed, arguments, json_)


def _prompts(prompt: str | None, batch_file: str | None, target: str | None) -> list[str]:
    if batch_file is not None:
        if prompt is not None:
            raise ForetokenError("Both a prompt and --batch-file were given: give one of them.")
        return read_prompts(batch_file)
    if prompt == "-":
        return [sys.stdin.read()]
    if prompt is not None:
        return [prompt]
    if target is not None:
        raise ForetokenError("No prompt was given: write one, or - to read it from stdin.")
    given = options.heldout_prompts()[0]["prompt"]
    last = given.rstrip("\n").rsplit("\n", 1)[-1].strip()
    print(f"foretoken: no prompt named; the text begins with a demo prompt, up to {last!r}.\n", file=sys.stderr)
    return [given]


def read_prompts(path: str) -> list[str]:
    """Those of a JSONL file, {"prompt": "..."} a line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ForetokenError(f"Cannot read batch file {path}: {why}.") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompt = record if isinstance(record, str) else record["prompt"]
            if not isinstance(prompt, str):
                raise TypeError("a prompt is a text")
            prompts.append(prompt)
        except (ValueError, KeyError, TypeError) as error:
            raise ForetokenError(
                f'Line {number} of {path} is not a prompt: write {{"prompt": "..."}} on each line.'
            ) from error
    if not prompts:
        raise ForetokenError(f"Batch file {path} has no prompts.")
    return prompts


def _one(
    engine: "Engine",
    prompt: str,
    max_new_tokens: int,
    seed: int,
    arguments: dict[str, Any],
    compare: bool,
    as_json: bool,
) -> None:
    if compare:
        warm(engine, prompt, max_new_tokens, seed, arguments)
    text, ids, last, interrupted = "", [], None, False
    try:
        for chunk in engine.stream(prompt, max_new_tokens=max_new_tokens, seed=seed, **arguments):
            if last is None and not as_json:
                _write(prompt)  # not before the input has proved good
            last = chunk
            text += last.text
            ids += last.token_ids
            if not as_json:
                _write(last.text)
    except KeyboardInterrupt:
        print("\nforetoken: interrupted; this is what was generated.", file=sys.stderr)
        compare, interrupted = False, True
    if last is None:
        raise KeyboardInterrupt
    record = _record(engine, text, ids, last, seed)
    if compare:
        try:
            record |= compared(engine, prompt, len(ids), seed, arguments)
        except KeyboardInterrupt:
            print("\nforetoken: interrupted while comparing; the text is complete.", file=sys.stderr)
            interrupted = True
    if as_json:
        print(json.dumps(record))
    else:
        _write("\n")
        print(_summary(engine, record, last.stats), file=sys.stderr)
    if interrupted:
        raise typer.Exit(130)


def _batch(
    engine: "Engine", prompts: list[str], max_new_tokens: int, seed: int, arguments: dict[str, Any], as_json: bool
) -> None:
    """Each result is printed when its prompt is done, so that an interrupt loses only what is under way."""
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    for chunk in engine.stream(prompts, max_new_tokens=max_new_tokens, seed=seed, **arguments):
        texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
        ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        if chunk.finished:
            _print_finished(
                engine,
                chunk,
                prompts[chunk.index],
                texts.pop(chunk.index),
                ids.pop(chunk.index),
                seed + chunk.index,
                as_json,
            )


def _print_finished(
    engine: "Engine", chunk: "Chunk", prompt: str, text: str, ids: list[int], seed: int, as_json: bool
) -> None:
    if as_json:
        record = _record(engine, text, ids, chunk, seed)
        print(json.dumps({"index": chunk.index, "prompt": prompt, **record}), flush=True)
    else:
        print(f"--- {chunk.index + 1}: {_num(chunk.stats.num_tokens, 'token')}, {chunk.finish_reason}", file=sys.stderr)
        _write(prompt + text + "\n")


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
        "vocab": _vocab(engine),
        "tree": engine.tree,
        "verifier": engine.verifier.name,
    }


def _vocab(engine: "Engine") -> str | None:
    """How a drafter with another vocabulary drafts; None for any other."""
    from foretoken.choices import VOCABS
    from foretoken.draft.auto import AutoDrafter
    from foretoken.drafters import way_of

    drafter = engine.drafter.inner if isinstance(engine.drafter, AutoDrafter) else engine.drafter
    way = way_of(drafter)
    return way if way in VOCABS else None


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
