"""A whole training run, from files of texts to the folder of a head with its card and its provenance."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from foretoken.core.errors import ForetokenError
from foretoken.core.files import append, write
from foretoken.heads.checkpoint import save_head
from foretoken.heads.head import new_head
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.models.identity import fingerprint
from foretoken.models.parts import parts
from foretoken.models.text import Tokenizer
from foretoken.train.begin import Beginning
from foretoken.train.data import Batches, Record, commonest, digest, rows
from foretoken.train.evaluate import SIDE_BY_SIDE, Accuracy, accuracy
from foretoken.train.folder import LOG, PROVENANCE, check_own
from foretoken.train.loop import MUON, Plan, Report, Trainer
from foretoken.train.losses import RATES
from foretoken.train.states import StateCache

HELD_OUT = 50  # without held-out files, every 50th text is held out
LAST_ROOTS = 512  # places of held-out texts that a finished head is measured at: a standard error of .02
MUON_RATE = 0.01  # Muon's usual learning rate, for all kinds of heads


def train(
    lm: CausalLM,
    tokenizer: Tokenizer,
    plan: Plan,
    data: Sequence[Record],
    held_out: Sequence[Record],
    folder: Path,
    tell: Callable[[Report], None],
    made_with: dict[str, Any],
    epochs: int,
    evaluate_every: int,
    cache: Path | None,
    begin: Beginning | None,
) -> None:
    """Train a head, or go on from the checkpoint in `folder`; then write the head there, with its card and records.

    lm, tokenizer: the target's.
    plan: the settings of the command; `tokens` and `lr` may be 0, and the fingerprints and the digest are set here.
    data: the training texts.
    held_out: the texts to measure on; empty: every 50th of the training texts is held out.
    folder: where the head, README.md, provenance.json, log.jsonl and checkpoints are written.
    tell: called with each report.
    made_with: machine and versions, for provenance.json.
    epochs: number of passes through the data where the plan has no number of tokens.
    evaluate_every: number of steps between measurements on held-out texts.
    cache: folder that keeps the target's states for other heads and runs; None: they are not kept.
    begin: the model or head that the head begins with; None: none.

    Raises ForetokenError for texts or options that cannot be used.
    """
    texts, held = data, held_out
    if not held:
        held, texts = data[::HELD_OUT], [text for i, text in enumerate(data) if i % HELD_OUT]
        if not texts:
            raise ForetokenError("One text cannot be split: give more texts, or name held-out ones with --held-out.")
    length = min(plan.length, lm.context or plan.length)
    learnt, checked = rows(texts, tokenizer, length), rows(held, tokenizer, length)
    for row in (*learnt, *checked):
        if row.ids.max() >= lm.vocab_size:
            raise ForetokenError(
                f"The data has token id {row.ids.max()}, and target {lm.name} has ids from 0 to {lm.vocab_size - 1}: "
                "use texts of its own tokenizer."
            )
    per_epoch = sum(len(row.ids) for row in learnt)
    usual = MUON_RATE if plan.optimizer == MUON else RATES[plan.kind]
    plan = replace(
        plan, tokens=plan.tokens or epochs * per_epoch, lr=plan.lr or usual, data=digest(texts),
        target=fingerprint(lm), begin=None if begin is None else begin.fingerprint,
    )  # fmt: skip
    torch.manual_seed(plan.seed)
    tokens = None if plan.draft_vocab is None else commonest(learnt, plan.draft_vocab, lm.vocab_size)
    head = new_head(plan.kind, parts(lm), plan.layers, plan.levels, tokens)
    check_own(folder, asdict(plan))
    folder.mkdir(parents=True, exist_ok=True)
    kept = None
    if cache is not None:
        kept = StateCache(cache, lm)
        most = kept.check_room(min(plan.tokens, per_epoch), (*head.feature_layers, FINAL))
        print(f"The target's states in {cache} will take up to {most / 1e9:.2f} GB.", file=sys.stderr)
    trainer = Trainer(head, lm, Batches(learnt, plan.batch, plan.seed), plan, folder, kept, begin)
    log = folder / LOG
    if trainer.resume():
        _cut(log, trainer.step)
    else:
        trainer.prepare()
        log.unlink(missing_ok=True)
    measured = None

    def report(report: Report) -> None:
        nonlocal measured
        last = report.step == report.steps
        look = last or report.step % evaluate_every == 0
        measured = accuracy(head, lm, checked, LAST_ROOTS if last else SIDE_BY_SIDE) if look else None
        report = replace(report, accuracy=measured)
        append(log, json.dumps(report.json()) + "\n")
        tell(report)

    trainer.run(report, also_every=evaluate_every)
    _finish(trainer, measured or accuracy(head, lm, checked, LAST_ROOTS), made_with)


def _cut(log: Path, step: int) -> None:
    """Remove from the log the lines after the checkpoint's step, which come again, and incomplete or damaged ones."""

    def stays(line: str) -> bool:
        try:
            return line.endswith("\n") and json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError):
            return False

    if log.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write(log, lambda path: path.write_text("".join(filter(stays, lines)), encoding="utf-8"))


def _finish(trainer: Trainer, measured: Accuracy, made_with: dict[str, Any]) -> None:
    """Write the weights, configuration, card and provenance of a trained head to its folder."""
    folder, plan, target, begun = trainer.folder, trainer.plan, trainer.lm.name, trainer.begin
    save_head(trainer.head, folder)
    facts = {"plan": asdict(plan), "steps": trainer.step, "tokens": trainer.tokens, "target": target,
             "accuracy": asdict(measured), "argv": sys.argv[1:], **made_with}  # fmt: skip
    write(folder / PROVENANCE, lambda path: path.write_text(json.dumps(facts, indent=2) + "\n"))
    card = CARD.format(
        kind=plan.kind, optimizer=plan.optimizer, target=Path(target).name,
        began="" if begun is None else BEGAN.format(begun.taken, Path(begun.name).name),
        size=sum(p.numel() for p in trainer.head.parameters()),
        tokens=trainer.tokens, steps=trainer.step, batch=trainer.batches.batch,
        length=plan.length, lr=plan.lr, seed=plan.seed, roots=measured.num_roots,
        greedy=" ".join(f"{x:.3f}" for x in measured.greedy), shared=" ".join(f"{x:.3f}" for x in measured.shared),
        expected=measured.expected_length, data=plan.data[:12],
    )  # fmt: skip
    write(folder / "README.md", lambda path: path.write_text(card))


BEGAN = "\n| Began with | {} `{}` |"
CARD = """\
---
license: apache-2.0
---

# Draft head {kind} for `{target}`

Drafts for that target alone, from its hidden states: `foretoken generate --drafter FOLDER`. Trained by
`foretoken train {kind}`; `provenance.json` has the command, versions and the hash of the data.

| | |
| --- | --- |
| Parameters | {size:,}, trained in float32, saved as bfloat16 |
| Tokens seen | {tokens:,} in {steps:,} steps of {batch} rows of up to {length} |
| Learning rate | {lr:g} ({optimizer}), 5% warm-up, then linearly down to a tenth |{began}
| Data | SHA-256 {data}... |
| Seed | {seed} |
| Held-out: likeliest token is the target's, by position | {greedy} |
| Held-out: sum of min(p, q) at temperature 1, by position | {shared} |
| Expected accepted length of a greedy chain, positions taken as independent | {expected:.2f} |

By position means: given the true tokens before it, from {roots} random places of held-out texts.
"""
