"""Products of few rows with a large matrix, which is used panel by panel; tile.py computes each piece.

A matrix [out, in] is kept as panels [out / 64, words, 64] of 32 bits: what one pass needs lies in one stretch of
memory. While a panel is used, what comes next is fetched into the cache, else the processor would wait for memory and
compute in turn. If all rows are multiplied in one pass over a panel, the bytes a little further on are fetched, and if
they take several passes, the next panel. If the caches do not hold both panels, a panel is used in chunks of its words,
each for all rows.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import prange

from foretoken.kernel.addresses import alive, floats
from foretoken.kernel.compile import compiled, fused, linked
from foretoken.kernel.dots import quantise_rows, quantised_panels
from foretoken.kernel.matrix_unit import GROUP
from foretoken.kernel.processor import WIDE
from foretoken.kernel.quantised import panel_bytes
from foretoken.kernel.rounding import PER_WORD, ROUNDED, rounded
from foretoken.kernel.sizes import COLUMNS, DOTTED, HALVED, QUANTISED, WHOLE
from foretoken.kernel.tile import streaming, strip

HELD = 2048 if WIDE else 0  # most words of a column with which two panels, of 512 KiB each, fit the second cache
WORK = 400_000  # a product with more multiplications than this is computed in several threads


class Product(NamedTuple):
    """The product of m rows of k numbers with a matrix. The arrays at these addresses must be kept alive.

    x: address of the first row, float32.
    x_row: float32 numbers from one row of x to the next.
    bits: address of the same rows as `round_rows` makes them, which is read if the form is DOTTED, or as
        `quantise_rows` makes them, which is read if the form is one of quantised weights.
    m, k: number of rows, and inputs of the matrix.
    w: address of the panels, which PanelLinear and PackedLinear of models/panels.py describe.
    form: their form.
    y: address of the first row of the product, float32.
    y_row: float32 numbers from one row of y to the next.
    width: number of columns of the product.
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
    """Return the number of panels of a matrix with `width` outputs."""
    return (width + COLUMNS - 1) // COLUMNS


@fused
def share(part, parts, count):
    """Return the share of one thread in a number of things: the first of them, and the end, which is not part of it.

    part, parts: the thread's number, and the number of threads.
    count: number of things.
    """
    return part * count // parts, (part + 1) * count // parts


@fused
def panel_at(w, panel, k, form):
    """Return the address of a panel.

    w: address of the matrix's first panel.
    panel: number of the panel.
    k, form: inputs and form of the matrix.
    """
    if form >= QUANTISED:
        return w + panel * panel_bytes(k, form)
    return w + panel * (k if form == WHOLE else (k + 1) // 2) * COLUMNS * 4


@fused
def columns_of(product, panel, y, y_row, after):
    """Compute the 64 columns of one panel, in the form WHOLE, HALVED or DOTTED.

    product: a Product.
    panel: number of the panel.
    y: address of the first of the columns' sums, float32.
    y_row: float32 numbers from one row of sums to the next.
    after: address of the panel that is used next, which is fetched meanwhile.
    """
    m, form = product.m, product.form
    words, per_word = product.k if form == WHOLE else (product.k + 1) // 2, 2 if form == HALVED else 1
    x, x_row, at = product.x, product.x_row, panel_at(product.w, panel, product.k, form)
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


@linked("foretoken_panels", 13)
def panels(x, x_row, bits, m, k, w, form, y, y_row, width, first, last, after):
    """Compute some panels of a product; called by name, since every loop with a product would hold a copy of it.

    x, x_row, bits, m, k, w, form, y, y_row, width: the fields of a Product.
    first, last, after: as in `panels_of`.
    """
    if form >= QUANTISED:
        quantised_panels(w, form, first, last, k, bits, m, y, y_row, width)
        return
    product = Product(x, x_row, bits, m, k, w, form, y, y_row, width)
    for panel in range(first, last):
        following = panel_at(w, panel + 1, k, form) if panel + 1 < last else after
        here, left = y + 4 * panel * COLUMNS, width - panel * COLUMNS
        if left >= COLUMNS:
            columns_of(product, panel, here, y_row, following)
        else:  # the last panel's columns beyond the matrix are not part of y
            whole = np.empty((m, COLUMNS), np.float32)
            columns_of(product, panel, whole.ctypes.data, COLUMNS, following)
            for i in range(m):
                row = floats(here + 4 * i * y_row, (left,))
                for j in range(left):
                    row[j] = whole[i, j]


@fused
def panels_of(product, first, last, after):
    """Compute some panels of a product.

    product: a Product.
    first, last: panels first .. last - 1.
    after: address of the panel that this thread uses next, which is fetched while the last panel is computed; panels of
        quantised weights do without.
    """
    p = product
    panels(p.x, p.x_row, p.bits, p.m, p.k, p.w, p.form, p.y, p.y_row, p.width, first, last, after)


@partial(compiled, fuse=True, parallel=True)
def panels_threads(product, parts):
    """Compute all panels of a product in several threads.

    product: a Product.
    parts: number of threads.
    """
    count = panels_in(product.width)
    for part in prange(parts):
        first, last = share(part, parts, count)
        panels_of(product, first, last, panel_at(product.w, last, product.k, product.form))


@fused
def times(x, w, form, width, y, threads):
    """Fill the first `width` columns of y with the product of x and a matrix.

    x: float32 [m, k].
    w: address of the matrix's panels, which PanelLinear and PackedLinear of models/panels.py describe.
    form: their form.
    width: number of columns of the product.
    y: float32 [m, width or more].
    threads: number of threads, used where that saves more than it costs to start them. None for one thread, which is a
        type of its own, so that no code for more is compiled.
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
