"""Sums over draws without replacement, of any number from any vocabulary.

Give each token x a clock that rings once, after an exponentially distributed time of rate q(x), independently of the
others. The order in which the clocks ring is the order of draws without replacement. What the other clocks did by time
t has a probability that is a product over tokens. So every sum here is an integral over t = e^s, for which the
trapezoidal rule converges exponentially. The *nodes* of the integral are the times at which its integrand is computed.
"""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.kernel.compile import compiled, fused
from foretoken.verify.rule import TINY


def inside_suffixes(q: Float[Tensor, "m v"], k: int) -> Float[Tensor, "m v"]:
    """Return P(all k draws are among the tokens j, j + 1, ..) for every j of every row [m, v]; to about 2e-12.

    It takes about 100 nodes of an integral per row, more for k above 6, each O(v k). Draws from a mass below TINY are
    not counted.

    q: the drafter's distributions, float64, normalised [m, v].
    k: the number of draws, at least 1.
    """
    rows = q.cpu().numpy()
    inside = np.empty_like(rows)
    for row, found in zip(rows, inside, strict=True):
        drawn = num_drawn(row, k)
        fill_inside(row, drawn, *ring_times(row, drawn, since=drawn), found)
    return torch.from_numpy(inside).to(q.device)


def num_drawn(q: np.ndarray, k: int) -> int:
    """Return how many of k draws come from a mass above TINY, whatever the draws before them were.

    q: probabilities [v], float64, normalised.
    k: the number of draws.
    """
    return min(k, int(np.count_nonzero(np.sort(q).cumsum() > TINY)))


def ring_times(q: np.ndarray, k: int, since: int) -> tuple[np.ndarray, int]:
    """Return the times of an integral's nodes [n], and after how many nodes the time has doubled.

    They begin where `since` clocks have rung with a probability below 1e-17, and end where k have rung for certain.
    Before the k-th ring, clocks ring with at least the total rate r of all but the k - 1 likeliest tokens. So the
    probability that k have not rung by time t is at most that of a Poisson number of mean r t below k. In s = log t the
    density of the k-th ring has a width of 1 / sqrt(k), which decides the step.

    q: probabilities [v], float64, normalised.
    k: the number of draws, at most the number of tokens with q > 0.
    since: the number of rings, 1 to k, before which the integrand is 0.
    """
    rest = np.partition(q, len(q) - k)[: len(q) - k + 1].sum()
    per_double = max(3, math.ceil(math.log(2) * math.sqrt(k) / 0.55))
    last = math.log((60 + k + 10 * math.sqrt(k)) / rest)
    return np.exp(np.arange(-40 / since, last, math.log(2) / per_double)), per_double


def chance_of_a_draw(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], k: int) -> Float[Tensor, " m"]:
    """Return sum over x of p(x) P(x is among the k draws) [m], by about 250 nodes of an integral per row, each O(v k).

    Draws from a mass below TINY are not counted.

    p, q: distributions of the target and of the drafter, float64, normalised [m, v].
    k: the number of draws.
    """
    chances = np.zeros(len(p))
    if k > 0:
        for i, (p_row, q_row) in enumerate(zip(p.cpu().numpy(), q.cpu().numpy(), strict=True)):
            drawn = num_drawn(q_row, k)
            add_chance(p_row, q_row, drawn, *ring_times(q_row, drawn, since=1), chances[i : i + 1])
    return torch.from_numpy(chances).to(p.device)


@partial(compiled, fuse=True, reorder_sums=True)
def fill_inside(q: np.ndarray, k: int, times: np.ndarray, per_double: int, inside: np.ndarray) -> None:
    """Fill inside[j] with P(all k draws are in H), H the tokens j, j + 1, ..

    They are iff k clocks of H ring before any other does: the integral of e^(-b t), b = 1 - q(H), over the density of
    the time t at which the k-th clock of H rings.

    q: probabilities [v], float64, normalised.
    k: the number of draws, at most `num_drawn`.
    times, per_double: what `ring_times` returns, the times [n], float64.
    inside: receives the result [v], float64.
    """
    v, n = q.shape[0], times.shape[0]
    few, now = np.zeros((k, n)), np.zeros((k, n))  # P(exactly i of H rang by t); d/dt P(more than i of H rang by t)
    few[0] = 1.0
    rang, heard = np.empty(n), np.empty(n)
    step, total = np.log(2.0) / per_double, 0.0
    for j in range(v):
        inside[j] = total  # the mass before j, at first
        total += q[j]
    for j in range(v - 1, -1, -1):
        before = inside[j]
        fill_rang((q[j], before), times, per_double, rang, heard)
        for i in range(k - 1, 0, -1):
            for s in range(n):
                silent = 1.0 - rang[s]
                now[i, s] = (now[i, s] + q[j] * few[i, s]) * silent + now[i - 1, s] * rang[s]
                few[i, s] = few[i, s] * silent + few[i - 1, s] * rang[s]
        chance = 0.0
        for s in range(n):
            silent = 1.0 - rang[s]
            now[0, s] = (now[0, s] + q[j] * few[0, s]) * silent
            few[0, s] *= silent
            chance += times[s] * (1.0 - heard[s]) * now[k - 1, s]
        inside[j] = chance * step if before > 0.0 else 1.0


@fused
def fill_rang(
    rates: tuple[float, float], times: np.ndarray, per_double: int, one: np.ndarray, other: np.ndarray
) -> None:
    """Fill in a = 1 - e^(-rate t), the probability that a clock has rung by time t, for two clocks at all times.

    At twice the time this is a + a (1 - a), which reaches 1 exactly. Two clocks at once take little longer than one.

    rates: the rates of the two clocks.
    times: times [m], float64, each twice the one `per_double` places before.
    per_double: the number of places after which the time has doubled.
    one, other: receive the results for the two clocks [m], float64.
    """
    for i in range(min(per_double, times.shape[0])):
        one[i] = -np.expm1(-rates[0] * times[i])
        other[i] = -np.expm1(-rates[1] * times[i])
    for i in range(per_double, times.shape[0]):
        j = i - per_double
        one[i] = one[j] + one[j] * (1.0 - one[j])
        other[i] = other[j] + other[j] * (1.0 - other[j])


@compiled
def add_chance(p: np.ndarray, q: np.ndarray, k: int, times: np.ndarray, per_double: int, chance: np.ndarray) -> None:
    """Add sum over x of p(x) P(x is drawn) to `chance`.

    x is drawn iff fewer than k others have rung when its clock rings, at a time t of density q e^(-q t).

    p, q: probabilities of the target and of the drafter [v], float64, normalised.
    k: the number of draws, at most the number of tokens with q > 0.
    times, per_double: what `ring_times` returns, the times [n], float64.
    chance: receives the result [1], float64, zero at first.
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
            chance[0] += np.log(2.0) / per_double * t * now[i]
