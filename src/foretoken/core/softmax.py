"""From scores to probabilities: softmax at a temperature, and its limit at 0. In torch, and compiled for a CPU."""

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import NotFiniteError
from foretoken.core.shapes import Float, Int
from foretoken.kernel.sizes import ALL

SMALLEST = 1e-30  # a float32 divisor; scores that differ at all are then infinitely far apart
TINY = 1e-20  # below this temperature a quotient of float32 scores could overflow


def softmax(scores: Float[Tensor, "m v"], temperature: float) -> Float[Tensor, "m v"]:
    """softmax(scores / temperature), temperature > 0. Raises NotFiniteError: see `plain_softmax`."""
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        return fast_softmax(scores, temperature)
    return plain_softmax(scores, temperature)


def best(scores: Float[Tensor, "m v"]) -> Float[Tensor, "m v"]:
    """One-hot at `likeliest`."""
    return torch.zeros_like(scores).scatter_(-1, likeliest(scores)[:, None], 1.0)


def likeliest(scores: Float[Tensor, "m v"]) -> Int[Tensor, " m"]:
    """The first of each row's largest scores. Raises NotFiniteError where that is not finite; NaN counts as largest."""
    if scores.device.type == "cpu" and scores.dtype == torch.float32:  # numpy's is several times as fast there
        rows = scores.detach().numpy()
        tokens = rows.argmax(-1)
        finite = bool(np.isfinite(rows[np.arange(len(rows)), tokens]).all())
        tokens = torch.from_numpy(tokens)
    else:
        largest, tokens = scores.max(-1)
        finite = bool(largest.isfinite().all())
    if not finite:
        raise NotFiniteError("NaN or infinite logits")
    return tokens


def plain_softmax(scores: Float[Tensor, "m v"], temperature: float) -> Float[Tensor, "m v"]:
    """Raises NotFiniteError where a row has NaN, +inf, or nothing finite."""
    p = torch.softmax(tempered(scores, temperature), -1)
    # One bad score makes its whole row NaN, so one column shows it.
    if bool(p[:, 0].isnan().any()):
        raise NotFiniteError("NaN or infinite logits")
    return p


def tempered(scores: Float[Tensor, "m v"], temperature: float) -> Float[Tensor, "m v"]:
    """scores / temperature, up to a constant a row."""
    if temperature < TINY:  # the largest score becomes 0 first, else the quotient would overflow
        scores = scores - scores.amax(-1, keepdim=True)
    return scores if temperature == 1 else scores / max(temperature, SMALLEST)


def fast_softmax(scores: Float[Tensor, "m v"], temperature: float) -> Float[Tensor, "m v"]:
    """`plain_softmax` of float32 rows in CPU memory, up to rounding, with probabilities below 1e-38 as 0."""
    from foretoken.kernel.softmax import softmax

    p = np.empty(scores.shape, np.float32)
    rows = np.ascontiguousarray(scores.detach().numpy())
    if not softmax(rows, inverse(temperature), ALL, p):
        raise NotFiniteError("NaN or infinite logits")
    return torch.from_numpy(p)


def inverse(temperature: float) -> np.float32:
    """What the compiled softmax multiplies scores by."""
    return np.float32(max(1 / max(temperature, SMALLEST), SMALLEST))
