"""`foretoken generate`: the main job."""

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretoken.cli.command import command
from foretoken.cli.comparison import compared, warm
from foretoken.cli.measuring import check_forgets
from foretoken.cli.options import EngineOptions, RayOptions, TextOptions
from foretoken.cli.prompts import Prompt, given
from foretoken.cli.tints import Tints, legend
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_file
from foretoken.core.interrupts import exit_code
from foretoken.core.limits import check_counts
from foretoken.recipe import NO_DRAFTER

if TYPE_CHECKING:
    from foretoken.engine import Chunk, Engine
    from foretoken.trace import Trace

# The statistics of a text that `--json` prints.
FIGURES = (
    "tokens_per_s", "decoding_tokens_per_s", "block_efficiency", "acceptance_rate", "num_target_forwards", "num_plain",
    "num_drafted", "num_accepted", "ttft_s",
)  # fmt: skip


@command
def generate(
    prompt: str | None = None,
    /,
    *,
    engine: EngineOptions,
    text: TextOptions,
    cluster: RayOptions,
    chat: bool = False,
    batch_file: str | None = None,
    max_batch: int = 8,
    compare: bool = False,
    trace: str | None = None,
    out: str | None = None,
    json_: bool = False,
) -> None:
    """Continue a text, faster than plain decoding and with the same output distribution.

    The text streams to stdout, statistics follow on stderr. With --chat it is the answer to a user's message.

    prompt: Text to continue; - reads it from stdin. Default: a demo prompt.
    chat: Answer the prompt as a user's message, by the model's chat template.
    batch_file: JSONL of prompts, {"prompt": "..."} or {"messages": [...]} (a conversation) per line; - reads it from
    stdin. Line i uses seed + i. Several texts are printed as they are done, each below a line ==> NUMBER <==.
    max_batch: Prompts of a batch file decoded side by side.
    compare: Also run plain decoding, three times in turn with this method, and print the speed-up.
    trace: Write a page, FILE.html, that shows every step in a browser, without a network: the drafted tree, the
    accepted path, p and q of its tokens.
    out: JSONL file that the texts of --ray are appended to, which also needs --batch-file and --seed. Those that it has
    already are not written again, so that a run that was killed goes on where it was.
    json_: Print JSON instead of text: one object per text, with its statistics and settings. See docs/quickstart.md.
    """
    if batch_file is not None and compare:
        raise ForetokenError("--compare measures one prompt: leave it out, or --batch-file.")
    if compare:
        check_forgets(engine.drafter)
        if engine.drafter == NO_DRAFTER:
            raise ForetokenError("--compare runs a drafter beside plain decoding: leave it out, or --drafter none.")
    if text.show_drafts and json_:
        raise ForetokenError("--show-drafts tints printed text: leave it out, or --json.")
    if trace is not None:
        check_file(Path(trace))
        if Path(trace).suffix.lower() not in (".html", ".htm"):
            raise ForetokenError(f"--trace {trace} is a page for a browser: name it FILE.html.")
    asked = given(prompt, batch_file, engine.target is None, chat or text.system is not None, text.system)
    prompts = list(asked.values())
    check_counts(max_batch=max_batch)
    text.check(len(prompts))
    if conversations := {which: each for which, each in asked.items() if not isinstance(each, str)}:
        engine.check_chat(conversations)
    if cluster.ray is not None or out is not None:
        shown = {"--trace": trace, "--show-drafts": text.show_drafts, "--json": json_}
        if unused := [name for name, asked in shown.items() if asked]:
            raise ForetokenError(f"A batch on Ray writes its texts to --out alone: leave out {' and '.join(unused)}.")
        if cluster.ray is None or out is None or batch_file is None or text.seed is None:
            raise ForetokenError("A batch on Ray needs all four of --batch-file, --ray, --out and --seed.")
        _on_ray(engine, prompts, text, max_batch, cluster, out)
        return
    loaded = engine.load(text.seed, max_batch)
    record = None
    if trace is not None:
        from foretoken.trace import Trace

        record = Trace(loaded)
    try:
        if batch_file is None:
            _one(loaded, prompts[0], text, json_, compare, record)
            if engine.target is None and not json_:
                said = "no --target: this is the small demo model, which writes Python; `foretoken fetch` lists others"
                print(said, file=sys.stderr)
        else:
            _batch(loaded, prompts, text, json_, record)
    finally:
        if trace is not None and record is not None and record.texts:
            record.save(trace)


