"""Acceptance by enumeration, and the optimum by brute force, for laws small enough."""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from foretoken.core.laws import Law, outcomes

K = TypeVar("K", bound=Hashable)


def summed(weighed: Iterable[tuple[K, float]]) -> dict[K, float]:
    """{outcome: probability}, of outcomes that may come several times."""
    law: dict[K, float] = defaultdict(float)
    for outcome, prob in weighed:
        law[outcome] += prob
    return dict(law)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def optimum(law: Law, p: Tensor, q: Tensor) -> float:
    """1 + min over token sets H of p(H) - P(all draws in H): the best that any lossless rule can do."""
    weighed = list(outcomes(law, q))
    best = 1.0
    for size in range(len(p) + 1):
        for inside in map(set, itertools.combinations(range(len(p)), size)):
            caught = sum(prob for draws, prob in weighed if inside.issuperset(draws))
            best = min(best, 1 + float(p[list(inside)].sum()) - caught)
    return best


def random_pair(rng: torch.Generator, v: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """p and q; with zeros in one of them, two times of three."""
    p, q = (torch.softmax(sharpness * torch.randn(v, generator=rng, dtype=torch.float64), 0) for _ in range(2))
    kept = torch.rand(2, v, generator=rng) < 0.7
    zeros = int(torch.randint(3, (), generator=rng))
    if zeros < 2 and bool(kept[zeros].any()):
        row = (p, q)[zeros]
        row *= kept[zeros]
        row /= row.sum()
    return p, q
