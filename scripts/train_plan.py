"""What the small models are, how each is trained, and where a call of train_models.py works."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch


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
