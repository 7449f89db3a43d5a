"""Draws of tokens from rows of weights by uniforms: in torch, and compiled for rows in CPU memory.

Both give the same tokens for the same uniforms; the compiled code takes a fifth of the time. Uniforms that are
not numbers, such as the audit's, are for the torch code alone.

Throughout, `weights` are numbers >= 0 of any positive sum, one row per node [m, v], and `u` are uniforms in [0, 1),
one row per node and one column per draw [m, k].
"""

import numpy as np
import torch
from torch import Tensor

from foretoken.core.random import Uniforms
from foretoken.core.shapes import Float, Int
from foretoken.kernel.draws import draw_tokens, hub_tokens, top_tokens
from foretoken.kernel.sizes import NONE


def draw_iid(weights: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m k"]:
    """Draw k tokens from each row of `weights`, independently, by the uniforms `u`; returns their ids."""
    if not isinstance(u, Tensor) or not on_cpu(weights):
        return inverse_cdf(weights, u)
    draws = np.empty(u.shape, np.int64)
    draw_tokens(np.ascontiguousarray(weights.detach().numpy()), u.numpy(), True, draws)
    return torch.from_numpy(draws)


def inverse_cdf(weights: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m k"]:
    """`draw_iid` in torch: the token of row i of `weights` in whose share of the row's running sum u[i, j] falls.

    The running sum is float64: with a float32 one the tail of a 150k vocabulary would lose its probability.
    """
    if not isinstance(u, Tensor):
        return u.choose(weights)
    cdf = weights.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf, u.to(cdf.device) * cdf[:, -1:], right=True)
    return tokens.clamp_(max=weights.shape[-1] - 1)  # u * total can round up to total


def draw_distinct(weights: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m k"]:
    """Draw k distinct tokens from each row of `weights`, one after the other, by the uniforms `u`.

    Returns their ids in draw order, NONE where no token of positive weight is left.
    """
    if not isinstance(u, Tensor) or not on_cpu(weights):
        return successive_inverse_cdf(weights, u)
    draws = np.empty(u.shape, np.int64)
    # The loop works on a copy, in which it sets the weight of each drawn token to zero.
    draw_tokens(weights.detach().numpy().copy(), u.numpy(), False, draws)
    return torch.from_numpy(draws)


def successive_inverse_cdf(weights: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m k"]:
    """`draw_distinct` in torch: `inverse_cdf` of `weights` for one column of `u` after the other.

    The weight of each drawn token is set to 0 before the next column.
    """
    left = weights.clone()
    columns = []
    for j in range(u.shape[1]):
        x = inverse_cdf(left, u[:, j : j + 1])
        exhausted = left.gather(1, x) <= 0
        columns.append(x.masked_fill(exhausted, NONE))
        left.scatter_(1, x, 0.0)
    return torch.cat(columns, 1)


FEW = 128  # up to so many the compiled loop finds the largest scores sooner than torch


def draw_likeliest(scores: Float[Tensor, "m v"], k: int) -> Int[Tensor, "m k"]:
    """Return the ids of the k largest scores of each row, the best first.

    scores: any numbers, -inf for tokens that are ruled out [m, v].
    k: tokens per row. Up to FEW on a CPU, the one with the lower id comes first of equals; else any may.

    Returns NONE in the places for which no token is left.
    """
    if k > FEW or not on_cpu(scores):
        return largest_scores(scores, k)
    draws = np.full((len(scores), k), NONE, np.int64)
    if k:
        top_tokens(np.ascontiguousarray(scores.detach().numpy()), draws)
    return torch.from_numpy(draws)


def largest_scores(scores: Float[Tensor, "m v"], k: int) -> Int[Tensor, "m k"]:
    """`draw_likeliest` in torch, by topk, which may take any of equal `scores`; k: tokens per row."""
    found = min(k, scores.shape[1])
    largest, tokens = scores.topk(found, dim=1)
    tokens = tokens.masked_fill(largest == -torch.inf, NONE)  # a token that is ruled out is no child
    return torch.nn.functional.pad(tokens, (0, k - found), value=NONE)


def draw_hub(weights: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m k"]:
    """Draw as `laws.Hub` says from each row of `weights` by the uniforms `u`.

    Returns the ids in draw order, NONE where no token of positive weight is left.
    """
    if not isinstance(u, Tensor) or not on_cpu(weights):
        return hub_inverse_cdf(weights, u)
    draws = np.empty(u.shape, np.int64)
    hub_tokens(weights.detach().numpy().copy(), u.numpy(), draws)
    return torch.from_numpy(draws)


def hub_inverse_cdf(weights: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m k"]:
    """`draw_hub` in torch, for one column of `u` after the other; weights: as there."""
    rest = weights.clone()  # without the hubs so far
    own = inverse_cdf(rest, u[:, :1])  # the token that was last drawn at random: no hub so far
    own = own.masked_fill(rest.gather(1, own) <= 0, NONE)
    columns = [own]
    for j in range(1, u.shape[1]):
        hub = rest.argmax(1, keepdim=True)  # the first of equals
        hub_alone = torch.zeros_like(rest).scatter_(1, hub, rest.gather(1, hub))
        rest.scatter_(1, hub, 0.0)
        again = own == hub
        left = torch.where(again, rest, hub_alone)
        x = inverse_cdf(left, u[:, j : j + 1])
        x = x.masked_fill(left.gather(1, x) <= 0, NONE)
        own = torch.where(again, x, own)
        columns.append(x)
    return torch.cat(columns, 1)


def on_cpu(weights: Tensor) -> bool:
    """Whether the compiled loops take these `weights`: float32 or float64 in CPU memory."""
    return weights.device.type == "cpu" and weights.dtype in (torch.float32, torch.float64)
