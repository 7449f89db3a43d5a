"""Sums over draws without replacement, of any number from any vocabulary, as integrals.

Successive sampling takes tokens in the order in which independent clocks of rates q ring. What the others did by time t
is a product over tokens; the integral over t = e^s by the trapezoidal rule converges exponentially here.
"""

import math

import numpy as np
import torch
from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.kernel.compile import compiled

STEP = 0.1  # in s
FIRST = -40.0  # what lies before is below 1e-17


def inside_suffixes(q: Float[Tensor, "m v"], k: int) -> Float[Tensor, "m v"]:
    """Return P(k >= 1 draws are all among the tokens j, j + 1, .. of a row), for every j.

    An integral by about 700 nodes of O(v k) per row.
    """
    rows = q.cpu().numpy()
    inside = np.empty_like(rows)
    for row, found in zip(rows, inside, strict=True):
        fill_inside(row, k, _nodes(row[row > 0][0]), found)  # the smallest mass outside of a suffix
    return torch.from_numpy(inside).to(q.device)


def chance_of_a_draw(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], k: int) -> Float[Tensor, " m"]:
    """Return sum over x of p(x) P(x is among k draws), by about 700 nodes of O(v k) per row."""
    chances = np.zeros(len(p))
    if k > 0:
        for i, (p_row, q_row) in enumerate(zip(p.cpu().numpy(), q.cpu().numpy(), strict=True)):
            add_chance(p_row, q_row, k, _nodes(q_row[q_row > 0].min()), chances[i : i + 1])
    return torch.from_numpy(chances).to(p.device)


def _nodes(smallest: float) -> np.ndarray:
    """Return the times of the integral's nodes [n], up to where a clock of the rate `smallest` has rung for certain."""
    return np.exp(np.arange(FIRST, math.log(40 / smallest), STEP))


@compiled
def fill_inside(q: np.ndarray, k: int, times: np.ndarray, inside: np.ndarray) -> None:
    """Fill inside[j] = P(all draws are in H), H the tokens j, j + 1, ...

    They are iff k clocks of H ring before any other does, at a time t of density b e^(-b t), b = 1 - q(H): the integral
    of b e^(-b t) P(at least k of H rang by t).

    q: probabilities [v], float64, normalised
    k: draws
    times: nodes of the integral [n], float64
    inside: the result [v], float64
    """
    before = np.empty(q.shape[0])
    total = 0.0
    for j in range(q.shape[0]):
        before[j] = total
        total += q[j]
        inside[j] = 1.0 if before[j] == 0.0 else 0.0
    few = np.empty(k)  # P(exactly i of the tokens j.. rang by t), i < k
    for t in times:
        few[:] = 0.0
        few[0] = 1.0
        for j in range(q.shape[0] - 1, -1, -1):
            rang, silent = -np.expm1(-q[j] * t), np.exp(-q[j] * t)
            for i in range(k - 1, 0, -1):
                few[i] = few[i] * silent + few[i - 1] * rang
            few[0] *= silent
            if before[j] > 0.0:
                enough = 1.0
                for i in range(k):
                    enough -= few[i]
                inside[j] += STEP * t * before[j] * np.exp(-before[j] * t) * enough


@compiled
def add_chance(p: np.ndarray, q: np.ndarray, k: int, times: np.ndarray, chance: np.ndarray) -> None:
    """Add sum over x of p(x) P(x is drawn) to `chance`: x is iff it rings when fewer than k others have.

    It rings at a time t of density q e^(-q t).

    p, q: probabilities [v], float64, normalised
    k: draws
    times: nodes of the integral [n], float64
    chance: the result [1], float64, zero at first
    """
    few = np.empty(k)  # P(exactly i of the tokens so far rang by t), i < k
    now = np.empty(k)  # sum over x so far of p(x) q(x) e^(-q(x) t) P(exactly i of the others so far rang by t)
    for t in times:
        few[:] = 0.0
        few[0] = 1.0
        now[:] = 0.0
        for x in range(q.shape[0]):
            rang, silent = -np.expm1(-q[x] * t), np.exp(-q[x] * t)
            weight = p[x] * q[x] * silent
            for i in range(k - 1, 0, -1):
                now[i] = now[i] * silent + now[i - 1] * rang + weight * few[i]
                few[i] = few[i] * silent + few[i - 1] * rang
            now[0] = now[0] * silent + weight * few[0]
            few[0] *= silent
        for i in range(k):
            chance[0] += STEP * t * now[i]
