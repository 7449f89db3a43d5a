"""What a layer does to its rows between the products: norms, biases, rotary embedding, gates.

Loops run over slices of a row: numba does not know that a column's number is not negative, and would look at each.
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
    """out [d] = x / sqrt(mean(x^2) + eps) * weight, of x [d] and weight [d]; out may be x."""
    squares = np.float32(0.0)
    for j in range(len(x)):
        squares += x[j] * x[j]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(len(x)) + eps)
    for j in range(len(x)):
        out[j] = x[j] * scale * weight[j]


@fused
def norm(x, weight, eps, out):
    """The same for every row of x [m, d]: out [m, d], which may be x."""
    for i in range(x.shape[0]):
        norm_row(x[i], weight, eps, out[i])


@fused
def shift(x, start, end, bias):
    """Add bias[start : end] to columns start .. end - 1 of x [m, n]."""
    for i in range(x.shape[0]):
        row, more = x[i, start:end], bias[start:end]
        for j in range(len(row)):
            row[j] += more[j]


@fused
def add(x, y, start, end, bias):
    """Columns start .. end - 1 of x [m, n] become x + y + bias, of y [m, n] and bias [n]."""
    for i in range(x.shape[0]):
        row, other, more = x[i, start:end], y[i, start:end], bias[start:end]
        for j in range(len(row)):
            row[j] += other[j] + more[j]


@fused
def turn(x, at, positions, cos, sin):
    """Rotary embedding of the head in columns at .. at + dim - 1 of x [m, n], in place.

    positions: of each row [m]. cos, sin: of each position [positions, dim].
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
    """out [m, width] = silu(gate) * up of y [m, gate | up], each with its bias [2 width]; 16 divides width."""
    for i in range(y.shape[0]):
        gate_row(y[i, :width], y[i, width:], bias[:width], bias[width:], CURVE, out[i])
