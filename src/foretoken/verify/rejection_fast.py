"""The recursive rejection row as one compiled pass a draw, for CPU tensors; `rejection.plain_row` is what it computes.

It rests on one identity: p_j is proportional to (p - c_j q)+ for a number c_j, since with Z_j = sum (p - c_j q)+ and
L_j the mass left in q,

    (p_j - q_j)+  =  ((p - c_j q)+ / Z_j  -  q / L_j)+  ∝  (p - (c_j + Z_j / L_j) q)+

so a draw costs one read of p and q, and no residual vector is written.
"""

import numpy as np
from torch import Tensor, from_numpy

from foretoken.core.compiled import compiled
from foretoken.core.draws_fast import on_cpu

TINY = 1e-290  # masses below it are rounding, and 1 / TINY is still finite


def fast_row(p: Tensor, q: Tensor, draws: tuple[int, ...], without_replacement: bool) -> Tensor | None:
    """The row, or None where the compiled loop does not serve: other devices or dtypes, or two dtypes."""
    if not on_cpu(p) or not on_cpu(q) or p.dtype != q.dtype:
        return None
    row = p.detach().numpy().copy()  # numpy copies on this thread; torch would wake its pool for it
    rest = q.detach().numpy().copy() if without_replacement else np.ascontiguousarray(q.detach().numpy())
    compiled(rejection_loop, reorder_sums=True)(row, rest, np.array(draws, dtype=np.int64), without_replacement)
    return from_numpy(row)


def rejection_loop(p: np.ndarray, q: np.ndarray, draws: np.ndarray, without_replacement: bool) -> None:
    """Turn p into the row, in place; q loses what was drawn if `without_replacement`."""
    left, mass = 0.0, 0.0  # Z_j and L_j
    for i in range(p.shape[0]):
        left += np.float64(p[i])
        mass += np.float64(q[i])
    accepted = np.zeros(draws.shape[0])
    reach = 1.0  # probability that every draw so far was rejected
    c = 0.0
    for j in range(draws.shape[0]):
        x = draws[j]
        p_x, q_x = np.float64(p[x]), np.float64(q[x])
        if mass <= TINY or q_x <= 0.0:
            continue
        p_j, q_j = max(p_x - c * q_x, 0.0) / left, q_x / mass
        if p_j >= q_j:  # accepted for certain: what follows is never reached
            accepted[j] = reach
            reach = 0.0
            break
        accepted[j] = reach * (p_j / q_j)
        reach -= accepted[j]
        c_next = c + left / mass
        if without_replacement:
            p[x] = q[x] = 0.0  # its residual is 0 for good, since p_j < q_j
        left_next, mass = 0.0, 0.0
        for i in range(p.shape[0]):
            left_next += max(np.float64(p[i]) - c_next * np.float64(q[i]), 0.0)
            mass += np.float64(q[i])
        if left_next <= TINY:  # p == q up to rounding: go back to p_j
            if without_replacement:
                p[x], q[x] = p_x, q_x
            break
        left, c = left_next, c_next
    scale = reach / left
    for i in range(p.shape[0]):
        p[i] = max(np.float64(p[i]) - c * np.float64(q[i]), 0.0) * scale
    for j in range(draws.shape[0]):
        p[draws[j]] += accepted[j]
