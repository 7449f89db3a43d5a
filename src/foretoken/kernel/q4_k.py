"""Rounds weights to Q4_K blocks of a GGUF file, which the gguf library reads and does not write.

A block of 256 weights has two float16 numbers d and dmin, and for each 32 of its weights two whole numbers below 64,
sub and least, and codes below 16; a weight is d sub code - dmin least (quantised.py). Each 32 weights are first fitted
alone, by a scale and a minimum of any size. Then d is the largest of the scales over 63, and dmin the largest minimum
over 63.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

import numpy as np
from numpy.typing import NDArray

from foretoken.kernel.addresses import alive, floats
from foretoken.kernel.compile import compiled, linked
from foretoken.kernel.quantised import KINDS

PART, PARTS = 32, 8  # weights of a part of a block, and parts of a block
MOST, FINEST = 15, 63  # the largest code, and the largest sub and least
TRIES = 8  # divisions of the range that are tried, by 16 to 14 steps: with more than 15 the largest codes are capped
SMALLEST = np.float16(2.0**-24)  # above 0


def quantise_q4_k(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return rows of weights as a GGUF file stores them in Q4_K, uint8 [n, k / 256 * 144].

    A block with a weight that is not finite reads back as NaN.

    weights: float32 [n, k]; 256 divides k.
    """
    parts = np.ascontiguousarray(weights, np.float32).reshape(-1, PARTS, PART)
    fitted = np.empty((2, *parts.shape[:2]), np.float32)
    fit_all(parts, *fitted)
    largest = fitted.max(2)
    pair = np.maximum((largest / FINEST).astype(np.float16), np.where(largest > 0, SMALLEST, 0))  # d, dmin [2, blocks]
    widest = pair.astype(np.float32)[..., None]
    whole = np.divide(fitted, widest, out=np.zeros_like(fitted), where=widest != 0)
    # Beside much larger parts a part becomes a constant, which is then its mean.
    mean = np.divide(-parts.mean(2), widest[1], out=np.zeros_like(fitted[1]), where=widest[1] != 0)
    whole[1] = np.where(whole[0] < 0.5, np.maximum(mean, 0), whole[1])
    whole = np.minimum(np.rint(whole), FINEST)
    scale, least = widest * whole
    steps = np.zeros_like(parts)
    np.divide(parts + least[..., None], scale[..., None], out=steps, where=scale[..., None] > 0)
    codes = np.nan_to_num(np.clip(np.rint(steps), 0, MOST)).astype(np.uint8)
    blocks = np.empty((len(parts), KINDS["q4_k"].block_bytes), np.uint8)
    blocks[:, :4] = np.ascontiguousarray(pair.T).view(np.uint8)
    sub, low = np.nan_to_num(whole).astype(np.uint8)
    blocks[:, 4:8], blocks[:, 8:12] = (x[:, :4] | x[:, 4:] >> 4 << 6 for x in (sub, low))  # six bits of each
    blocks[:, 12:16] = sub[:, 4:] & 15 | (low[:, 4:] & 15) << 4
    blocks[:, 16:] = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(len(parts), -1)
    return blocks.reshape(len(weights), -1)


@compiled
def fit(x: np.ndarray) -> tuple[float, float]:
    """Return the scale s >= 0 and the minimum m >= 0 for which s code - m fits 32 weights best by least squares.

    The codes are whole numbers from 0 to 15. s is NaN where a weight is not finite.

    x: the weights, float32 [32].
    """
    if not x.max() - x.min() < np.inf:
        return np.nan, 0.0
    low, high = min(0.0, x.min()), max(0.0, x.max())
    best, scale, least = np.inf, 0.0, 0.0 if low == 0 else -low
    for i in range(TRIES if high > low else 0):
        step = (high - low) / (16 - 2 * i / (TRIES - 1))
        c_sum, c_square, x_sum, both = 0.0, 0.0, 0.0, 0.0
        for weight in x:
            code = min(np.rint((weight - low) / step), MOST)
            c_sum, c_square, x_sum, both = c_sum + code, c_square + code * code, x_sum + weight, both + code * weight
        spread = PART * c_square - c_sum * c_sum
        s, m = (PART * both - c_sum * x_sum) / spread, (c_sum * both - c_square * x_sum) / spread
        if spread <= 0 or m < 0:
            s, m = both / c_square, 0.0
        if s <= 0:
            continue
        error = 0.0
        for weight in x:
            code = min(max(np.rint((weight + m) / s), 0), MOST)
            error += (s * code - m - weight) ** 2
        if error < best:
            best, scale, least = error, s, m
    return scale, least


@linked("foretoken_fit", 4)
def fit_parts(parts: int, count: int, scales: int, leasts: int) -> None:
    """Fit parts of blocks by `fit`; all arguments are whole numbers.

    parts, count: address of their weights, float32 [count, 32], and their number.
    scales, leasts: addresses of the fits, float32 [count], which are written.
    """
    x, s, m = floats(parts, (count, PART)), floats(scales, (count,)), floats(leasts, (count,))
    for i in range(count):
        s[i], m[i] = fit(x[i])


@compiled
def fit_all(parts: np.ndarray, scales: np.ndarray, leasts: np.ndarray) -> None:
    """Fit each of the parts of all blocks by `fit`.

    parts: weights, float32 [blocks, 8, 32].
    scales, leasts: are filled with the fits, float32 [blocks, 8].
    """
    fit_parts(parts.ctypes.data, scales.size, scales.ctypes.data, leasts.ctypes.data)
    alive((parts, scales, leasts))