def _on_ray(
    engine: EngineOptions, prompts: list[Prompt], text: TextOptions, max_batch: int, cluster: RayOptions, out: str
) -> None:
    """Write the texts of a batch file to `out`, by actors on Ray."""
    assert cluster.ray is not None
    resources = cluster.resources(engine.device)
    check_file(Path(out))
    options = text.arguments()
    seed = options.pop("seed")
    from foretoken.cluster.batch import generate_on_ray

    anywhere = engine.anywhere()
    load, named = partial(anywhere.load, seed, max_batch), anywhere.named(seed)
    done = generate_on_ray(load, prompts, seed, options, Path(out), cluster.ray, max_batch, named, **resources)
    print(f"{_num(done, 'text')} written to {out}, which has all {len(prompts)}", file=sys.stderr)


@dataclass
class Text:
    """The text of one prompt as it grows.

    prompt: what it continues or answers.
    options: how the command's texts are drawn and shown.
    text, ids: what was generated so far, as text and as token ids.
    last: its newest chunk; None before the first.
    """

    engine: "Engine"
    prompt: Prompt
    seed: int
    options: TextOptions
    text: str = ""
    ids: list[int] = field(default_factory=list)
    last: "Chunk | None" = None

    def __post_init__(self) -> None:
        self._tints = Tints(self.engine, self.prompt, self.options.stop) if self.options.show_drafts else None

    def add(self, chunk: "Chunk") -> str:
        """Add a chunk to the text. Returns what the chunk adds to the text as it is shown."""
        self.last = chunk
        self.text += chunk.text
        self.ids += chunk.token_ids
        return self._tints.push(chunk) if self._tints else chunk.text

    def record(self) -> dict[str, Any]:
        """Return what `--json` prints; finish_reason is None in it for a text that was interrupted."""
        engine, last = self.engine, self.last
        assert last is not None
        return {
            "text": self.text,
            "token_ids": self.ids,
            "finish_reason": last.finish_reason,
            **{name: getattr(last.stats, name) for name in FIGURES},
            "seed": self.seed,
            "temperature": self.options.temperature,
            "target": engine.target.name,
            "drafter": engine.drafter.name,
            "vocab": engine.recipe.vocab,
            "tree": engine.tree,
            "verifier": engine.rule,
        }


def _one(
    engine: "Engine", prompt: Prompt, options: TextOptions, as_json: bool, compare: bool, trace: "Trace | None"
) -> None:
    """Write one text as its tokens are accepted, then its statistics; Ctrl-C keeps what there is."""
    from foretoken.kernel.compile import compilations

    arguments = options.arguments()
    if compare:
        warm(engine, prompt, arguments)
    text, interrupted = Text(engine, prompt, arguments["seed"], options), False
    before = compilations()[0]
    try:
        for chunk in engine.stream(prompt, observer=trace, **arguments):
            begins = text.last is None  # not before the input has proved good
            added = text.add(chunk)
            if not as_json:
                if begins:
                    _begin(prompt, options.show_drafts)
                print(added, end="", flush=True)
    except KeyboardInterrupt:
        if text.last is None:
            raise
        print("\nforetoken: interrupted; this is what was generated.", file=sys.stderr)
        compare, interrupted = False, True
    record, compiled = text.record(), compilations()[0] > before
    if compare:
        try:
            record |= compared(engine, prompt, {**arguments, "max_new_tokens": len(text.ids)})
        except KeyboardInterrupt:
            print("\nforetoken: interrupted while comparing; the text is complete.", file=sys.stderr)
            interrupted = True
    if as_json:
        print(json.dumps(record))
    else:
        print(flush=True)
        print(_summary(text, record, compiled), file=sys.stderr)
    if interrupted:
        raise typer.Exit(exit_code())


