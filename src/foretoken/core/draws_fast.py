"""Compiled draws for rows in CPU memory: the same numbers as the torch code in laws.py, at a fifth of its time."""

import numpy as np
import torch
from torch import Tensor

from foretoken.kernel.compile import compiled
from foretoken.kernel.sizes import NONE


def on_cpu(weights: Tensor) -> bool:
    """Whether the compiled loops take these rows."""
    return weights.device.type == "cpu" and weights.dtype in (torch.float32, torch.float64)


def fast_draws(weights: Tensor, u: Tensor, replace: bool) -> Tensor:
    """[m, k] tokens for float64 uniforms u [m, k]; without replacement, NONE where nothing is left."""
    from foretoken.kernel.draws import draw_loop

    # A copy is scratch for the zeros that stand for tokens already drawn.
    rows = weights.detach().numpy()
    draws = np.empty(u.shape, np.int64)
    compiled(draw_loop)(np.ascontiguousarray(rows) if replace else rows.copy(), u.numpy(), replace, draws)
    return torch.from_numpy(draws)


def fast_likeliest(scores: Tensor, k: int) -> Tensor:
    """[m, k] tokens with the largest scores, of equals the first; NONE where nothing above -inf is left."""
    from foretoken.kernel.draws import likeliest_loop

    draws = np.full((len(scores), k), NONE, np.int64)
    if k:
        compiled(likeliest_loop)(np.ascontiguousarray(scores.detach().numpy()), draws)
    return torch.from_numpy(draws)


def fast_hub_draws(weights: Tensor, u: Tensor) -> Tensor:
    """[m, k] tokens of the hub law for float64 uniforms u [m, k]; NONE where nothing is left."""
    from foretoken.kernel.draws import hub_loop

    draws = np.empty(u.shape, np.int64)
    compiled(hub_loop)(weights.detach().numpy().copy(), u.numpy(), draws)
    return torch.from_numpy(draws)
