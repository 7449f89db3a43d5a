"""A measurement of how well a head drafts on held-out texts, per level, by the same code that drafts in an engine."""

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

DEPTH = 7  # largest number of levels that are measured
SIDE_BY_SIDE = 64  # number of places of the texts that are drafted from in one forward


@dataclass(frozen=True)
class Accuracy:
    """How well a head drafts, per level, given the text's own tokens above the level.

    greedy: per level the share of places at which the head's likeliest token is the target's likeliest too.
    shared: per level the mean of sum(min(p, q)), which is the acceptance of one draw at temperature 1.
    num_roots: number of places of the texts that were drafted from.
    """

    greedy: tuple[float, ...]
    shared: tuple[float, ...]
    num_roots: int

    @property
    def expected_length(self) -> float:
        """The expected acceptance length of a greedy chain if levels were independent: sum of products of `greedy`."""
        return float(np.cumprod(self.greedy).sum())


@torch.no_grad()
def accuracy(head: PublishedHead, lm: CausalLM, data: Sequence[Row], num_roots: int) -> Accuracy:
    """Measure how well a head drafts: along the texts themselves, from random places of what is learnt of them.

    The places are the same for all heads with the same number of levels, DEPTH at most.

    head: the head, which stays as it is.
    lm: the target.
    data: the held-out texts.
    num_roots: number of places.

    Raises ForetokenError where all texts are too short.
    """
    depth = min(DEPTH, head.depth or DEPTH)
    usable = [row for row in data if len(row.ids) > depth + 3]
    if not usable:
        raise ForetokenError(f"The held-out data has no text of {depth + 4} tokens: give longer texts.")
    # Drafting begins behind a text's first learnt token, or where there is just room for all levels.
    firsts = [max(2, min(row.skipped, len(row.ids) - depth - 2) + 1) for row in usable]
    counts = [len(row.ids) - depth - first for row, first in zip(usable, firsts, strict=True)]
    # A copy drafts, in the target's dtype as in an engine, so that training goes on with the head as it is.
    head = copy.deepcopy(head, {id(head.target): head.target}).to(lm.dtype).eval()
    ends = np.cumsum(counts)
    numbers = np.sort(np.random.default_rng(0).integers(ends[-1], size=num_roots))
    texts = np.searchsorted(ends, numbers, side="right")
    # Per place its text, and how many tokens count as committed; by text, so that the states of few are in memory.
    places = [(int(i), int(firsts[i] + number - ends[i] + counts[i])) for i, number in zip(texts, numbers, strict=True)]
    chunks = (places[first : first + SIDE_BY_SIDE] for first in range(0, num_roots, SIDE_BY_SIDE))
    found = torch.cat([_drafted(head, lm, usable, chunk, depth) for chunk in chunks], 1)
    greedy, shared = found.mean(1).T.tolist()
    return Accuracy(tuple(greedy), tuple(shared), num_roots)


def _drafted(
    head: PublishedHead, lm: CausalLM, data: Sequence[Row], places: Sequence[tuple[int, int]], depth: int
) -> Float[Tensor, "k n 2"]:
    """Return per level k and place n (whether the likeliest token is the target's, sum(min(p, q))) [k, n, 2].

    All places are drafted from side by side, one forward per level.

    data: the texts.
    places: per place the index of its text in `data`, and the number of its tokens that count as committed.
    depth: number of levels.
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
