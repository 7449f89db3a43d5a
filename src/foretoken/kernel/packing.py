"""Lays out the quantised weights of a file in panels; quantised.py describes both."""

# pyright: reportCallIssue=false

import numpy as np
from numpy.typing import NDArray

from foretoken.kernel.addresses import alive, arrays_of, octets
from foretoken.kernel.compile import compiled, linked
from foretoken.kernel.quantised import BY_FORM, GROUP_BYTES, KINDS, packed_bytes, read_block
from foretoken.kernel.sizes import COLUMNS, LANES, QUANTISED

fours_at = arrays_of(np.uint32)  # of four codes each


def to_panels(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Lay out a matrix in panels.

    kind: a name among KINDS.
    raw: its rows as a GGUF file stores them, uint8 [out, bytes per row].

    Returns the panels one behind the other, uint8 [packed_bytes]; the last one is filled up with zeros to 64 columns.
    """
    known = KINDS[kind]
    out, row_bytes = raw.shape
    panels = np.zeros(packed_bytes(kind, out, row_bytes // known.block_bytes * known.weights), np.uint8)
    rows = np.ascontiguousarray(raw).view()
    rows.flags.writeable = False  # as mapped files are, so that the loop is compiled once for all
    lay_out(rows, known.form, panels)
    return panels


@compiled
def lay_out(raw, form, panels):
    """Lay out rows of a file as panels.

    raw: the rows, uint8 [out, bytes per row].
    form: the number of a kind.
    panels: is filled, uint8 [packed_bytes]; zeros before.
    """
    pack_rows(raw.ctypes.data, raw.shape[0], raw.shape[1], form, panels.ctypes.data, len(panels))
    alive((raw, panels))


@linked("foretoken_pack", 6)
def pack_rows(raw, out, row_bytes, form, packed, size):
    """Lay out rows of a file as panels; all arguments are whole numbers.

    raw, out, row_bytes: address of the rows, their number, and the bytes of each.
    form: the number of a kind.
    packed, size: address of the panels, which are written, and their bytes; zeros before.
    """
    kind, group_bytes = BY_FORM[form - QUANTISED], GROUP_BYTES[form - QUANTISED]
    groups = row_bytes // kind.block_bytes
    scales_bytes = 2 * COLUMNS * (1 + kind.least)
    subs_bytes = COLUMNS * kind.subs * (1 + kind.least)
    strip_bytes = 4 * LANES * kind.bits  # as many vectors as a code has bits
    block_bytes = subs_bytes + COLUMNS // LANES * strip_bytes
    codes, subs, least = np.empty(256, np.uint8), np.empty(16, np.uint8), np.empty(8, np.uint8)
    rows, panels, words = octets(raw, (out, row_bytes)), octets(packed, (size,)), fours_at(packed, (size // 4,))
    fours = fours_at(codes.ctypes.data, (len(codes) // 4,))
    for first in range(0, out, COLUMNS):
        panel = first // COLUMNS * groups * group_bytes
        for column in range(min(COLUMNS, out - first)):
            row = rows[first + column]
            for group in range(groups):
                begin, to = group * kind.block_bytes, panel + group * group_bytes
                d_at, least_at = read_block(row, begin, form, codes, subs, least)
                for i in range(2):
                    panels[to + 2 * column + i] = row[begin + d_at + i]
                    if kind.least:
                        panels[to + 2 * COLUMNS + 2 * column + i] = row[begin + least_at + i]
                for block in range(kind.weights // 32):
                    here = to + scales_bytes + block * block_bytes
                    for i in range(kind.subs):
                        panels[here + COLUMNS * i + column] = subs[block * kind.subs + i]
                    if kind.subs > 0 and kind.least:
                        panels[here + COLUMNS * kind.subs + column] = least[block]
                    # In words of 32 bits, of four codes each.
                    at = (here + subs_bytes + column // LANES * strip_bytes) // 4 + column % LANES
                    strip, four = words[at:], fours[8 * block : 8 * block + 8]
                    if kind.bits == 8:
                        for g in range(8):
                            strip[LANES * g] = four[g]
                        continue
                    for v in range(4):
                        strip[LANES * v] = (four[v] & 0x0F0F0F0F) | ((four[v + 4] & 0x0F0F0F0F) << 4)
                    for g in range(8 if kind.bits > 4 else 0):
                        vector, shift = (4, g) if kind.bits == 5 else (4 + g // 4, 2 * (g % 4))
                        strip[LANES * vector] |= ((four[g] >> 4) & 0x03030303) << shift
    alive(codes)
