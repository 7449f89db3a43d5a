"""How well a head drafts on held-out text, position by position, with the very code that drafts in an engine."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foretoken.core.errors import ForetokenError
from foretoken.heads.head import Head
from foretoken.heads.lm import HeadLM
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.train.data import Row

DEPTH = 7  # positions looked at


@dataclass(frozen=True)
class Accuracy:
    """Per position, given the true tokens before it: greedy: the likeliest token is the target's too; shared: mean of
    sum(min(p, q)), the acceptance of one draw at temperature 1. num_roots: places of the text drafted from."""

    greedy: tuple[float, ...]
    shared: tuple[float, ...]
    num_roots: int

    @property
    def expected_length(self) -> float:
        """Tokens accepted of a greedy chain, as if positions were independent: sum of products of `greedy`."""
        return float(np.cumprod(self.greedy).sum())


@torch.no_grad()
def accuracy(head: Head, lm: CausalLM, data: Sequence[Row], num_roots: int = 64, seed: int = 0) -> Accuracy:
    """Draft along the text itself from random places of `data`, all places side by side, one forward a position."""
    depth = min(DEPTH, head.depth or DEPTH)
    rng = np.random.default_rng(seed)
    usable = [row for row in data if len(row.ids) > depth + 3]
    if not usable:
        raise ForetokenError(f"The held-out data has no text of {depth + 4} tokens: give longer texts.")
    # As it will draft: in the target's dtype, and with parts that are not the training's own.
    head = copy.deepcopy(head, {id(head.target): head.target}).to(lm.dtype).eval()
    chosen = [usable[i] for i in rng.integers(len(usable), size=num_roots)]
    starts = [int(rng.integers(2, len(row.ids) - depth)) for row in chosen]  # committed tokens of each text
    layers = (*head.feature_layers, FINAL)
    width = len(head.feature_layers) * lm.hidden_size
    rows = HeadLM(head, "head").open(num_roots, max(starts) + depth + 1)
    features, p = [], []
    for row, start in zip(chosen, starts, strict=True):
        states = lm.states(torch.from_numpy(row.ids[None, : start + depth]).to(lm.device), layers)[0]
        features.append(states[: start - 1, :width])
        p.append(head.target.logits(states[start - 1 :, -lm.hidden_size :]).softmax(-1))
    for _ in chosen:
        rows.join()
    rows.learn(features)
    for i, (row, start) in enumerate(zip(chosen, starts, strict=True)):
        rows.extend(i, row.ids[1 : start - 1].tolist())
    greedy, shared = [], []
    for position in range(depth):
        tokens = [[int(row.ids[start - 1 + position])] for row, start in zip(chosen, starts, strict=True)]
        scores = torch.cat(rows.score(tokens, [[position - 1]] * num_roots))
        wanted = torch.stack([of_row[position] for of_row in p])
        greedy.append(float((scores.argmax(-1) == wanted.argmax(-1)).double().mean()))
        shared.append(float(torch.minimum(scores.softmax(-1), wanted).sum(-1).mean()))
    return Accuracy(tuple(greedy), tuple(shared), num_roots)
