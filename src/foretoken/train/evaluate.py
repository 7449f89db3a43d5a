"""How well a head drafts on held-out text, position by position, with the very code that drafts in an engine."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.heads.head import PublishedHead
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.train.data import Row

DEPTH = 7  # positions looked at
SIDE_BY_SIDE = 64  # places drafted from in one forward


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
def accuracy(head: PublishedHead, lm: CausalLM, data: Sequence[Row], num_roots: int) -> Accuracy:
    """Draft along the text itself from random places of `data`, the same ones for every head of equal depth."""
    depth = min(DEPTH, head.depth or DEPTH)
    rng = np.random.default_rng(0)
    usable = [row for row in data if len(row.ids) > depth + 3]
    if not usable:
        raise ForetokenError(f"The held-out data has no text of {depth + 4} tokens: give longer texts.")
    # As it will draft: in the target's dtype, and with parts that are not the training's own.
    head = copy.deepcopy(head, {id(head.target): head.target}).to(lm.dtype).eval()
    texts = rng.integers(len(usable), size=num_roots).tolist()
    starts = [int(rng.integers(2, len(usable[i].ids) - depth)) for i in texts]  # committed tokens of each text
    places = sorted(zip(texts, starts, strict=True))  # by text, so that few texts' states are in memory
    chunks = (places[first : first + SIDE_BY_SIDE] for first in range(0, num_roots, SIDE_BY_SIDE))
    found = torch.cat([_drafted(head, lm, usable, chunk, depth) for chunk in chunks], 1)
    greedy, shared = found.mean(1).T.tolist()
    return Accuracy(tuple(greedy), tuple(shared), num_roots)


def _drafted(
    head: PublishedHead, lm: CausalLM, data: Sequence[Row], places: Sequence[tuple[int, int]], depth: int
) -> Float[Tensor, "k n 2"]:
    """For each position and place whether the likeliest token is the target's, and sum(min(p, q)); all places side by
    side, one forward per position.

    places: a text's place in `data`, and the number of its tokens that are committed. depth: positions.
    """
    layers = (*head.feature_layers, FINAL)
    width = len(head.feature_layers) * lm.hidden_size
    states = {i: lm.states(torch.from_numpy(data[i].ids[None]).to(lm.device), layers)[0] for i in dict(places)}
    rows = head.open(len(places), max(start for _, start in places) + depth + 1, None)
    for _ in places:
        rows.join()
    rows.learn([states[i][: start - 1, :width] for i, start in places])
    for row, (i, start) in enumerate(places):
        rows.extend(row, data[i].ids[1 : start - 1].tolist())
    found = []
    for position in range(depth):
        tokens = [[int(data[i].ids[start - 1 + position])] for i, start in places]
        scores = torch.cat(rows.score(tokens, [[position - 1]] * len(places)))
        finals = torch.stack([states[i][start - 1 + position, -lm.hidden_size :] for i, start in places])
        p = head.target.logits(finals).softmax(-1)
        same = (scores.argmax(-1) == p.argmax(-1)).double()
        found.append(torch.stack((same, torch.minimum(scores.softmax(-1), p).sum(-1).double()), -1).cpu())
    return torch.stack(found)
