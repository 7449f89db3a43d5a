"""Sums over draws without replacement, of any number from any vocabulary.

Successive sampling takes tokens in the order in which independent clocks of rates q ring. What the others did by time t
is a product over tokens, so that every sum here is an integral over t = e^s, for which the trapezoidal rule converges
exponentially. For two draws the sums have closed forms.
"""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.kernel.compile import compiled, fused
from foretoken.verify.rejection import TINY

STEP = 0.1  # in s
FIRST = -40.0  # what lies before is below 1e-17
THIRD = math.log(2) / 3  # a step in s with which every third node has twice the time, as `fill_rang` needs


def inside_suffixes(q: Float[Tensor, "m v"], k: int) -> Float[Tensor, "m v"]:
    """Return P(k >= 1 draws are all among the tokens j, j + 1, .. of a row), for every j."""
    rows = q.cpu().numpy()
    first = np.zeros_like(rows)
    for row, found in zip(rows, first, strict=True):
        order = np.flatnonzero(row > 0)
        drawn = num_drawn(row, k)
        fill_first(row, order, drawn, first_times(row, drawn), found)
    return torch.from_numpy(first[:, ::-1].cumsum(1)[:, ::-1].copy()).to(q.device)


def num_drawn(q: np.ndarray, k: int) -> int:
    """Return how many of k draws are from more than (almost) nothing, whatever the draws before them were.

    q: probabilities [v], float64, normalised
    """
    rest, number = q.copy(), 0
    while number < k and rest.sum() > TINY:
        rest[rest.argmax()] = 0.0
        number += 1
    return number


def first_times(q: np.ndarray, k: int) -> np.ndarray:
    """Return the times of the nodes of `fill_first` [n], from where k clocks have rung with less than 1e-17 to where
    they have rung for certain.

    q: probabilities [v], float64, normalised
    k: draws, `num_drawn` at most
    """
    if k <= 2:
        return np.empty(0)
    rest = np.partition(q, len(q) - k + 1)[: len(q) - k + 1].sum()  # the mass without the k - 1 likeliest tokens
    return np.exp(np.arange(-40 / k, math.log(60 / rest), THIRD))


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


@partial(compiled, fuse=True, reorder_sums=True)
def fill_first(q: np.ndarray, order: np.ndarray, k: int, times: np.ndarray, first: np.ndarray) -> None:
    """Fill first[x] = P(x is drawn, and no token that stands before it in `order` is).

    It is P(all draws are in H) - P(all draws are in H without x), where H is x and what stands after it. All draws are
    in H iff k clocks of H ring before any other does: the integral of e^(-b t), b = 1 - q(H), over the density of the
    time t at which the k-th clock of H rings. Of two draws, {x, y} are drawn with probability
    q(x) q(y) / (1 - q(x)) + q(x) q(y) / (1 - q(y)).

    q: probabilities [v], float64, normalised
    order: the tokens with q > 0, each once [n], int64
    k: draws, `num_drawn` at most
    times: nodes of the integral [m], float64, by `first_times`
    first: the result [v], float64; only tokens of `order` are written
    """
    n = order.shape[0]
    if k == 1:
        for i in range(n):
            first[order[i]] = q[order[i]]
        return
    if k == 2:
        fill_first_of_two(q, order, first)
        return
    m = times.shape[0]
    few, now = np.zeros((k, m)), np.zeros((k, m))  # P(exactly i of H rang by t), and d/dt P(more than i of H rang by t)
    few[0] = 1.0
    rang, heard = np.empty(m), np.empty(m)
    before = np.empty(n)  # the mass before each token of the order
    mass = 0.0
    for i in range(n):
        before[i] = mass
        mass += q[order[i]]
    after = 0.0  # P(all draws are in H without x)
    for j in range(n - 1, -1, -1):
        x = order[j]
        fill_rang((q[x], before[j]), times, rang, heard)
        for i in range(k - 1, 0, -1):
            for s in range(m):
                silent = 1.0 - rang[s]
                now[i, s] = (now[i, s] + q[x] * few[i, s]) * silent + now[i - 1, s] * rang[s]
                few[i, s] = few[i, s] * silent + few[i - 1, s] * rang[s]
        for s in range(m):
            silent = 1.0 - rang[s]
            now[0, s] = (now[0, s] + q[x] * few[0, s]) * silent
            few[0, s] *= silent
        inside = 0.0
        for s in range(m):
            inside += times[s] * (1.0 - heard[s]) * now[k - 1, s]
        inside = inside * THIRD if before[j] > 0.0 else 1.0
        first[x] = max(inside - after, 0.0)
        after = inside


@compiled
def fill_first_of_two(q: np.ndarray, order: np.ndarray, first: np.ndarray) -> None:
    """`fill_first` for two draws: first[x] = sum over the tokens y after x of q(x) q(y) (1 / r(x) + 1 / r(y)),

    where r(x) is the mass of the other tokens. That of the likeliest token may be too small to divide by: what it has
    to do with is added by itself.
    """
    n, big = order.shape[0], order[0]
    for i in range(n):
        big = order[i] if q[order[i]] > q[big] else big
    others = 0.0  # r of the likeliest token
    for i in range(n):
        others += q[order[i]] if order[i] != big else 0.0
    mass = others + q[big]
    after, shares, passed = 0.0, 0.0, False  # of the tokens after x, without the likeliest: sums of q and of q / r
    for i in range(n - 1, -1, -1):
        x = order[i]
        if x == big:
            first[x] = q[x] * (after / others) + q[x] * shares
            passed = True
            continue
        share = q[x] / (mass - q[x])
        first[x] = share * after + q[x] * shares
        if passed:
            first[x] += share * q[big] + q[big] * (q[x] / others)
        after += q[x]
        shares += share


@fused
def fill_rang(rates: tuple[float, float], times: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Fill a = 1 - e^(-rate t) of two clocks: at twice a time it is a + a (1 - a), which comes to 1 exactly.

    times: [m], float64, each the double of that three places before
    one, other: the results [m], float64; side by side they take little longer than one
    """
    for i in range(min(3, times.shape[0])):
        one[i] = -np.expm1(-rates[0] * times[i])
        other[i] = -np.expm1(-rates[1] * times[i])
    for i in range(3, times.shape[0]):
        one[i] = one[i - 3] + one[i - 3] * (1.0 - one[i - 3])
        other[i] = other[i - 3] + other[i - 3] * (1.0 - other[i - 3])


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
