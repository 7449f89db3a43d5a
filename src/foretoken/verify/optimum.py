"""The best acceptance that any lossless rule can have."""

import math

import numpy as np
import torch
from torch import Tensor

from foretoken.core.compiled import compiled
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Law, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.verify.rows import rows

FIRST_NODE, STEP = -20.0, 0.1  # of the integral over s = ln t: what lies before is below 1e-17


def alpha_star(law: Law, p: Float[Tensor, "..."], q: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The largest P(the emitted token is among the draws) of any lossless rule for `law`, for every pair of rows p, q.

        alpha* = 1 + min over token sets H of  p(H) - P(all draws are in H)             (Hu et al. 2025)

    For i.i.d. draws and for draws without replacement the best H is a suffix of the tokens in the order of falling
    p/q: one sort and one scan, in O(v log v) and in O(v k) for each of about 700 nodes of an integral.
    p, q: distributions [..., v]; leading dimensions broadcast. Returns float64 [...].
    """
    if not isinstance(law, IID | WithoutReplacement):
        raise ForetokenError(f"alpha_star does not know law {law.name}: give iid or without_replacement.")
    p_rows, q_rows, shape = rows(p, q)
    optimum = iid_optimum(p_rows, q_rows, law) if isinstance(law, IID) else _distinct_optimum(p_rows, q_rows, law.k)
    return optimum.reshape(shape)


def iid_optimum(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: IID) -> Float[Tensor, " m"]:
    """1 + min over suffixes H: with A the tokens before H, p(H) - P(all in H) = g(q(A)) - p(A)."""
    p, q = _by_falling_ratio(p, q)
    p_before, q_before = p.cumsum(-1), q.cumsum(-1).clamp(max=1)
    return 1 + (law.hit(q_before) - p_before).min(-1).values.clamp(max=0)


def _by_falling_ratio(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"]) -> tuple[Tensor, Tensor]:
    order = torch.where(q > 0, p / q, torch.inf).argsort(dim=-1, descending=True)
    return p.gather(-1, order), q.gather(-1, order)


def _distinct_optimum(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], k: int) -> Float[Tensor, " m"]:
    if k == 0:
        return torch.zeros_like(p[:, 0])
    p, q = _by_falling_ratio(p, q)
    p_rows, q_rows = p.cpu().numpy(), q.cpu().numpy()
    inside = np.empty_like(q_rows)
    for i, row in enumerate(q_rows):
        rarest = row[row > 0][0]  # the smallest mass that can lie outside a suffix
        nodes = np.arange(FIRST_NODE, math.log(40 / rarest), STEP)
        compiled(inside_loop)(row, k, np.exp(nodes), inside[i])
    p_before = np.concatenate([np.zeros((len(p), 1)), p_rows.cumsum(1)[:, :-1]], 1)
    least = (1 - p_before - inside).min(1)  # H empty: p(H) = P(all in H) = 0
    return torch.from_numpy(1 + np.minimum(least, 0.0)).to(p.device)


def inside_loop(q: np.ndarray, k: int, times: np.ndarray, inside: np.ndarray) -> None:
    """inside[j] = P(k draws without replacement are all among the tokens j.. of q).

    Successive sampling takes tokens in the order in which clocks of rates q ring. All k are in H iff k clocks of H ring
    before any other does, at a time t of density b e^(-b t), b = 1 - q(H): the integral of b e^(-b t) P(at least k of H
    rang by t), over t = e^s with the trapezoidal rule, which converges exponentially here.
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
