"""A drafter's LM head that reads half of its bytes: all logits by 4 bits, and the largest of them again by 8 bits.

The time of a draft token is mostly that of reading memory, and the LM head is a third of what is read. With 4 bits in
the LM head a drafter agrees less with its target (the entry of 2026-11-25 on a model as its own drafter in
docs/LOG.md), since nearly equal logits change places. So all logits are computed by 4 bits, and then the panels of the
largest ones again by 8 bits. The drafter's q is made of the logits that result, so that drafting stays lossless.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import numpy as np
from numpy.typing import NDArray

from foretoken.kernel.addresses import alive
from foretoken.kernel.compile import fused
from foretoken.kernel.dots import quantise_rows, quantised_panels
from foretoken.kernel.memory import Arena
from foretoken.kernel.product import panels_in, times
from foretoken.kernel.quantised import KINDS, Q4_0
from foretoken.kernel.sizes import COLUMNS, LANES

# Panels of 64 logits per row that are computed again. As many draft tokens of SmolLM2 were then accepted as with a head
# in 8 bits, at T = 0 and 0.7; with 8 panels and with 4 they were fewer (the entry of 2026-11-25 on a screen in
# docs/LOG.md).
AGAIN = 16
PART = 4096  # groups of a matrix that are converted at a time


def screen_of(panels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the panels in q4_0 of a matrix whose panels are in q8_0, both as quantised.py lays them out.

    A code of 8 bits becomes the nearest multiple of 16, of which 4 bits are kept; the scale grows 16 times.

    panels: uint8 [bytes].
    """
    scales = 2 * COLUMNS
    groups = panels.reshape(-1, KINDS["q8_0"].group_bytes)
    halved = Arena().zeros((len(groups), KINDS["q4_0"].group_bytes), np.uint8)  # which starts a cache line
    for first in range(0, len(groups), PART):
        group, out = groups[first : first + PART], halved[first : first + PART]
        out[:, :scales].view(np.float16)[:] = group[:, :scales].view(np.float16) * np.float16(16)
        codes = group[:, scales:].view(np.int8).reshape(len(group), COLUMNS // LANES, 2, -1)  # k below 16, and above
        steps = (np.minimum(((codes >> 1) + np.int8(4)) >> 3, np.int8(7)) + np.int8(8)).view(np.uint8)
        out[:, scales:] = (steps[:, :, 0] | (steps[:, :, 1] << 4)).reshape(len(group), -1)
    return halved.reshape(-1)


@fused
def screened(x, head, logits, threads):
    """Fill logits with the products of rows and an LM head that has a screen; the largest ones come from its 8 bits.

    A row's logits depend neither on the number of threads nor on the rows beside it.

    x: float32 [n, k].
    head: a Head whose `screen` is not 0.
    logits: is filled, float32 [n, v].
    threads: the largest number of threads; None for one.
    """
    (m, k), v = x.shape, logits.shape[1]
    times(x, head.screen, Q4_0, v, logits, threads)
    largest, line = np.empty(panels_in(v), np.float32), np.empty(k // 2, np.float32)
    for i in range(m):
        row = logits[i]
        for panel in range(len(largest)):
            first, last = panel * COLUMNS, min((panel + 1) * COLUMNS, v)
            most = row[first]
            for j in range(first + 1, last):
                most = max(most, row[j])
            largest[panel] = most
        quantise_rows(x[i].ctypes.data, k, 1, k, line.ctypes.data)
        for _ in range(min(AGAIN, len(largest))):
            panel = np.argmax(largest)
            largest[panel] = -np.inf
            quantised_panels(head.address, head.form, panel, panel + 1, k, line.ctypes.data, 1, row.ctypes.data, v, v)
    alive(x)
    alive(line)
