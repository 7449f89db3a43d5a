"""The draws of several nodes at once, each by a law of its own, and what they weigh."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from foretoken.core import laws as laws_of_draws
from foretoken.core.laws import IID, NONE, Law, draw_iid
from foretoken.core.shapes import Float


def draw_each(laws: Sequence[Law], q: Float[Tensor, "m v"], u: Float[Tensor, "m n"]) -> list[tuple[int, ...]]:
    """draws[i] from row i of q by laws[i]; u: float64 uniforms in [0, 1), as many a row as the neediest law takes."""
    draws: list[tuple[int, ...]] = [()] * len(laws)
    independent: dict[int, int] = {}  # how many draws
    others: dict[Law, list[int]] = {}
    number = _number if laws_of_draws.on_cpu(q) else _plain_number  # the audit sets compiled draws aside there
    for i, law in enumerate(laws):
        if isinstance(law, IID):
            independent[i] = law.k if law.counts is None else number(law.counts, float(u[i, -1]))
        elif law.k:
            others.setdefault(law, []).append(i)
    if most := max(independent.values(), default=0):  # the first n of `most` draws are n draws
        rows, uniforms = _of(list(independent), q, u)
        if most < uniforms.shape[1]:  # a slice takes as long as a draw
            uniforms = uniforms[:, :most]
        for (i, n), row in zip(independent.items(), draw_iid(rows, uniforms).tolist(), strict=True):
            draws[i] = tuple(row[:n])
    for law, places in others.items():
        rows, uniforms = _of(places, q, u)
        for i, row in zip(places, law.draw(rows, uniforms[:, : law.num_uniforms]).tolist(), strict=True):
            draws[i] = tuple(x for x in row if x != NONE) if NONE in row else tuple(row)
    return draws


def weights_of(draws: Sequence[tuple[int, ...]], q: Float[Tensor, "m v"]) -> np.ndarray:
    """[m, k] float64: q of every draw; a row of fewer draws than the longest ends in numbers of no meaning. Read in one
    go, since a read of a tensor costs as much as a hundred numbers."""
    most = max(map(len, draws))
    padded = np.array([row + (0,) * (most - len(row)) for row in draws], np.int64)  # torch.tensor takes thrice as long
    return q.gather(1, torch.from_numpy(padded).to(q.device)).cpu().double().numpy()


def _of(places: list[int], q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return (q, u) if len(places) == len(q) else (q[places], u[places])


def _plain_number(counts: tuple[float, ...], u: float) -> int:
    """How many draws, where that is random: drawn from the counts by the last uniform."""
    return int(draw_iid(torch.tensor([counts], dtype=torch.float64), torch.tensor([[u]], dtype=torch.float64)))


def _number(counts: tuple[float, ...], u: float) -> int:
    """`_plain_number`, at a twentieth of its time."""
    running = list(accumulate(counts))  # `sum` would round otherwise
    n = bisect_right(running, u * running[-1])
    if n == len(counts):  # u times the sum can round up to the sum
        n = max(n for n, count in enumerate(counts) if count > 0)
    return n
