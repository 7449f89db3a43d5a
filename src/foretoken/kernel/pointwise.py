"""What a layer does to its rows between the products: norms, biases, rotary embedding, gates.

All arrays of numbers are float32. Loops run over slices of a row: in a loop over x[i, j] itself numba would check at
each number whether the index j is negative.
"""

# pyright: reportCallIssue=false

from functools import partial

import numpy as np

from foretoken.kernel.compile import compiled, fused
from foretoken.kernel.simd import gate_row, turn_row
from foretoken.kernel.sizes import LANES, SILU

CURVE = np.float32(SILU[0]), np.float32(SILU[1])


@partial(compiled, fuse=True, reorder_sums=True)
def norm_row(x, weight, eps, out):
    """Fill out with x / sqrt(mean(x^2) + eps) * weight, the RMS norm of one row.

    x, weight, out: [d]; out may be x.
    eps: what is added to the mean square, in float32.
    """
    squares = np.float32(0.0)
    for j in range(len(x)):
        squares += x[j] * x[j]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(len(x)) + eps)
    for j in range(len(x)):
        out[j] = x[j] * scale * weight[j]


@fused
def put(x, out, first):
    """Copy x into some columns of out, by a loop, since numba compiles seconds of error messages for `out[:] = x`.

    x: float32 [n, k].
    out: is filled in columns first to first + k - 1, float32 [n, w].
    first: the first of these columns.
    """
    for i in range(x.shape[0]):
        row, place = x[i], out[i, first : first + x.shape[1]]
        for j in range(len(row)):
            place[j] = row[j]


@fused
def increase(x, more):
    """Add more to x, in place, by a loop for the same reason as in `put`; x, more: [n, k]."""
    for i in range(x.shape[0]):
        row, other = x[i], more[i]
        for j in range(len(row)):
            row[j] += other[j]


@fused
def norm(x, weight, eps, out):
    """Fill every row of out with the RMS norm of that row of x.

    x, out: [m, d]; out may be x.
    weight, eps: as in `norm_row`.
    """
    for i in range(x.shape[0]):
        norm_row(x[i], weight, eps, out[i])


@fused
def shift(x, start, end, bias):
    """Add bias[start : end] to columns start .. end - 1 of every row of x, in place.

    x: [m, n].
    start, end: numbers of columns.
    bias: [end or more].
    """
    for i in range(x.shape[0]):
        row, more = x[i, start:end], bias[start:end]
        for j in range(len(row)):
            row[j] += more[j]


@fused
def add(x, y, start, end, bias):
    """Add y + bias to x in columns start .. end - 1, in place.

    x, y: [m, n].
    start, end: numbers of columns.
    bias: [end or more].
    """
    for i in range(x.shape[0]):
        row, other, more = x[i, start:end], y[i, start:end], bias[start:end]
        for j in range(len(row)):
            row[j] += other[j] + more[j]


@fused
def turn(x, at, positions, cos, sin):
    """Apply the rotary embedding to the head in columns at .. at + dim - 1 of x, in place.

    x: [m, n].
    at: the head's first column.
    positions: of each row, its position [m] int64.
    cos, sin: the cosines and sines of every position [positions, dim].
    """
    dim = cos.shape[1]
    half = dim // 2
    for i in range(x.shape[0]):
        p, head = positions[i], x[i, at : at + dim]
        if half % LANES == 0:
            turn_row(head, cos[p], sin[p])
        else:
            for j in range(half):
                a, b = head[j], head[half + j]
                head[j] = a * cos[p, j] - b * sin[p, j]
                head[half + j] = b * cos[p, half + j] + a * sin[p, half + j]


@fused
def gate(y, width, bias, out):
    """Fill out with silu(gate + gate bias) * (up + up bias) of y.

    y: gates and, beside them, ups [m, 2 width].
    width: columns of each; 16 divides it.
    bias: biases of the gates and of the ups [2 width].
    out: [m, width].
    """
    for i in range(y.shape[0]):
        gate_row(y[i, :width], y[i, width:], bias[:width], bias[width:], CURVE, out[i])
