"""Compiled draws for rows in CPU memory: the same numbers as the torch code in laws.py, at a fifth of its time."""

import numpy as np
import torch
from torch import Tensor

from foretoken.core.compiled import compiled

NONE = -1  # stands in a row of draws where the law had nothing left to draw


def on_cpu(weights: Tensor) -> bool:
    """Whether the compiled loops take these rows."""
    return weights.device.type == "cpu" and weights.dtype in (torch.float32, torch.float64)


def fast_draws(weights: Tensor, u: Tensor, replace: bool) -> Tensor:
    """[m, k] tokens for float64 uniforms u [m, k]; without replacement, NONE where nothing is left."""
    # A copy is scratch for the zeros that stand for tokens already drawn.
    rows = weights.detach().numpy()
    draws = np.empty(u.shape, np.int64)
    compiled(draw_loop)(np.ascontiguousarray(rows) if replace else rows.copy(), u.numpy(), replace, draws)
    return torch.from_numpy(draws)


def fast_hub_draws(weights: Tensor, u: Tensor) -> Tensor:
    """[m, k] tokens of the hub law for float64 uniforms u [m, k]; NONE where nothing is left."""
    draws = np.empty(u.shape, np.int64)
    compiled(hub_loop)(weights.detach().numpy().copy(), u.numpy(), draws)
    return torch.from_numpy(draws)


def hub_loop(rows: np.ndarray, u: np.ndarray, draws: np.ndarray) -> None:
    """Fill draws [m, k]; rows lose their hubs. See laws.hub_inverse_cdf."""
    m, k = u.shape
    v = rows.shape[1]
    for i in range(m):
        own = hub = NONE
        for j in range(k):
            if j > 0:
                hub = 0
                for x in range(1, v):
                    if rows[i, x] > rows[i, hub]:
                        hub = x
                draws[i, j] = hub if rows[i, hub] > 0 else NONE
                rows[i, hub] = 0
                if own != hub:
                    continue
            total = 0.0
            for x in range(v):
                total += rows[i, x]
            threshold = u[i, j] * total
            running = 0.0
            token = v - 1  # u * total can round up to total
            for x in range(v):
                running += rows[i, x]
                if running > threshold:
                    token = x
                    break
            own = token if rows[i, token] > 0 else NONE
            draws[i, j] = own


def draw_loop(rows: np.ndarray, u: np.ndarray, replace: bool, draws: np.ndarray) -> None:
    """Fill draws [m, k]. Sums run in order, as torch's do, so that both give the same token for the same uniform."""
    m, k = u.shape
    v = rows.shape[1]
    for i in range(m):
        total = 0.0
        for j in range(k):
            if j == 0 or not replace:
                total = 0.0
                for x in range(v):
                    total += rows[i, x]
            threshold = u[i, j] * total
            running = 0.0
            token = v - 1  # u * total can round up to total
            for x in range(v):
                running += rows[i, x]
                if running > threshold:
                    token = x
                    break
            draws[i, j] = token
            if not replace:
                if rows[i, token] <= 0:
                    draws[i, j] = NONE
                rows[i, token] = 0
