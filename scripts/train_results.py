"""Small models once they are trained: read, sampled from, measured, and written with a card."""

from __future__ import annotations

import json
import math
import shutil
import sys

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from train_corpus import EOT, corpus, excerpts
from train_plan import SPECS, Run, stop
from transformers import LlamaForCausalLM

from foretoken.models.hf_model import cache_name
from foretoken.models.identity import fingerprint_of_weights


def text_loss(model: LlamaForCausalLM, rows: torch.Tensor, progress: float) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def sample(model: LlamaForCausalLM, ids: torch.Tensor, count: int, temp: float) -> torch.Tensor:
    """`ids` with `count` sampled tokens (the likeliest ones at temperature 0) after each row."""
    cache, fresh, named = None, ids, cache_name(type(model))
    for _ in range(count):
        out = model(input_ids=fresh, use_cache=True, logits_to_keep=1, **{named: cache})
        cache, logits = out[named], out.logits[:, -1]
        fresh = torch.multinomial((logits / temp).softmax(-1), 1) if temp else logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, fresh], dim=1)
    return ids


def load_model(run: Run, name: str) -> tuple[LlamaForCausalLM, Tokenizer]:
    folder = run.folder(name)
    if not (folder / "model.safetensors").exists():
        raise stop(f"there is no model in {folder}: train it first with the command `{name}`.")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return model.to(run.device), Tokenizer.from_file(str(folder / "tokenizer.json"))  # pyright: ignore


def known_by(model: LlamaForCausalLM) -> str:
    return fingerprint_of_weights(model, "")[:8]


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
