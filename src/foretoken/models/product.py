"""Few rows times a large matrix on a CPU: how a matrix in panels goes by in strips (tile.py).

A matrix [out, in] is kept as panels [out / 64, words, 64] of 32 bits: what one pass needs lies in one stretch of
memory. While a panel is used the next one is fetched, else the processor waits for memory and computes in turn. Where
the caches do not hold both for all rows, a panel goes by in chunks. Imports numba, so it is itself imported where it is
first needed.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from foretoken.models.panels import COLUMNS as PANEL
from foretoken.models.panels import DOTTED, HALVED, WHOLE
from foretoken.models.tile import CHUNK, PER_WORD, ROUNDED, ROWS, WIDE, machine_code, rounded, strip

HELD = 2048 if WIDE else 0  # words of a column up to which a panel, and the next, fit the second cache: 512 KiB each
WORK = 400_000  # multiplications from which a second thread is worth its start
STREAMED = ROWS if WIDE else 1  # rows whose tile is a panel wide: one pass reads memory in order
WAITING = 2  # rows up to which the processor waits for memory anyway, which it fetches ahead by itself


def _panel(panel, x, x_row, words, m, w, form, y, y_at, y_row, width):  # type: ignore[no-untyped-def]
    at = w + panel * words * PANEL * 4
    left = width - panel * PANEL
    into, out_row = y.ctypes.data + 4 * (y_at + panel * PANEL), y_row
    out = np.empty(m * PANEL if left < PANEL else 0, np.float32)
    if left < PANEL:
        into, out_row = out.ctypes.data, PANEL
    streamed = 2 if form == WHOLE and not WIDE else STREAMED
    if m <= streamed or (words <= HELD and form != WHOLE):
        ahead = 0 if m <= WAITING or form == WHOLE else at + words * PANEL * 4  # the panel that is used next
        strip(PANEL, x, x_row, m, at, PANEL, words, form, into, out_row, 1, ahead)
    else:  # a chunk stays in the first cache for all rows while the next one is fetched
        pieces = (words + CHUNK - 1) // CHUNK
        chunk, per_word = (words + pieces - 1) // pieces, 2 if form == HALVED else 1
        for start in range(0, words, chunk):
            length = min(chunk, words - start)
            here = at + start * PANEL * 4
            ahead = here + length * PANEL * 4
            xs = x + 4 * start * per_word
            strip(PANEL, xs, x_row, m, here, PANEL, length, form, into, out_row, int(start == 0), ahead)
    if left < PANEL:
        for i in range(m):
            for j in range(left):
                y[y_at + panel * PANEL + i * y_row + j] = out[i * PANEL + j]


panel_product = machine_code(_panel)


def _product(x, x_row, words, m, w, form, y, y_at, y_row, width):  # type: ignore[no-untyped-def]
    for panel in range((width + PANEL - 1) // PANEL):
        panel_product(panel, x, x_row, words, m, w, form, y, y_at, y_row, width)


def _product_threads(x, x_row, words, m, w, form, y, y_at, y_row, width):  # type: ignore[no-untyped-def]
    for panel in prange((width + PANEL - 1) // PANEL):
        panel_product(panel, x, x_row, words, m, w, form, y, y_at, y_row, width)


product = machine_code(_product)
product_threads = machine_code(_product_threads, parallel=True)


@intrinsic
def alive(typing: Any, array: Any) -> Any:
    """A use of an array of which only the address was taken: until here numba does not free it."""
    return types.void(array), lambda context, b, s, args: context.get_dummy_value()


def _times(x, x_row, k, m, w, form, y, y_at, y_row, width, threads):  # type: ignore[no-untyped-def]
    """y[y_at + i y_row + j] for i < m, j < width: the rows x[i x_row : i x_row + k] times the panels at address w.

    By all threads where that saves more than it costs to start them. threads: None for one thread, which is a type of
    its own, so that nothing is compiled for more. form: of the panels, see PanelLinear.
    """
    rows, flat, words = x.reshape(-1), y.reshape(-1), k  # one type, so that what they call is compiled once
    if form == DOTTED:
        words = (k + 1) // 2
        rows = rounded(rows, x_row, k, m)
        x_row, form = words * PER_WORD, ROUNDED
    elif form == HALVED:
        words = k // 2
    x_at = rows.ctypes.data
    if threads is None:
        product(x_at, x_row, words, m, w, form, flat, y_at, y_row, width)
    elif m * k * width > WORK:
        product_threads(x_at, x_row, words, m, w, form, flat, y_at, y_row, width)
    else:
        product(x_at, x_row, words, m, w, form, flat, y_at, y_row, width)
    alive(rows)


times = machine_code(_times)
