"""A whole training run: data in, a head with its card and its provenance out."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken.core.errors import ForetokenError
from foretoken.core.files import write
from foretoken.heads.make import Head, new_head
from foretoken.heads.save import save_head
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.models.identity import fingerprint
from foretoken.models.parts import parts
from foretoken.models.text import Tokenizer
from foretoken.train.begin import Beginning
from foretoken.train.data import Batches, Record, Row, commonest, digest, records, rows
from foretoken.train.evaluate import Accuracy, accuracy
from foretoken.train.loop import ADAMW, MUON, Plan, Report, Trainer
from foretoken.train.states import StateCache

HELD_OUT = 50  # without held-out files, every 50th text is held out


@dataclass(frozen=True)
class Options:
    """What the command asks for; None: the published default of the head."""

    kind: str
    tokens: int | None = None
    epochs: int = 10
    batch: int = 4
    length: int = 2048
    lr: float | None = None
    layers: int | None = None
    levels: int | None = None
    seed: int = 0
    optimizer: str = ADAMW
    draft_vocab: int | None = None
    roots: float = 1.0


MUON_RATE = 0.01
RATES = {"gumiho": 2e-4, "eagle": 3e-5, "eagle3": 5e-5, "medusa": 1e-3, "hydra": 1e-3}  # as published


@dataclass(frozen=True)
class Progress:
    report: Report
    accuracy: Accuracy | None

    def text(self) -> str:
        r = self.report
        line = (
            f"step {r.step}/{r.steps}  loss {r.loss:.3f}  {r.tokens_per_s:,.0f} tokens/s  {r.left_s / 60:.1f} min left"
        )
        if self.accuracy is not None:
            shares = " ".join(f"{x:.2f}" for x in self.accuracy.greedy)
            line += f"  held-out accuracy by position {shares}, expected length {self.accuracy.expected_length:.2f}"
        return line

    def json(self) -> dict[str, Any]:
        out = asdict(self.report)
        if self.accuracy is not None:
            out |= {**asdict(self.accuracy), "expected_length": self.accuracy.expected_length}
        return out


def train(
    lm: CausalLM,
    tokenizer: Tokenizer,
    options: Options,
    data: Sequence[str],
    held_out: Sequence[str],
    folder: Path,
    tell: Callable[[Progress], None],
    made_with: dict[str, Any],
    evaluate_every: int = 100,
    cache: Path | None = None,
    note: Callable[[str], None] = lambda _: None,
    begin: Beginning | None = None,
) -> Head:
    """Train, or go on from the checkpoint in `folder`; writes the head, its card, provenance.json and log.jsonl there.

    made_with: machine and versions, for the record. cache: folder that keeps the target's states for other heads and
    runs; `note` is told what it may take.
    """
    if not 0 <= options.seed < 2**32:
        raise ForetokenError(f"seed is {options.seed}: it must be in 0..2**32 - 1.")
    texts = list(records(data))
    if held_out:
        held = list(records(held_out))
    else:
        held, texts = texts[::HELD_OUT], [text for i, text in enumerate(texts) if i % HELD_OUT]
        if not texts:
            raise ForetokenError("One text cannot be split: give more texts, or name held-out ones with --held-out.")
    learnt, checked = rows(texts, tokenizer, options.length), rows(held, tokenizer, options.length)
    for row in (*learnt, *checked):
        if row.ids.max() >= lm.vocab_size:
            raise ForetokenError(
                f"The data has token id {row.ids.max()}, and target {lm.name} has ids from 0 to {lm.vocab_size - 1}: "
                "use texts of its own tokenizer."
            )
    plan = _plan(options, learnt, texts, lm, begin)
    torch.manual_seed(options.seed)
    tokens = None if options.draft_vocab is None else commonest(learnt, options.draft_vocab, lm.vocab_size)
    head = new_head(options.kind, parts(lm), options.layers, options.levels, tokens)
    folder.mkdir(parents=True, exist_ok=True)
    kept = None if cache is None else _open_cache(cache, lm, head, min(plan.tokens, _count(learnt)), note)
    trainer = Trainer(head, lm, Batches(learnt, options.batch, options.seed), plan, folder, kept, begin)
    log = folder / "log.jsonl"
    if trainer.resume():
        _cut(log, trainer.step)
    else:
        trainer.prepare()
        log.unlink(missing_ok=True)
    last: list[Progress] = []

    def report(report: Report) -> None:
        look = report.step % evaluate_every == 0 or report.step == report.steps
        progress = Progress(report, accuracy(head, lm, checked, seed=options.seed) if look else None)
        with log.open("a") as file:
            file.write(json.dumps(progress.json()) + "\n")
        last.append(progress)
        tell(progress)

    trainer.run(report, also_every=evaluate_every)
    finish(trainer, lm, plan, checked, last[-1] if last else None, made_with)
    return head


def _open_cache(folder: Path, lm: CausalLM, head: Head, tokens: int, note: Callable[[str], None]) -> StateCache:
    cache, layers = StateCache(folder, lm), (*head.feature_layers, FINAL)
    cache.check_room(tokens, layers)
    note(f"The target's states in {folder} will take up to {cache.num_bytes(tokens, layers) / 1e9:.2f} GB.")
    return cache


def _cut(log: Path, step: int) -> None:
    """Without lines after the checkpoint's step, which will be told again, and one that was not written to its end."""
    if log.exists():
        whole = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        write(log, lambda path: path.write_text("".join(kept)))


def _count(data: Sequence[Row]) -> int:
    return sum(len(row.ids) for row in data)


def _plan(
    options: Options, learnt: Sequence[Row], texts: Sequence[Record], lm: CausalLM, begin: Beginning | None
) -> Plan:
    tokens = options.tokens or options.epochs * _count(learnt)
    usual = MUON_RATE if options.optimizer == MUON else RATES[options.kind]
    return Plan(
        options.kind, tokens, digest(texts), fingerprint(lm), options.seed, options.batch, options.length,
        usual if options.lr is None else options.lr, layers=options.layers, levels=options.levels,
        optimizer=options.optimizer, begin=None if begin is None else begin.fingerprint,
        draft_vocab=options.draft_vocab, roots=options.roots,
    )  # fmt: skip


def finish(
    trainer: Trainer, lm: CausalLM, plan: Plan, held: Sequence[Row], last: Progress | None, made_with: dict[str, Any]
) -> None:
    """The head's folder: weights, configuration, card, provenance."""
    folder = trainer.folder
    save_head(trainer.head, folder)
    measured = (last and last.accuracy) or accuracy(trainer.head, lm, held, seed=plan.seed)
    facts = {"plan": asdict(plan), "steps": trainer.step, "tokens": trainer.tokens, "target": lm.name,
             "accuracy": asdict(measured), "argv": sys.argv[1:], **made_with}  # fmt: skip
    write(folder / "provenance.json", lambda path: path.write_text(json.dumps(facts, indent=2) + "\n"))
    size = sum(p.numel() for p in trainer.head.parameters())
    begun = trainer.begin
    began = "" if begun is None else BEGAN.format(begun.taken, Path(begun.name).name)
    card = CARD.format(
        kind=plan.kind, optimizer=plan.optimizer, target=Path(lm.name).name, began=began, size=size,
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
