"""What a layer does to its rows between the products: norms, biases, rotary embedding, gates.

Loops run over slices of a row: numba does not know that a column's number is not negative, and would look at each.
"""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.kernel.compile import compiled
from foretoken.kernel.simd import gate_row, turn_row
from foretoken.kernel.sizes import LANES


def _norm_row(x, weight, eps, out):
    """out [d] = x / sqrt(mean(x^2) + eps) * weight, of x [d] and weight [d]; out may be x."""
    squares = np.float32(0.0)
    for j in range(len(x)):
        squares += x[j] * x[j]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(len(x)) + eps)
    for j in range(len(x)):
        out[j] = x[j] * scale * weight[j]


norm_row = compiled(_norm_row, fuse=True, reorder_sums=True)


def _norm(x, weight, eps, out):
    """The same for every row of x [m, d]: out [m, d], which may be x."""
    for i in range(x.shape[0]):
        norm_row(x[i], weight, eps, out[i])


norm = compiled(_norm, fuse=True)


def _shift(x, start, end, bias):
    """Add bias[start : end] to columns start .. end - 1 of x [m, n]."""
    for i in range(x.shape[0]):
        row, more = x[i, start:end], bias[start:end]
        for j in range(len(row)):
            row[j] += more[j]


shift = compiled(_shift, fuse=True)


def _add(x, y, start, end, bias):
    """Columns start .. end - 1 of x [m, n] become x + y + bias, of y [m, n] and bias [n]."""
    for i in range(x.shape[0]):
        row, other, more = x[i, start:end], y[i, start:end], bias[start:end]
        for j in range(len(row)):
            row[j] += other[j] + more[j]


add = compiled(_add, fuse=True)


def _turn(x, at, positions, cos, sin):
    """Rotary embedding of the head in columns at .. at + dim - 1 of x [m, n], in place.

    positions: of each row [m]. cos, sin: of each position [positions, dim].
    """
    dim = cos.shape[1]
    half = dim // 2
    for i in range(x.shape[0]):
        p = positions[i]
        if half % LANES == 0:
            turn_row(x, i * x.shape[1] + at, cos, sin, p * dim, half)
        else:
            head = x[i, at : at + dim]
            for j in range(half):
                a, b = head[j], head[half + j]
                head[j] = a * cos[p, j] - b * sin[p, j]
                head[half + j] = b * cos[p, half + j] + a * sin[p, half + j]


turn = compiled(_turn, fuse=True)


def _gate(y, width, bias, out):
    """out [m, width] = silu(gate) * up of y [m, gate | up], each with its bias [2 width]; 16 divides width."""
    for i in range(y.shape[0]):
        gate_row(y, i * y.shape[1], bias, 0, width, width, out, i * width)


gate = compiled(_gate, fuse=True)
