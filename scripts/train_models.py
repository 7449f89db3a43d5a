"""Train Foretoken's small models from the sources of Python's standard library.

    python scripts/train_models.py all              # everything: five to eight hours on two CPU cores
    python scripts/train_models.py target           # one part; the same command again resumes it
    python scripts/train_models.py evaluate --json

A batch depends on the seed and the step alone, so a resumed run sees what an unbroken one sees.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from distil import Loss, cross_loss, distil_loss, spellings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.models.identity import fingerprint_of_weights
from foretoken.train.muon import Muon

EOT = "<|endoftext|>"
ADDING = ("o_proj.weight", "down_proj.weight")  # the matrices by which a layer changes what passes it
SKIPPED = ("site-packages/", "encodings/", "pydoc_data/", "lib2to3/tests/data/")
# Words take one sign before them; runs of punctuation take the line breaks after them.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# What the merges were learnt on: of each file whether it counts. The 1k vocabulary is one of other text.
MERGED: dict[str, Callable[[str], bool]] = {"target": lambda name: True, "drafter-1k": lambda name: "test" not in name}


@dataclass(frozen=True)
class Written:
    """Text written by the target: `batches` of 64 pieces of `length` tokens, the first `prompt` from the corpus."""

    batches: int
    prompt: int
    length: int
    temp: float


@dataclass(frozen=True)
class Spec:
    """Shape and training plan of one model.

    A step has `rows` pieces of `chunk` tokens, cut into rows of the first length in `lengths`; in the last 15% of the
    steps the rows have the second length. A model that imitates another reads that one's tokens, in its own after
    that where it has others; every `every`-th piece is text that the other wrote.
    """

    summary: str
    tokenizer: str
    vocab: int
    layers: int
    mlp: int
    lengths: tuple[int, int]
    tokens: float
    chunk: int = 512
    rows: int = 1
    hidden: int = 192
    heads: int = 6
    kv_heads: int = 2
    muon_lr: float = 0.02
    embed_lr: float = 0.03
    context: int = 1024
    imitates: str = ""  # the model whose law it learns; without one it learns the text
    begins: str = ""  # the model whose embeddings, and whose layers in `copied`, it begins with
    copied: tuple[int | None, ...] = ()  # None, or a layer's second time: one that changes nothing to begin with
    stage: bool = False  # only the beginning of another: it stays in the work folder
    written: tuple[Written, ...] = ()
    every: int = 4
    objective: str = "next-token loss on text"  # for the card


DEPTH = 32  # what is more than 12 layers is laid between them, and begins by changing nothing
FIRST = "the target as it was with 12 layers"
DISTILLED = "distilled from {} (divergence, then acceptance), half on text that it wrote"
TARGET_12 = Spec("The target's beginning", "target", 4096, 12, 592, (512, 1024), 7.2e6, chunk=1024, rows=2, stage=True)
DRAFTER_12 = Spec(
    "The drafter's beginning",
    "target",
    4096,
    2,
    592,
    (512, 1024),
    8e6,
    rows=2,
    muon_lr=0.01,
    embed_lr=0.01,
    imitates="target-12",
    begins="target-12",
    copied=(0, 11),
    written=(Written(9, 128, 512, 1.0),),
    every=2,
    objective=DISTILLED.format(FIRST),
    stage=True,
)
SPECS = {
    "target-12": TARGET_12,
    "drafter-12": DRAFTER_12,
    "target": replace(
        TARGET_12,
        summary="The target",
        layers=DEPTH,
        lengths=(256, 1024),
        tokens=2e6,
        muon_lr=0.004,
        embed_lr=0.002,
        begins="target-12",
        copied=tuple(at * 12 // DEPTH for at in range(DEPTH)),
        objective="next-token loss on text, begun as 12 layers with others between them that change nothing",
        stage=False,
    ),
    "drafter": replace(
        DRAFTER_12,
        summary="A drafter with the target's vocabulary",
        tokens=3e6,
        muon_lr=0.008,
        embed_lr=0.008,
        imitates="target",
        begins="drafter-12",
        copied=(0, 1),
        objective=f"{DISTILLED.format('`models/target`')}, begun as the drafter of {FIRST}",
        stage=False,
    ),
    "drafter-1k": Spec(
        "A drafter with another vocabulary",
        "drafter-1k",
        1024,
        3,
        592,
        (256, 1024),
        3.5e6,
        chunk=1024,
        muon_lr=0.01,
        embed_lr=0.01,
        context=2048,
        imitates="target",
        begins="drafter",
        copied=(None, 0, 1),
        written=(Written(9, 128, 512, 1.0), Written(3, 128, 512, 0.0)),
        every=2,
        objective="distilled likewise by the target's law in its own tokens, half on text that it wrote, "
        "begun as `drafter`",
    ),
    "drafter-bytes": Spec(
        "A drafter that reads bytes", "drafter-bytes", 257, 2, 512, (1024, 4096), 3e6, chunk=4096, context=4096
    ),
}


@dataclass(frozen=True)
class Run:
    """Where and how this call works; `tokens` replaces the plan's number."""

    out: Path
    work: Path
    seed: int
    device: str
    tokens: float | None = None

    def folder(self, name: str) -> Path:
        return (self.work if name in SPECS and SPECS[name].stage else self.out) / name

    def half(self) -> bool:
        """Whether the device has units for products in bfloat16; sums and weights stay in float32."""
        return torch.cuda.is_bf16_supported(False) if self.device == "cuda" else torch.cpu._is_avx512_bf16_supported()


