"""SpecHub's row in compiled passes, for CPU tensors; `hub.plain_spechub_row` is what it computes."""

import numpy as np
from torch import Tensor, from_numpy

from foretoken.core.compiled import compiled
from foretoken.core.draws_fast import on_cpu
from foretoken.verify.rejection_fast import TINY


def fast_spechub_row(p: Tensor, q: Tensor, draws: tuple[int, ...], hub: int) -> Tensor | None:
    """The row, or None where the compiled loop does not serve: other devices or dtypes, or two dtypes."""
    if not on_cpu(p) or not on_cpu(q) or p.dtype != q.dtype:
        return None
    row, weights = p.detach().numpy().copy(), q.detach().numpy().copy()
    compiled(spechub_loop, reorder_sums=True)(row, weights, np.array(draws, dtype=np.int64), hub)
    return from_numpy(row)


def spechub_loop(p: np.ndarray, q: np.ndarray, draws: np.ndarray, hub: int) -> None:
    """Turn p into the row, in place; q loses the hub. Names as in plain_spechub_row."""
    p_hub, q_hub = np.float64(p[hub]), np.float64(q[hub])
    p[hub] = q[hub] = 0.0
    p_rest, q_rest = 0.0, 0.0
    for x in range(p.shape[0]):
        p_rest += np.float64(p[x])
        q_rest += np.float64(q[x])
    p_scale, q_scale = 1.0 / (p_rest + p_hub), 1.0 / (q_rest + q_hub)
    p_hub *= p_scale
    ratio = q_hub / q_rest  # Q(a, x) / Q(x, a)
    spare_first, spare_second, total = 0.0, 0.0, 0.0
    for x in range(p.shape[0]):
        target, first = np.float64(p[x]) * p_scale, np.float64(q[x]) * q_scale
        second = first * ratio
        after_first = max(target - first, 0.0)
        spare_first += max(first - target, 0.0)
        spare_second += max(second - after_first, 0.0)
        total += max(after_first - second, 0.0)

    hub_first = draws[0] == hub
    own = draws[1] if hub_first else draws[0]
    wanted, weight = np.float64(p[own]) * p_scale, np.float64(q[own]) * q_scale
    hub_share, spare = max(p_hub - spare_second, 0.0), spare_first
    if hub_first:
        wanted, weight = max(wanted - weight, 0.0), weight * ratio
        hub_share, spare = p_hub, spare_second
    accept = min(wanted / weight, 1.0) if weight > TINY else 0.0
    accept_hub = min(hub_share / spare, 1.0) if spare > TINY and total > TINY else 1.0
    scale = (1.0 - accept) * (1.0 - accept_hub) / max(total, TINY)
    for x in range(p.shape[0]):
        target, both = np.float64(p[x]) * p_scale, np.float64(q[x]) * (q_scale * (1.0 + ratio))
        p[x] = max(target - both, 0.0) * scale
    p[own] += accept
    p[hub] += (1.0 - accept) * accept_hub
