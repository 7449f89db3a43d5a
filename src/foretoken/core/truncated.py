"""Probabilities of the likelier tokens alone: top-k, top-p and min-p. In torch, and compiled for a CPU."""

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import NotFiniteError
from foretoken.core.shapes import Float
from foretoken.core.softmax import TINY, inverse, softmax, tempered

NEGATIVE_INFINITY = float("-inf")
Truncation = tuple[int, float, float]  # top_k, top_p, min_p


def truncated_softmax(
    scores: Float[Tensor, "m v"], temperature: float, top_k: int, top_p: float, min_p: float
) -> Float[Tensor, "m v"]:
    """softmax of scores / temperature, temperature > 0, over the tokens that `plain_truncated` keeps.

    Raises NotFiniteError where a row has NaN, +inf, or nothing finite.
    """
    if scores.device.type == "cpu" and scores.dtype == torch.float32 and temperature >= TINY:
        return fast_truncated_softmax(scores, temperature, top_k, top_p, min_p)
    return softmax(plain_truncated(tempered(scores, temperature), top_k, top_p, min_p), 1.0)


def plain_truncated(scores: Float[Tensor, "m v"], top_k: int, top_p: float, min_p: float) -> Float[Tensor, "m v"]:
    """The scores of the tokens that are kept, of all others -inf.

    top_k: the k best ones and those equal to the last of them; 0: all. top_p: of the rest, those above which the mass
    is below top_p; of equal scores the last ones are above. min_p: of the rest, those with min_p times the largest
    probability. Each as in transformers.
    """
    if 0 < top_k < scores.shape[-1]:
        kth = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, NEGATIVE_INFINITY)
    if top_p < 1:
        ascending, order = scores.sort(dim=-1, stable=True)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        drop[:, -1] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), NEGATIVE_INFINITY)
    if min_p:
        p = scores.softmax(-1)
        scores = scores.masked_fill(p < min_p * p.amax(-1, keepdim=True), NEGATIVE_INFINITY)
    return scores


def fast_truncated_softmax(
    scores: Float[Tensor, "m v"], temperature: float, top_k: int, top_p: float, min_p: float
) -> Float[Tensor, "m v"]:
    """The same of float32 rows in CPU memory without sorting them: up to rounding, which may also decide about the
    token at the cut."""
    from foretoken.kernel.softmax import softmax

    rows, p = np.ascontiguousarray(scores.detach().numpy()), np.empty(scores.shape, np.float32)
    if not softmax(rows, inverse(temperature), (top_k, float(top_p), float(min_p)), p):
        raise NotFiniteError("NaN or infinite logits")
    return torch.from_numpy(p)
