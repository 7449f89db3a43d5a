"""Weights in the blocks of GGUF files, laid out anew for the kernel: a few bits and a share of a scale for each.

A file stores a row of a matrix in blocks of 32 or 256 weights. A weight of block b is

    scale * (code - offset)              q8_0, q4_0, q5_0: a float16 scale per block
    scale * code + minimum               q4_1, q5_1: and a float16 minimum
    d * sub * code - dmin * least        q4_k, q5_k: float16 d and dmin per 256 weights, whole numbers per 32
    d * sub * (code - 32)                q6_k: float16 d per 256 weights, a whole number per 16

A panel is 64 columns of the transposed matrix, as everywhere in the kernel. It goes by in groups of 32 weights per
column, or of 256 for the last two lines above. Nothing is rounded on the way from the file:

    group:   d (float16 x 64) | dmin or minimum (float16 x 64, if the kind has one) | block | ... 1 or 8 blocks of 32
    block:   subs (bytes x 64, twice for q6_k; only in groups of 256) | least (bytes x 64, likewise) | 4 strips
    strip:   16 columns: 4 vectors of low halves | the vectors of high bits (one for 5 bits, two for 6)
    vector:  16 words of 32 bits, one per column; each word holds four bytes, of four k in a row

Low half of vector v: the code's lowest 4 bits of k = 4 v .. 4 v + 3, and above them those of k + 16. Fifth bits of
k = 4 g .. 4 g + 3 are bit g of the bytes of one vector; of 6-bit codes, bits 2 (g % 4) and 2 (g % 4) + 1 of vector
g // 4. Codes of q8_0 are signed bytes, 8 vectors to a strip.
"""

# pyright: reportCallIssue=false

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.kernel.compile import compiled
from foretoken.kernel.sizes import COLUMNS, QUANTISED