def _batch(engine: "Engine", prompts: list[Prompt], options: TextOptions, as_json: bool, trace: "Trace | None") -> None:
    """Write many texts, each when it is done, so that an interrupt loses only those under way."""
    arguments = options.arguments()
    texts = [Text(engine, prompt, arguments["seed"] + i, options) for i, prompt in enumerate(prompts)]
    shown, parting = [""] * len(texts), ""
    if options.show_drafts:
        _begin("", True)
    for chunk in engine.stream(prompts, observer=trace, **arguments):
        i, text = chunk.index, texts[chunk.index]
        shown[i] += text.add(chunk)
        if chunk.finished and as_json:
            asked = {"prompt": text.prompt} if isinstance(text.prompt, str) else {"messages": text.prompt}
            print(json.dumps({"index": i, **asked, **text.record()}), flush=True)
        elif chunk.finished:
            if len(texts) > 1:
                print(f"{parting}==> {i + 1} <==")  # as `head` and `tail` part files
                parting = "\n"
            print((text.prompt if isinstance(text.prompt, str) else "") + shown[i], flush=True)
            print(f"--- {i + 1}: {_num(chunk.stats.num_tokens, 'token')}, {chunk.finish_reason}", file=sys.stderr)


def _begin(prompt: Prompt, tinted: bool) -> None:
    """Print what stands before a text: the text that it continues, or nothing before an answer in a conversation."""
    if tinted:
        print(f"foretoken: {legend()}\n", file=sys.stderr)
    if isinstance(prompt, str):
        print(prompt, end="", flush=True)


def _summary(text: Text, record: dict[str, Any], compiled: bool) -> str:
    """Return the printed statistics of a text.

    record: what `--json` would print, and the comparison with plain decoding if there is one.
    compiled: whether machine code was compiled while the text was written.
    """
    from foretoken.decode import NoDrafter

    assert text.last is not None
    stats = text.last.stats
    first = "; machine code was compiled meanwhile: the next run is faster" if compiled else ""
    lines = [f"\n{_num(stats.num_tokens, 'token')} in {stats.wall_s:.2f} s: {stats.tokens_per_s:.1f} tokens/s{first}"]
    if "speedup" in record:
        decoding = record["decoding_speedup"]
        after = "" if decoding is None else f" ({decoding:.2f} x once the prompt is read)"
        lines.append(
            f"run again          {record['tokens_per_s']:.1f} tokens/s, warm and without printing; plain decoding in "
            f"turn with it {record['plain_tokens_per_s']:.1f}: speed-up {record['speedup']:.2f} x{after}, same output "
            "distribution"
        )
    if isinstance(text.engine.drafter, NoDrafter):
        settings = "plain decoding: no drafter"
    else:
        lines.append(f"tokens per step    {stats.block_efficiency:.2f}, the bonus token included")
        rate = f"acceptance rate    {stats.acceptance_rate:.2f} of {_num(stats.num_drafted, 'drafted token')}"
        lines.append(rate if stats.num_drafted else "nothing was drafted")
        by = f" by {record['vocab']}" if record["vocab"] else ""
        settings = f"{record['tree']}, {record['verifier']}, drafter {record['drafter']}{by}"
    lines += [
        f"first token after  {stats.ttft_s * 1000:.0f} ms",
        f"finish reason      {record['finish_reason'] or 'interrupted'}",
        *_plain_steps(text),
        f"seed {text.seed}, temperature {text.options.temperature:g}, {settings}",
    ]
    return "\n".join(lines)


def _plain_steps(text: Text) -> list[str]:
    """Return a line on the steps at which method auto did not draft, and why; no line for another method.

    text: the text; of a lookup and a model in a row, the line is on the model.
    """
    from foretoken.draft.auto import AutoDrafter
    from foretoken.draft.hybrid import model_of

    model = model_of(text.engine.drafter)
    if not isinstance(model, AutoDrafter) or text.last is None:
        return []
    stats, (acceptance, cost) = text.last.stats, model.outlook
    if not stats.num_drafted and 1 + acceptance > cost:
        return [f"decoded plainly    at {_num(stats.num_plain, 'step')}: nothing was found that could be drafted"]
    steps, whose = _num(stats.num_target_forwards, "step"), "" if model is text.engine.drafter else " of the model"
    return [
        f"decoded plainly    at {stats.num_plain} of {steps}. A step with one draft token{whose} takes {cost:.2f} "
        f"times as long as a plain one, and brings {1 + acceptance:.2f} tokens: drafting pays where it brings more "
        "than it takes"
    ]


def _num(count: int, what: str) -> str:
    """Return a number with its noun, such as "1 token" or "2 tokens"."""
    return f"{count} {what}{'' if count == 1 else 's'}"
