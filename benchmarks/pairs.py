"""Pairs (p, q) of next-token distributions to compare rules on: of two models over a text, and toy ones."""

from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from torch import Tensor

from foretoken.cli import options
from foretoken.cli.acceptance import OneVocabulary
from foretoken.cli.command import field_help
from foretoken.core.errors import ForetokenError
from foretoken.core.files import read_text
from foretoken.core.shapes import Float
from foretoken.engine import Engine
from foretoken.measure.teacher_forcing import ScoredText, drafter_lm, logits_at
from foretoken.models.text import encode

WINDOW = 512  # tokens per forward
LEAST_CONTEXT = 16  # tokens before a scored position
# A drafter whose distribution is read.
LanguageModel = Annotated[str | None, typer.Option(help=field_help(OneVocabulary)["drafter"])]
Text = Annotated[str | None, typer.Option(help="UTF-8 text file to score. Default: the held-out texts of the demo.")]
Positions = Annotated[int, typer.Option(help="Places in the text, spread evenly, at which rules are compared.")]


def check_score(target: str | None, drafter: str | None, text: str | None, dtype: str | None) -> list[str]:
    """The texts to score, by default the held-out ones; refuses what cannot be before torch is imported."""
    options.check_models(target, drafter, dtype=dtype)
    return [read_text(text)] if text else [p["prompt"] + p["reference"] for p in options.heldout_prompts()]


def score(
    target: str | None,
    drafter: str | None,
    texts: list[str],
    positions: int,
    device: str | None,
    dtype: str | None,
) -> ScoredText:
    """Both models over the texts."""

    engine = options.load_engine(target, drafter, tree="chain:1", device=device, dtype=dtype)
    options.progress(f"scoring {positions} positions")
    return score_text(engine, texts, positions)


def score_text(engine: Engine, texts: Sequence[str], num_positions: int) -> ScoredText:
    """Teacher-forced: `num_positions` places spread evenly over `texts`, one forward of each model per window.

    Raises ForetokenError where the drafter is no language model, or the text has too few tokens.
    """
    drafter = drafter_lm(engine, "has no distribution to compare rules on")
    assert engine.tokenizer is not None, "a target named by folder has a tokenizer"
    target = engine.target.lm
    length = min([WINDOW, *(lm.context for lm in (target, drafter) if lm.context is not None)])
    ids = [encode(engine.tokenizer, text) for text in texts]
    windows = [row[i : i + length] for row in ids for i in range(0, len(row), length)]
    places = [(w, t) for w, window in enumerate(windows) for t in range(LEAST_CONTEXT - 1, len(window))]
    if len(places) < num_positions:
        raise ForetokenError(
            f"The text has {len(places)} positions after {LEAST_CONTEXT} tokens of context, fewer than "
            f"{num_positions}: give a longer text or fewer --positions."
        )
    chosen = [places[i * len(places) // num_positions] for i in range(num_positions)]
    v = target.vocab_size
    return ScoredText(logits_at(target, windows, chosen, v), logits_at(drafter, windows, chosen, v))


def truncate(
    p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], top: int
) -> tuple[Float[Tensor, "n w"], Float[Tensor, "n w"]]:
    """Draft from the `top` likeliest tokens of q alone, and merge all others into one last token, which q never draws.

    Every rule accepts with the same probability as on the full vocabulary with that q: w is top + 1, or v if smaller.
    """
    if top >= q.shape[1]:
        return p, q
    best, tokens = q.topk(top, dim=1)
    kept = p.gather(1, tokens)
    rest = (1 - kept.sum(1, keepdim=True)).clamp(min=0)
    return torch.cat([kept, rest], 1), torch.cat([best / best.sum(1, keepdim=True), torch.zeros_like(rest)], 1)


def toy_rows(
    num_pairs: int, v: int, temperature: float, similarity: float, seed: int, normal: bool = True
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
    """The toy pairs of SpecHub (Sun et al. 2024), appendix E.

    p = softmax(a / T), q = softmax((s a + (1 - s) b) / T), s = `similarity`.

    a, b: standard normal logits; uniform ones in [0, 1), as that appendix says, if not `normal`.
    """
    rng = torch.Generator().manual_seed(seed)
    draw = torch.randn if normal else torch.rand
    a, b = (draw(num_pairs, v, generator=rng, dtype=torch.float64) for _ in range(2))
    mixed = similarity * a + (1 - similarity) * b
    return torch.softmax(a / temperature, 1), torch.softmax(mixed / temperature, 1)
