"""Few rows times a large matrix on a CPU: how a matrix in panels goes by in strips (tile.py).

A matrix [out, in] is kept as panels [out / 64, words, 64] of 32 bits: what one pass needs lies in one stretch of
memory. While a panel is used the next one is fetched, else the processor waits for memory and computes in turn. Where
the caches do not hold both for all rows, a panel goes by in chunks.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from foretoken.kernel.compile import compiled
from foretoken.kernel.sizes import COLUMNS, DOTTED, HALVED, WHOLE
from foretoken.kernel.tile import CHUNK, PER_WORD, ROUNDED, ROWS, WIDE, rounded, strip

HELD = 2048 if WIDE else 0  # words of a column up to which a panel, and the next, fit the second cache: 512 KiB each
WORK = 400_000  # multiplications from which a second thread is worth its start
STREAMED = ROWS if WIDE else 1  # rows whose tile is a panel wide: one pass reads memory in order
WAITING = 2  # rows up to which the processor waits for memory anyway, which it fetches ahead by itself


def _panel(panel, x, x_row, words, m, w, form, y, y_at, y_row, width, after):  # type: ignore[no-untyped-def]
    """after: the panel that is used next, which is fetched meanwhile."""
    at = w + panel * words * COLUMNS * 4
    left = width - panel * COLUMNS
    into, out_row = y.ctypes.data + 4 * (y_at + panel * COLUMNS), y_row
    out = np.empty(m * COLUMNS if left < COLUMNS else 0, np.float32)
    if left < COLUMNS:
        into, out_row = out.ctypes.data, COLUMNS
    streamed = 2 if form == WHOLE and not WIDE else STREAMED
    if m <= streamed or (words <= HELD and form != WHOLE):
        ahead = 0 if m <= WAITING or form == WHOLE else after
        strip(COLUMNS, x, x_row, m, at, COLUMNS, words, form, into, out_row, 1, ahead)
    else:  # a chunk stays in the first cache for all rows while the next one is fetched
        pieces = (words + CHUNK - 1) // CHUNK
        chunk, per_word = (words + pieces - 1) // pieces, 2 if form == HALVED else 1
        for start in range(0, words, chunk):
            length = min(chunk, words - start)
            here = at + start * COLUMNS * 4
            ahead = here + length * COLUMNS * 4 if start + length < words else after
            xs = x + 4 * start * per_word
            strip(COLUMNS, xs, x_row, m, here, COLUMNS, length, form, into, out_row, int(start == 0), ahead)
    if left < COLUMNS:
        for i in range(m):
            for j in range(left):
                y[y_at + panel * COLUMNS + i * y_row + j] = out[i * COLUMNS + j]


panel_product = compiled(_panel, fuse=True)


def _panels_in(width):  # type: ignore[no-untyped-def]
    return (width + COLUMNS - 1) // COLUMNS


panels_in = compiled(_panels_in, fuse=True)


def _share(part, parts, count):  # type: ignore[no-untyped-def]
    """The first of what thread `part` of `parts` does of `count`, and the end of it."""
    return part * count // parts, (part + 1) * count // parts


share = compiled(_share, fuse=True)


def _words(k, form):  # type: ignore[no-untyped-def]
    """Of a column of k weights."""
    return k if form == WHOLE else (k + 1) // 2


words_of = compiled(_words, fuse=True)


def _panel_at(w, panel, k, form):  # type: ignore[no-untyped-def]
    """The address of a panel."""
    return w + panel * words_of(k, form) * COLUMNS * 4


panel_at = compiled(_panel_at, fuse=True)


def _panels_of(first, last, rows, bits, x_row, k, m, w, form, y, y_at, y_row, width, after):  # type: ignore[no-untyped-def]
    """Panels first .. last - 1 of the product of `_times`. rows: x in one axis; bits: what `round_rows` makes of it,
    for a DOTTED product. Both are used by address. after: of the panel that this thread uses next."""
    x, words = rows.ctypes.data, words_of(k, form)
    if form == DOTTED:
        x, form = bits.ctypes.data, ROUNDED
        x_row = words * PER_WORD
    for panel in range(first, last):
        following = w + (panel + 1) * words * COLUMNS * 4 if panel + 1 < last else after
        panel_product(panel, x, x_row, words, m, w, form, y, y_at, y_row, width, following)


panels_of = compiled(_panels_of, fuse=True)


def _panels_threads(parts, rows, bits, x_row, k, m, w, form, y, y_at, y_row, width):  # type: ignore[no-untyped-def]
    count = panels_in(width)
    for part in prange(parts):
        first, last = share(part, parts, count)
        after = panel_at(w, last, k, form)
        panels_of(first, last, rows, bits, x_row, k, m, w, form, y, y_at, y_row, width, after)


panels_threads = compiled(_panels_threads, fuse=True, parallel=True)


@intrinsic
def alive(typing: Any, array: Any) -> Any:
    """A use of an array of which only the address was taken: until here numba does not free it."""
    return types.void(array), lambda context, b, s, args: context.get_dummy_value()


def _times(x, x_row, k, m, w, form, y, y_at, y_row, width, threads):  # type: ignore[no-untyped-def]
    """y[y_at + i y_row + j] for i < m, j < width: the rows x[i x_row : i x_row + k] times the panels at address w.

    By so many threads where that saves more than it costs to start them; None for one, which is a type of its own, so
    that nothing is compiled for more. form: of the panels, see PanelLinear.
    """
    rows, flat, count = x.reshape(-1), y.reshape(-1), panels_in(width)
    bits = rounded(rows, x_row, k, m) if form == DOTTED else rows
    after = panel_at(w, count, k, form)  # weights that are used in turn stand one behind the other
    if threads is None:
        panels_of(0, count, rows, bits, x_row, k, m, w, form, flat, y_at, y_row, width, after)
    elif m * k * width > WORK:
        panels_threads(threads, rows, bits, x_row, k, m, w, form, flat, y_at, y_row, width)
    else:
        panels_of(0, count, rows, bits, x_row, k, m, w, form, flat, y_at, y_row, width, after)
    alive(rows)
    alive(bits)


times = compiled(_times, fuse=True)
