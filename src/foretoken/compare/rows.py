"""Rows (p, q) to compare rules on: next-token distributions of two models over one text, and toy ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.audit.models import plain_logits
from foretoken.core.errors import ForetokenError
from foretoken.core.sampling import Sampling
from foretoken.core.shapes import Float
from foretoken.draft.lm import LMDrafter
from foretoken.drafters import plain
from foretoken.engine import Engine
from foretoken.models.causal_lm import CausalLM
from foretoken.models.target import LMTarget
from foretoken.models.text import encode

WINDOW = 512  # tokens per forward
LEAST_CONTEXT = 16  # tokens before a scored position


@dataclass(frozen=True, eq=False)
class ScoredText:
    """Logits of both models after the same n positions of a text, over the target's v tokens."""

    target: Float[Tensor, "n v"]
    drafter: Float[Tensor, "n v"]

    def rows(
        self, temperature: float, draft_temperature: float | None = None
    ) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
        """p and q in float64; q at the target's temperature unless told otherwise."""
        q_temperature = temperature if draft_temperature is None else draft_temperature
        p = Sampling(temperature=temperature)(self.target.double())
        return p, Sampling(temperature=q_temperature)(self.drafter.double())


def score_text(engine: Engine, texts: Sequence[str], num_positions: int) -> ScoredText:
    """Teacher-forced: `num_positions` places spread evenly over `texts`, one forward of each model per window.

    Raises ForetokenError where the drafter is no language model, or the text has too few tokens.
    """
    drafter = drafter_lm(engine, "has no distribution to compare rules on")
    if num_positions < 1:
        raise ForetokenError(f"positions is {num_positions}: it must be at least 1.")
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


def drafter_lm(engine: Engine, lack: str) -> CausalLM:
    """The drafter's language model; ForetokenError, which says what it lacks, where it is none."""
    drafter = engine.drafter
    if not isinstance(drafter, LMDrafter) or not isinstance(drafter.lm, CausalLM):
        raise ForetokenError(f"Drafter {drafter.name} {lack}: name a model folder, --drafter.")
    return drafter.lm


def written(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """What the target writes behind each prompt, so many tokens whatever they are."""
    alone = replace(plain(engine), tokenizer=None, eos_ids=frozenset())
    results = alone.generate(list(prompts), max_new_tokens=num_tokens, temperature=temperature, seed=seed)
    return [result.token_ids for result in results]


def logits_at(lm: CausalLM, windows: Sequence[list[int]], places: Sequence[tuple[int, int]], v: int) -> Tensor:
    """[n, v], after token t of window w for every place (w, t), in the order of windows: teacher-forced, one forward a
    window. Columns that the model lacks are -inf, those beyond v are dropped."""
    rows = []
    for w in dict.fromkeys(w for w, _ in places):
        ids = [min(token, lm.vocab_size - 1) for token in windows[w]]
        scores = plain_logits(LMTarget(lm), [ids])[0].cpu()
        rows.append(scores[[t for other, t in places if other == w], :v])
    return columns(torch.cat(rows), v)


def columns(logits: Tensor, v: int) -> Tensor:
    """[n, v]: those beyond v are dropped, missing ones are -inf."""
    return torch.nn.functional.pad(logits[:, :v], (0, max(v - logits.shape[1], 0)), value=-torch.inf)


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
    """The toy pairs of paper 000, appendix E: p = softmax(a / T), q = softmax((s a + (1 - s) b) / T), s = `similarity`.

    a, b: standard normal logits; uniform ones in [0, 1), as that appendix says, if not `normal`.
    """
    rng = torch.Generator().manual_seed(seed)
    draw = torch.randn if normal else torch.rand
    a, b = (draw(num_pairs, v, generator=rng, dtype=torch.float64) for _ in range(2))
    mixed = similarity * a + (1 - similarity) * b
    return torch.softmax(a / temperature, 1), torch.softmax(mixed / temperature, 1)
