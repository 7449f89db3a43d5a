"""`foretoken train`: a draft head for a target."""

import json
import sys
from pathlib import Path
from typing import Literal

from foretoken.cli import options
from foretoken.cli.command import command
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_folder, check_readable
from foretoken.core.limits import check_choice, check_counts, check_seed
from foretoken.heads import HEADS
from foretoken.train.folder import CHECKPOINT, check_out

MOST = 64  # levels, and layers


@command
def train(
    head: str,
    /,
    *,
    data: list[str],
    out: Path,
    target: str | None = None,
    held_out: list[str] | None = None,
    tokens: int | None = None,
    epochs: int = 10,
    batch: int = 4,
    length: int = 2048,
    lr: float | None = None,
    layers: int | None = None,
    levels: int | None = None,
    optimizer: Literal["adamw", "muon"] = "adamw",
    draft_vocab: int | None = None,
    roots: float = 1.0,
    begin: str | None = None,
    seed: int = 0,
    evaluate_every: int = 100,
    cache: Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    json_: bool = False,
) -> None:
    """Train a draft head on the target's hidden states; the target stays as it is. See docs/drafters.md.

    head: $heads.
    data: Text file, or .jsonl of texts or conversations; may be given several times.
    out: Folder of the head; a run stopped there goes on.
    target: Model folder (Hugging Face) or hub id. Default: the demo target.
    held_out: Texts to measure on, in the same forms. Default: every 50th text.
    tokens: Tokens to train on. Default: --epochs times the data.
    epochs: Passes through the data.
    batch: Texts per step.
    length: The most tokens of a text, up to the target's context; longer texts are cut into pieces.
    lr: Learning rate. Default: the published one of the head.
    layers: Transformer layers (dflash, jetflow, gumiho, eagle) or MLP blocks (medusa, hydra).
    levels: Levels that the head drafts; the 2 serial ones of gumiho are counted too.
    optimizer: adamw as published; muon learns small heads in far fewer tokens.
    draft_vocab: Tokens that an eagle3 head can draft: the most frequent of the data. Default: all.
    roots: Share of the positions from which eagle3's later steps learn; 0.3 halves the time.
    begin: Folder of a trained head of this kind to go on from, for a target that has changed since, say; or of a small
    Llama of the target's sizes, whose last layers an eagle or gumiho head begins with.
    seed: Seed of the first weights, of the order of the texts and of the noise.
    evaluate_every: Steps between measurements on held-out text.
    cache: Folder that keeps the target's states, for other heads and runs on these texts.
    device: cpu, cuda, cuda:N. Default: the first accelerator, else cpu.
    dtype: float32, bfloat16, float16, of the target. Default: float32 on a CPU, else the checkpoint's own.
    """
    check_counts(
        tokens=tokens, epochs=epochs, batch=batch, length=length, evaluate_every=evaluate_every, draft_vocab=draft_vocab
    )
    if not 0 < roots <= 1:
        raise ForetokenError(f"--roots is {roots}: it must be above 0 and at most 1.")
    if lr is not None and not 0 < lr < 1:
        raise ForetokenError(f"--lr is {lr}: it must lie between 0 and 1.")
    for name, value in (("levels", levels), ("layers", layers)):
        if value is not None and not 1 <= value <= MOST:
            raise ForetokenError(f"--{name} is {value}: it must be from 1 to {MOST}.")
    check_seed(seed)
    check_choice("head", head, HEADS)
    for file in (*data, *(held_out or ())):
        check_readable(file)
    check_out(out)
    if cache is not None:
        check_folder(cache)
    if begin is not None and Path(begin).resolve() == out.resolve():
        raise ForetokenError(f"--begin and --out are both {out}, whose head would be overwritten: name another --out.")
    options.check_models(target, begin, device=device, dtype=dtype)
    from foretoken.heads.checkpoint import head_kind, load_to_train
    from foretoken.heads.head import check_sizes
    from foretoken.measure.machine import machine
    from foretoken.models.load import choose_device, choose_dtype, load_frozen, load_tokenizer
    from foretoken.models.parts import parts
    from foretoken.train.begin import Beginning
    from foretoken.train.data import SHORTEST, records
    from foretoken.train.loop import Plan, Report
    from foretoken.train.run import train as run

    if length < SHORTEST:
        raise ForetokenError(f"--length is {length}: it must be at least {SHORTEST}, since shorter texts are left out.")
    check_sizes(head, layers, levels, draft_vocab is not None)
    texts, measured = list(records(data)), list(records(held_out)) if held_out else []
    options.quiet()
    source = target or str(options.demo_folder() / "target")
    chosen = choose_device(device)
    lm = load_frozen(source, chosen, choose_dtype(dtype))
    first = None
    if begin is not None:
        other = load_to_train(begin, parts(lm)) if head_kind(begin) else load_frozen(begin, chosen, lm.dtype)
        first = Beginning(begin, other)
    options.spare_threads(lm.model.num_parameters())

    def tell(report: Report) -> None:
        if json_:
            print(json.dumps(report.json()), flush=True)
        else:
            options.progress(report.text())

    asked = Plan(
        head, tokens or 0, seed=seed, batch=batch, length=length, lr=lr or 0.0, layers=layers, levels=levels,
        optimizer=optimizer, draft_vocab=draft_vocab, roots=roots,
    )  # fmt: skip
    try:
        run(
            lm, load_tokenizer(source), asked, texts, measured, out, tell, machine(chosen), epochs, evaluate_every,
            cache, first,
        )  # fmt: skip
    except KeyboardInterrupt:
        saved = (out / CHECKPOINT).exists()
        what = f"goes on from the last checkpoint in {out}" if saved else "begins anew: there is no checkpoint yet"
        print(f"\nStopped: the same command {what}.", file=sys.stderr)
        raise
    except OSError as error:
        raise ForetokenError(f"Cannot use {error.filename or out}: {error.strerror or error}.") from error
    if not json_:
        print(f"\nWrote {out}: foretoken generate --target {source} --drafter {out}")
