"""The draws of several nodes at once, each by a law of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.laws import IID, NONE, Law, draw_iid
from foretoken.core.shapes import Float


def draw_each(laws: Sequence[Law], q: Float[Tensor, "m v"], u: Float[Tensor, "m n"]) -> list[tuple[int, ...]]:
    """draws[i] from row i of q by laws[i]; u: float64 uniforms in [0, 1), as many a row as the neediest law takes."""
    laws = _decided(laws, u[:, -1:])
    draws: list[tuple[int, ...]] = [()] * len(laws)
    for law in dict.fromkeys(laws):
        places = [i for i, other in enumerate(laws) if other == law]
        rows, uniforms = (q, u) if len(places) == len(laws) else (q[places], u[places])
        if law.k:
            for i, row in zip(places, law.draw(rows, uniforms[:, : law.num_uniforms]).tolist(), strict=True):
                draws[i] = tuple(x for x in row if x != NONE)
    return draws


def _decided(laws: Sequence[Law], u: Float[Tensor, "m 1"]) -> Sequence[Law]:
    """The laws with random numbers of draws decided: what is left is so many i.i.d. draws."""
    random = {i: law.counts for i, law in enumerate(laws) if isinstance(law, IID) and law.counts is not None}
    if not random:
        return laws
    widest = max(map(len, random.values()))
    counts = [[*row, *[0.0] * (widest - len(row))] for row in random.values()]
    numbers = draw_iid(torch.tensor(counts, dtype=torch.float64), u[list(random)])[:, 0].tolist()
    decided = list(laws)
    for i, n in zip(random, numbers, strict=True):
        decided[i] = IID(n)
    return decided