class Kind(NamedTuple):
    """How one of GGUF's types stores weights.

    form: its number among the forms of panels.
    weights, block_bytes: weights and bytes of a block in the file.
    bits: bits of a code.
    offset: what is subtracted from every code.
    least: whether a minimum is added to every weight.
    subs: whole numbers per 32 weights by which the scale of 256 weights is multiplied; 0 where each 32 weights have a
        scale of their own.
    """

    form: int
    weights: int
    block_bytes: int
    bits: int
    offset: int
    least: bool
    subs: int

    @property
    def group_bytes(self) -> int:
        """The bytes of a group of a panel: as many weights as a block of the file has, for each of 64 columns."""
        block = self.subs * (2 if self.least else 1) + 4 * self.bits
        return COLUMNS * (2 + 2 * self.least + self.weights // 32 * block)


Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K = range(QUANTISED, QUANTISED + 8)
KINDS = {
    "q8_0": Kind(Q8_0, 32, 34, 8, 0, False, 0),
    "q4_0": Kind(Q4_0, 32, 18, 4, 8, False, 0),
    "q4_1": Kind(Q4_1, 32, 20, 4, 0, True, 0),
    "q5_0": Kind(Q5_0, 32, 22, 5, 16, False, 0),
    "q5_1": Kind(Q5_1, 32, 24, 5, 0, True, 0),
    "q4_k": Kind(Q4_K, 256, 144, 4, 0, True, 1),
    "q5_k": Kind(Q5_K, 256, 176, 5, 0, True, 1),
    "q6_k": Kind(Q6_K, 256, 210, 6, 32, False, 2),
}
BY_FORM = tuple(KINDS.values())  # compiled loops look a kind up at form - QUANTISED
GROUP_BYTES = tuple(kind.group_bytes for kind in BY_FORM)  # likewise


def packed_bytes(kind: str, out: int, k: int) -> int:
    """Return the number of bytes of a matrix's panels.

    kind: a name among KINDS.
    out, k: outputs and inputs of the matrix; a block's number of weights divides k.
    """
    return -(-out // COLUMNS) * (k // KINDS[kind].weights) * KINDS[kind].group_bytes


@compiled
def panel_bytes(k, form):
    """Return the number of bytes of one panel of a matrix with k inputs; form: the number of a kind."""
    return k // BY_FORM[form - QUANTISED].weights * GROUP_BYTES[form - QUANTISED]


def unpack(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the weights of rows in float32 [out, k], by the library gguf.

    kind: a name among KINDS.
    raw: the rows as a GGUF file stores them, uint8 [out, bytes per row].
    """
    from gguf import GGMLQuantizationType, dequantize

    if not len(raw):
        return np.empty((0, raw.shape[1] // KINDS[kind].block_bytes * KINDS[kind].weights), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a file may hold infinite scales
        return dequantize(raw, GGMLQuantizationType[kind.upper()])


@compiled
def read_block(raw, at, form, codes, subs, least):
    """Read one block of a file.

    raw: a row of the file, uint8 [bytes per row].
    at: the place of the block's first byte in it.
    form: the number of a kind.
    codes: is filled with the block's codes, uint8 [256 or more], of which 32 or 256 are written. Codes of q8_0 are
        signed and stand here by their bits.
    subs, least: are filled with the whole numbers of the kinds that have them, uint8 [16 or more] and [8 or more].

    Returns the places of the float16 numbers d and minimum in the block; the latter means nothing where there is none.
    """
    block = raw[at : at + BY_FORM[form - QUANTISED].block_bytes]
    if form == Q8_0:
        low = block[2:]
        for i in range(32):
            codes[i] = low[i]
        return 0, 0
    if Q4_0 <= form <= Q5_1:
        low, high = block[len(block) - 16 :], block[len(block) - 20 :]
        for i in range(16):
            codes[i] = low[i] & 15
            codes[i + 16] = low[i] >> 4
        if form >= Q5_0:
            for i in range(32):
                codes[i] |= ((high[i // 8] >> (i % 8)) & 1) << 4
        return 0, 2
    if form == Q6_K:
        for half in range(2):
            low, high, to = block[64 * half :], block[128 + 32 * half :], codes[128 * half :]
            for i in range(32):
                to[i] = (low[i] & 15) | ((high[i] & 3) << 4)
                to[32 + i] = (low[32 + i] & 15) | (((high[i] >> 2) & 3) << 4)
                to[64 + i] = (low[i] >> 4) | (((high[i] >> 4) & 3) << 4)
                to[96 + i] = (low[32 + i] >> 4) | ((high[i] >> 6) << 4)
        for i in range(16):
            subs[i] = block[192 + i]
        return 208, 0
    for i in range(4):
        subs[i], least[i] = block[4 + i] & 63, block[8 + i] & 63
        subs[i + 4] = (block[12 + i] & 15) | ((block[4 + i] >> 6) << 4)
        least[i + 4] = (block[12 + i] >> 4) | ((block[8 + i] >> 6) << 4)
    for pair in range(4):
        low, to = block[len(block) - 128 + 32 * pair :], codes[64 * pair :]
        for i in range(32):
            to[i] = low[i] & 15
            to[32 + i] = low[i] >> 4
    if form == Q5_K:
        for part in range(8):
            high, to = block[16:], codes[32 * part :]
            for i in range(32):
                to[i] |= ((high[i] >> part) & 1) << 4
    return 0, 2


@compiled
def read_row(row, form, values):
    """Fill values with the weights of a row of a file: with the bits that `unpack` gives, so without fused arithmetic.

    row: uint8 [bytes per row].
    form: the number of a kind.
    values: float32 [k].
    """
    kind = BY_FORM[form - QUANTISED]
    codes, subs, least = np.empty(256, np.uint8), np.empty(16, np.uint8), np.empty(8, np.uint8)
    for group in range(len(row) // kind.block_bytes):
        at = group * kind.block_bytes
        d_at, least_at = read_block(row, at, form, codes, subs, least)
        d = float16(row[at + d_at], row[at + d_at + 1])
        lowest = float16(row[at + least_at], row[at + least_at + 1])
        for j in range(kind.weights):
            scale, below = d, lowest
            if kind.subs > 0:
                sub = np.int64(subs[j * kind.subs // 32])
                scale = d * np.float32(sub - 256 if form == Q6_K and sub > 127 else sub)
                below = -(lowest * np.float32(least[j // 32]))
            code = np.int64(codes[j]) - kind.offset
            if form == Q8_0 and code > 127:
                code -= 256
            value = scale * np.float32(code)
            values[group * kind.weights + j] = value + below if kind.least else value


@compiled
def float16(low, high):
    """Return, in float32, the float16 number whose bytes are low and high."""
    bits = np.int64(low) | np.int64(high) << 8
    exponent, fraction = (bits >> 10) & 31, np.float32(bits & 1023)
    if exponent == 31:
        value = np.float32(np.nan) if fraction > 0 else np.float32(np.inf)
    elif exponent == 0:
        value = fraction * np.float32(2.0**-24)
    else:
        value = (fraction + np.float32(1024)) * np.float32(2.0) ** np.float32(exponent - 25)
    return -value if bits >> 15 else value