def stop(message: str) -> SystemExit:
    print(f"train_models: {message}", file=sys.stderr)
    return SystemExit(2)


def save(path: Path, write: Callable[[BinaryIO], object]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(file)
    os.replace(temporary, path)


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 50 == 0


def corpus(held_out: bool) -> Iterator[tuple[str, str]]:
    """(relative path, text) of the library's sources: the training part or the held-out part."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(f"/{part}" in f"/{name}" for part in SKIPPED) or is_held_out(name) != held_out:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            yield name, text


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def make_tokenizer(kind: str) -> Tokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind in MERGED:
        tok = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        tok.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore
        size, alphabet = SPECS[kind].vocab, byte_alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=[EOT], show_progress=False, initial_alphabet=alphabet, max_token_length=24
        )
        tok.train_from_iterator((text for name, text in corpus(held_out=False) if MERGED[kind](name)), trainer)
    else:
        tok = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(byte_alphabet())}, merges=[]))
        tok.pre_tokenizer = byte_level  # pyright: ignore
        tok.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    tok.decoder = decoders.ByteLevel()  # pyright: ignore
    return tok


def get_tokenizer(run: Run, kind: str) -> Tokenizer:
    path = run.work / f"{kind}.json"
    if not path.exists():
        print(f"{kind}: making the tokenizer", flush=True)
        text = make_tokenizer(kind).to_str(pretty=True)
        save(path, lambda file: file.write(text.encode()))
    return Tokenizer.from_file(str(path))


def training_tokens(run: Run, kind: str) -> np.ndarray:
    """The packed training stream, each file followed by the end-of-text token."""
    path = run.work / f"{kind}-train.npy"
    if not path.exists():
        tok = get_tokenizer(run, kind)
        encodings = tok.encode_batch([text for _, text in corpus(held_out=False)], add_special_tokens=False)
        parts = [np.array([*encoding.ids, tok.token_to_id(EOT)], dtype=np.uint16) for encoding in encodings]
        save(path, lambda file: np.save(file, np.concatenate(parts)))
    return np.load(path)


class Stream:
    """Rows of training tokens; the rows of a step depend on the seed and the step alone. `sources` take turns."""

    def __init__(self, sources: list[np.ndarray], seed: int, chunk: int, rows: int) -> None:
        self.sources, self.seed, self.chunk, self.rows = sources, seed, chunk, rows

    def batch(self, step: int, length: int) -> torch.Tensor:
        """Inputs and the token after them, cut to `length`: shape (rows, length + 1)."""
        chunk = max(self.chunk, length)
        count, rows = self.rows * self.chunk // chunk, []
        for index in range(step * count, (step + 1) * count):
            turn, kind = divmod(index, len(self.sources))
            source = self.sources[kind]
            per_epoch = (len(source) - 1) // chunk
            epoch, place = divmod(turn, per_epoch)
            rng = np.random.default_rng([self.seed + 1000 * kind, epoch])
            shift = int(rng.integers(len(source) - per_epoch * chunk))
            start = shift + int(rng.permutation(per_epoch)[place]) * chunk
            rows += [source[at : at + length + 1] for at in range(start, start + chunk, length)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def build_model(spec: Spec, end: int | None) -> LlamaForCausalLM:
    sizes: dict[str, Any] = {"vocab_size": spec.vocab, "max_position_embeddings": spec.context}
    sizes |= {"hidden_size": spec.hidden, "intermediate_size": spec.mlp, "num_hidden_layers": spec.layers}
    sizes |= {"num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads}
    sizes |= {"head_dim": spec.hidden // spec.heads, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, rms_norm_eps=1e-5))
    for name, param in model.named_parameters():
        if param.ndim == 2 and "embed" not in name:
            zero = name.endswith(ADDING)
            torch.nn.init.normal_(param, std=0.0 if zero else 0.7 * param.shape[1] ** -0.5)
    # Embeddings as large as what the layers add to them; the last norm keeps the logits small.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    torch.nn.init.constant_(model.model.norm.weight, 0.03)
    return model


def text_loss(model: LlamaForCausalLM, rows: torch.Tensor, progress: float) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def train(
    run: Run, name: str, model: LlamaForCausalLM, stream: Stream, loss_fn: Loss, made_from: str
) -> dict[str, int]:
    """Train to the end of the plan, from the last checkpoint if there is one."""
    spec, checkpoint = SPECS[name], run.work / f"{name}.pt"
    named = list(model.to(run.device).train().named_parameters())  # pyright: ignore
    muon = Muon([p for n, p in named if p.ndim == 2 and "embed" not in n])
    embeds, norms = [p for n, p in named if "embed" in n], [p for _, p in named if p.ndim == 1]
    adam = torch.optim.AdamW([{"params": embeds}, {"params": norms}], betas=(0.9, 0.95), weight_decay=0.0)
    parts = {"model": model, "muon": muon, "adam": adam}
    plan: dict[str, Any] = {"seed": run.seed, "tokens": run.tokens or spec.tokens, "from": made_from}
    plan["bfloat16"] = run.half()
    per_step = spec.rows * spec.chunk
    steps, first, smooth = max(1, round(plan["tokens"] / per_step)), 0, math.nan
    if checkpoint.exists():
        try:
            state = torch.load(checkpoint, map_location=run.device, weights_only=True)
            if state["plan"] == plan:
                for key, part in parts.items():
                    part.load_state_dict(state[key])
            first, smooth = state["step"], state["smooth"]
        except Exception as error:
            raise stop(f"{checkpoint} cannot be read ({type(error).__name__}): remove it to start again.") from None
        if state["plan"] != plan:
            raise stop(f"{checkpoint} was made with {state['plan']}, not {plan}: use those options or another --work.")
    groups = [*muon.param_groups, *adam.param_groups]  # loading a checkpoint has replaced them
    group_rates = list(zip(groups, (spec.muon_lr, spec.embed_lr, 0.004), strict=True))
    saved, began, last_save = first, time.monotonic(), time.monotonic()
    try:
        for step in range(first, steps):
            progress, done = step / steps, step + 1
            length = spec.lengths[0] if progress < 0.85 else spec.lengths[1]
            rows, total = stream.batch(step, length).to(run.device), 0.0
            for part in rows.split(max(1, 1024 // length) if run.device == "cpu" else len(rows)):
                with torch.autocast(run.device, torch.bfloat16, enabled=run.half()):
                    loss = loss_fn(model, part, progress) * (len(part) / len(rows))
                loss.backward()
                total += loss.item()
            for group, rate in group_rates:
                group["lr"] = rate * min(done / 30, 1.0) * min(1.0, (1 - progress) / 0.65)
            for optimizer in (muon, adam):
                with torch.autocast(run.device, torch.bfloat16, enabled=run.half()):
                    optimizer.step()
                optimizer.zero_grad()
            smooth = total if math.isnan(smooth) else 0.95 * smooth + 0.05 * total
            speed = (done - first) * per_step / (time.monotonic() - began)
            if done % 10 == 0 or done == steps:
                left = (steps - done) * per_step / speed / 60
                line = f"{name}: step {done}/{steps}  loss {smooth:.3f}  {speed:,.0f} tokens/s  ETA {left:.1f} min"
                print(line, flush=True)
            if time.monotonic() - last_save > 120 or done == steps:
                state = {key: part.state_dict() for key, part in parts.items()}
                state |= {"plan": plan, "step": done, "smooth": smooth}
                save(checkpoint, lambda file, state=state: torch.save(state, file))
                saved, last_save = done, time.monotonic()
    except KeyboardInterrupt:
        print(f"\nStopped. {checkpoint} keeps step {saved}: the same command goes on from there.", file=sys.stderr)
        raise SystemExit(130) from None
    return {"tokens": steps * per_step, "steps": steps}


@torch.no_grad()
def sample(model: LlamaForCausalLM, ids: torch.Tensor, count: int, temp: float) -> torch.Tensor:
    """`ids` with `count` sampled tokens (the likeliest ones at temperature 0) after each row."""
    cache, fresh = None, ids
    for _ in range(count):
        out = model(input_ids=fresh, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1]
        fresh = torch.multinomial((logits / temp).softmax(-1), 1) if temp else logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, fresh], dim=1)
    return ids


def written_tokens(run: Run, name: str, target: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Text sampled from the target, each piece behind some tokens of the corpus."""
    path = run.work / f"{name}-written-{known_by(target)}.npy"
    if not path.exists():
        rows = []
        torch.manual_seed(run.seed)
        for kind in SPECS[name].written:
            stream = Stream([tokens], run.seed + 1 + len(rows), kind.prompt, 64)
            for step in range(kind.batches):
                prompts = stream.batch(step, kind.prompt)[:, : kind.prompt].to(run.device)
                pieces = sample(target, prompts, kind.length - kind.prompt, kind.temp)
                rows.append(pieces.cpu().numpy().astype(np.uint16).ravel())
                print(f"{name}: the target wrote {sum(map(len, rows)):,} tokens", flush=True)
        save(path, lambda file: np.save(file, np.concatenate(rows)))
    return np.load(path)


def load_model(run: Run, name: str) -> tuple[LlamaForCausalLM, Tokenizer]:
    folder = run.folder(name)
    if not (folder / "model.safetensors").exists():
        raise stop(f"there is no model in {folder}: train it first with the command `{name}`.")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return model.to(run.device), Tokenizer.from_file(str(folder / "tokenizer.json"))  # pyright: ignore


def known_by(model: LlamaForCausalLM) -> str:
    return fingerprint_of_weights(model, "")[:8]


def train_one(run: Run, name: str) -> None:
    spec = SPECS[name]
    tok = get_tokenizer(run, spec.tokenizer)
    torch.manual_seed(run.seed)
    model, loss_fn = build_model(spec, tok.token_to_id(EOT)), text_loss
    tokens = training_tokens(run, SPECS[spec.imitates].tokenizer if spec.imitates else spec.tokenizer)
    sources, made_from = [tokens], []
    if spec.begins:
        begun, own = load_model(run, spec.begins)
        made_from.append(known_by(begun))
        known = begun.model.embed_tokens.weight.cpu()
        model.model.embed_tokens.weight.data.copy_(torch.stack([known[ids].mean(0) for ids in spellings(tok, own)]))
        model.model.norm.load_state_dict(begun.model.norm.state_dict())
        for at, (layer, copied) in enumerate(zip(model.model.layers, spec.copied, strict=True)):
            if copied is not None:
                layer.load_state_dict(begun.model.layers[copied].state_dict())
            if copied in spec.copied[:at]:
                for key, weight in layer.named_parameters():
                    if key.endswith(ADDING):
                        torch.nn.init.zeros_(weight)
    if spec.imitates:
        target, own = load_model(run, spec.imitates)
        made_from.append(known_by(target))
        sources = [*[tokens] * (spec.every - 1), written_tokens(run, name, target, tokens)]
        loss_fn = distil_loss(target) if spec.tokenizer == "target" else cross_loss(target, own, tok)
    facts = train(run, name, model, Stream(sources, run.seed, spec.chunk, spec.rows), loss_fn, " ".join(made_from))
    export(run, name, model, tok, facts)


CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# Foretoken {name}

{summary}, for tests, demonstrations and benchmarks of speculative decoding. It writes text that
looks like Python; it knows nothing and is of no other use.

| | |
| --- | --- |
| Architecture | Llama: {layers} layers, hidden {hidden}, {heads} heads ({kv_heads} for keys and values), \
SwiGLU {mlp}, tied embeddings |
| Parameters | {params:,}, trained in float32, saved as bfloat16 |
| Vocabulary | {vocab}, byte-level; `<|endoftext|>` starts, ends and pads |
| Context | {context} tokens |
| Data | the sources of Python {python}'s standard library, tests included |
| Objective | {objective} |
| Tokens seen | {tokens:,} in {steps:,} steps |
| Held-out loss | {nats:.4f} nats a token, {bits:.4f} bits a byte |
| Seed | {seed} |

Held out are the files whose relative path has a SHA-256 with first four bytes divisible by 50, about 2%.
The loss is that of the saved weights, over windows of the full context.

Retrain: `python scripts/train_models.py {name} --tokens {tokens} --seed {seed}`.

Licence: the weights are under the Apache License 2.0. They were trained on the Python standard library, which is
under the Python Software Foundation License.
"""


def export(run: Run, name: str, model: LlamaForCausalLM, tok: Tokenizer, facts: dict[str, int]) -> None:
    """Write the Hugging Face folder in the work folder, then move it to its place."""
    spec, fresh = SPECS[name], run.work / f"export-{name}"
    shutil.rmtree(fresh, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(fresh)  # pyright: ignore
    tok.save(str(fresh / "tokenizer.json"))
    settings = dict.fromkeys(("bos_token", "eos_token", "pad_token"), EOT) | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.context,
    }
    (fresh / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    nats, bits = held_out_loss(*load_model(Run(run.work, run.work, 0, run.device), fresh.name), run.device)
    shown = vars(spec) | facts
    card = CARD.format(
        name=name, params=model.num_parameters(), nats=nats, bits=bits, seed=run.seed,
        python=".".join(map(str, sys.version_info[:3])), **{**shown, "tokens": facts["tokens"]},
    )  # fmt: skip
    (fresh / "README.md").write_text(card)
    shutil.rmtree(run.folder(name), ignore_errors=True)
    shutil.move(fresh, run.folder(name))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tok: Tokenizer, device: str) -> tuple[float, float]:
    """Nats a token and bits a byte over the held-out files, in windows of the full context."""
    nats, count, size = 0.0, 0, 0
    window = model.config.max_position_embeddings
    for _, text in corpus(held_out=True):
        ids = [tok.token_to_id(EOT), *tok.encode(text, add_special_tokens=False).ids]
        size += len(text.encode())
        for at in range(0, len(ids) - 1, window):
            row = torch.tensor([ids[at : at + window + 1]], device=device)
            nats += text_loss(model, row, 1.0).item() * (row.shape[1] - 1)
            count += row.shape[1] - 1
    return nats / count, nats / size / math.log(2)


@torch.no_grad()
def agreement(target: LlamaForCausalLM, drafter: LlamaForCausalLM, rows: torch.Tensor, skip: int) -> dict[str, float]:
    """Mean over positions of sum(min(p, q)) at two temperatures, and of equal likeliest tokens."""
    sums, count = {"accept_t1.0": 0.0, "accept_t0.8": 0.0, "greedy": 0.0}, 0
    for part in rows.split(2):
        ours, theirs = (model(input_ids=part).logits[:, skip:].flatten(0, 1) for model in (drafter, target))
        for temp in (1.0, 0.8):
            shared = torch.minimum((ours / temp).softmax(-1), (theirs / temp).softmax(-1))
            sums[f"accept_t{temp}"] += shared.sum().item()
        sums["greedy"] += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
        count += len(ours)
    return {key: value / count for key, value in sums.items()}


def evaluate(run: Run, as_json: bool) -> None:
    target, tok = load_model(run, "target")
    report: dict[str, dict[str, float | str]] = {}
    prompt_text = json.loads(excerpts(run).read_text().splitlines()[0])["prompt"]
    for name in (name for name in SPECS if (run.folder(name) / "model.safetensors").exists()):
        model, own = load_model(run, name)
        nats, bits = held_out_loss(model, own, run.device)
        prompt = torch.tensor([own.encode(prompt_text).ids], device=run.device)
        text = own.decode(sample(model, prompt, 60, 0.0)[0, prompt.shape[1] :].tolist())
        report[name] = {"nats_per_token": nats, "bits_per_byte": bits, "continuation": text}
    if "drafter" in report:
        drafter, _ = load_model(run, "drafter")
        ids = [i for _, text in corpus(held_out=True) for i in tok.encode(text).ids]
        held = torch.tensor(ids[: len(ids) // 512 * 512], device=run.device).view(-1, 512)
        prompts, scores = held[:: max(1, len(held) // 64)][:64, :64], {"held_out": agreement(target, drafter, held, 0)}
        torch.manual_seed(run.seed)
        for temp in (1.0, 0.8):
            scores[f"sampled_t{temp}"] = agreement(target, drafter, sample(target, prompts, 256, temp), 64)
        report["drafter"] |= {
            f"{text}/{key}": value for text, values in scores.items() for key, value in values.items()
        }
    if as_json:
        print(json.dumps(report, indent=2))
    for name, values in {} if as_json else report.items():
        print(f"\n{name}")
        for key, value in values.items():
            print(f"  {key:28} {value:.4f}" if isinstance(value, float) else f"  {key}\n{value}")


def excerpts(run: Run) -> Path:
    """Prompts of 40 to 300 tokens from held-out files, cut at natural places, each with what follows."""
    path, rng, lines = run.out / "heldout.jsonl", np.random.default_rng(run.seed), []
    if path.exists():
        return path
    tok = get_tokenizer(run, "target")
    for name, text in corpus(held_out=True):
        ends, at = [], 0
        for line in text.splitlines(keepends=True):
            at += len(line)
            opens = line.strip().startswith(("def ", "class ", "for ", "if ", "#")) or line.rstrip().endswith('"""')
            if opens and 400 < at < len(text) - 800:
                ends.append(at)
        for end in sorted(rng.permutation(ends)[: 1 if "test" in name else 2].tolist()):
            start = text.rfind("\n", 0, max(1, end - 3 * int(rng.integers(40, 301)))) + 1
            prompt, rest = tok.encode(text[start:end]).ids, tok.encode(text[end : end + 2000]).ids
            reference = tok.decode(rest[:256])
            whole = tok.encode(text[start:end] + reference).ids
            if 40 <= len(prompt) <= 300 and len(rest) >= 256 and whole[: len(prompt)] == prompt:
                line = {"id": f"{name}:{end}", "file": name, "prompt": text[start:end], "reference": reference}
                lines.append(json.dumps(line) + "\n")
    save(path, lambda file: file.writelines(line.encode() for line in lines))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Foretoken's small models from Python's standard library.")
    parser.add_argument("what", choices=["all", *SPECS, "tokenizers", "excerpts", "evaluate"])
    parser.add_argument("--tokens", type=float, help="tokens to train one model on (default: its plan)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder of the models (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="folder of checkpoints (%(default)s)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--json", action="store_true", help="evaluate: print JSON")
    args = parser.parse_args()
    if args.tokens is not None and (args.what not in SPECS or not 0 < args.tokens < math.inf):
        raise stop("--tokens needs a positive number and the name of one model.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise stop("--device cuda: PyTorch finds no CUDA device here.")
    if args.seed < 0 or (args.threads is not None and args.threads < 1):
        raise stop("--seed must not be negative and --threads must be at least 1.")
    torch.set_num_threads(args.threads or torch.get_num_threads())
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    run = Run(args.out, args.work, args.seed, auto if args.device == "auto" else args.device, args.tokens)
    try:
        for folder in (run.out, run.work):
            folder.mkdir(parents=True, exist_ok=True)
        if args.what == "evaluate":
            evaluate(run, args.json)
        elif args.what == "tokenizers":
            for kind in sorted({spec.tokenizer for spec in SPECS.values()}):
                get_tokenizer(run, kind)
        else:
            for name in SPECS if args.what == "all" else {args.what} & SPECS.keys():
                train_one(run, name)
            excerpts(run)
    except OSError as error:
        raise stop(f"cannot use {error.filename}: {error.strerror}.") from None


if __name__ == "__main__":
    main()
