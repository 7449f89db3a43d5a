"""Few rows times a large matrix: how a matrix in panels goes by in strips (tile.py).

A matrix [out, in] is kept as panels [out / 64, words, 64] of 32 bits: what one pass needs lies in one stretch of
memory. While it is used, what comes next is fetched, else the processor waits for memory and computes in turn: the
bytes a little further on where all rows go by in one pass, the next panel where they take several. Where the caches do
not hold both for all rows, a panel goes by in chunks.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import prange

from foretoken.kernel.addresses import alive, floats
from foretoken.kernel.compile import compiled, fused
from foretoken.kernel.dots import quantise_rows, quantised_panels
from foretoken.kernel.matrix_unit import GROUP
from foretoken.kernel.processor import WIDE
from foretoken.kernel.quantised import panel_bytes
from foretoken.kernel.rounding import PER_WORD, ROUNDED, rounded
from foretoken.kernel.sizes import COLUMNS, DOTTED, HALVED, QUANTISED, WHOLE
from foretoken.kernel.tile import streaming, strip

HELD = 2048 if WIDE else 0  # words of a column up to which a panel, and the next, fit the second cache: 512 KiB each
WORK = 400_000  # multiplications from which a second thread is worth its start


class Product(NamedTuple):
    """The product of m rows of k numbers with a matrix; the arrays at these addresses must be kept alive.

    x: address of the first row; rows are x_row numbers apart.
    bits: address of the same rows as `round_rows` makes them, read if the form is DOTTED; or as `quantise_rows` does,
        read if it is one of quantised weights.
    w: address of the panels, in the form `form`: see PanelLinear and PackedLinear.
    y: address of the first row of the product; rows are y_row numbers apart.
    width: columns of the product.
    """

    x: int
    x_row: int
    bits: int
    m: int
    k: int
    w: int
    form: int
    y: int
    y_row: int
    width: int


@fused
def panels_in(width):
    """The number of panels of a matrix with so many outputs."""
    return (width + COLUMNS - 1) // COLUMNS


@fused
def share(part, parts, count):
    """The first of what thread `part` of `parts` does of `count`, and the end of it."""
    return part * count // parts, (part + 1) * count // parts


@fused
def words_of(k, form):
    """The words of a column of k weights."""
    return k if form == WHOLE else (k + 1) // 2


@fused
def panel_at(w, panel, k, form):
    """The address of a panel of the matrix at address w, whose columns have k weights."""
    if form >= QUANTISED:
        return w + panel * panel_bytes(k, form)
    return w + panel * words_of(k, form) * COLUMNS * 4


@fused
def columns_of(product, panel, y, y_row, after):
    """Compute the 64 columns of one panel.

    y: address of the first of them; rows are y_row numbers apart.
    after: address of the panel that is used next, which is fetched meanwhile.
    """
    m, form = product.m, product.form
    x, x_row, words, per_word = product.x, product.x_row, words_of(product.k, form), 2 if form == HALVED else 1
    at = product.w + panel * words * COLUMNS * 4
    if form == DOTTED:
        x, form, per_word, x_row = product.bits, ROUNDED, PER_WORD, words * PER_WORD
    streamed, distance, most = streaming(form)
    if m <= streamed or (words <= HELD and form != WHOLE):
        ahead = at + distance if m <= streamed else after
        strip(COLUMNS, x, x_row, m, at, COLUMNS, words, form, y, y_row, 1, ahead)
        return
    pieces = (words + most - 1) // most
    chunk = (words + pieces * GROUP - 1) // (pieces * GROUP) * GROUP
    for start in range(0, words, chunk):  # a chunk stays in the first cache for all rows while the next one is fetched
        length = min(chunk, words - start)
        here = at + start * COLUMNS * 4
        ahead = here + length * COLUMNS * 4 if start + length < words else after
        xs = x + 4 * start * per_word
        strip(COLUMNS, xs, x_row, m, here, COLUMNS, length, form, y, y_row, int(start == 0), ahead)


@fused
def panels_of(product, first, last, after):
    """Compute panels first .. last - 1. after: the address of the panel that this thread uses next."""
    m, y_row = product.m, product.y_row
    if product.form >= QUANTISED:
        w, form, k, y, width = product.w, product.form, product.k, product.y, product.width
        quantised_panels(w, form, first, last, k, product.bits, m, y, y_row, width)
        return
    for panel in range(first, last):
        following = panel_at(product.w, panel + 1, product.k, product.form) if panel + 1 < last else after
        y, left = product.y + 4 * panel * COLUMNS, product.width - panel * COLUMNS
        if left >= COLUMNS:
            columns_of(product, panel, y, y_row, following)
        else:  # the last panel's columns beyond the matrix are not part of y
            whole = np.empty((m, COLUMNS), np.float32)
            columns_of(product, panel, whole.ctypes.data, COLUMNS, following)
            for i in range(m):
                row = floats(y + 4 * i * y_row, (left,))
                for j in range(left):
                    row[j] = whole[i, j]


@partial(compiled, fuse=True, parallel=True)
def panels_threads(product, parts):
    """Compute all panels, by so many threads."""
    count = panels_in(product.width)
    for part in prange(parts):
        first, last = share(part, parts, count)
        panels_of(product, first, last, panel_at(product.w, last, product.k, product.form))


@fused
def times(x, w, form, width, y, threads):
    """The first `width` columns of y [m, n] become x [m, k] times the panels at address w.

    form: of the panels, see PanelLinear and PackedLinear.
    threads: by so many, where that saves more than it costs to start them; None for one, which is a type of its own,
        so that nothing is compiled for more.
    """
    (m, k), count = x.shape, panels_in(width)
    bits = x
    if form == DOTTED:
        bits = rounded(x, k)
    elif form >= QUANTISED:
        bits = np.empty((m, k // 2), np.float32)  # a line of 64 bytes for each 32 numbers
        quantise_rows(x.ctypes.data, k, m, k, bits.ctypes.data)
    product = Product(x.ctypes.data, k, bits.ctypes.data, m, k, w, form, y.ctypes.data, y.shape[1], width)
    after = panel_at(w, count, k, form)  # weights that are used in turn stand one behind the other
    if threads is not None and m * k * width > WORK:  # None first, so that numba leaves out what is for more threads
        panels_threads(product, threads)
    else:
        panels_of(product, 0, count, after)
    alive(x)
    alive(bits)
