"""Train Foretoken's small models from the sources of Python's standard library.

    python scripts/train_models.py all              # everything: five to eight hours on two CPU cores
    python scripts/train_models.py target           # one part; the same command again resumes it
    python scripts/train_models.py evaluate --json

A batch depends on the seed and the step alone, so a resumed run sees what an unbroken one sees.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distil import Loss, cross_loss, distil_loss, spellings
from train_corpus import EOT, Stream, excerpts, get_tokenizer, training_tokens
from train_plan import SPECS, Run, Spec, save, stop
from train_results import evaluate, export, known_by, load_model, sample, text_loss
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.train.muon import Muon

ADDING = ("o_proj.weight", "down_proj.weight")  # the matrices by which a layer changes what passes it


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
