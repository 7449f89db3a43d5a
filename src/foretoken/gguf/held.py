"""Blocks of types that the kernel has no panels for, as blocks of a wider type that it has, so that they stay packed.

    type     weight                                           held as
    q3_k     d * sub * (code - 4), codes of 3 bits            q6_k, exactly
    iq4_nl   d * one of 16 whole numbers below 128            q8_0, exactly
    iq4_xs   d * sub * one of 16 whole numbers below 128      q8_0, with d * sub rounded to float16

The wider blocks take about twice the memory of the file's, half of what bfloat16 would.
"""

import numpy as np
from gguf.quants import IQ4_NL
from numpy.typing import NDArray

HOLDERS = {"q3_k": "q6_k", "iq4_nl": "q8_0", "iq4_xs": "q8_0"}  # type in a file -> type of the blocks that hold it
PAIRS = np.arange(0, 8, 2, dtype=np.uint8)[:, None]  # places of pairs of bits in a byte


def holder(kind: str) -> str:
    """Return the type of the blocks that hold those of type `kind`, which is that type where it needs no other."""
    return HOLDERS.get(kind, kind)


def held(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows of a matrix as blocks of type `holder(kind)`.

    kind: the type of the rows, such as q3_k.
    raw: the rows as a GGUF file stores them, uint8 [rows, bytes per row].

    Returns uint8 [rows, bytes per row].
    """
    match kind:
        case "q3_k":
            blocks = _q3_k(raw.reshape(-1, 110))
        case "iq4_nl":
            d, codes = np.split(raw.reshape(-1, 18), [2], axis=1)
            blocks = _q8_0(d, codes)
        case "iq4_xs":
            blocks = _iq4_xs(raw.reshape(-1, 136))
        case _:
            return raw
    return blocks.reshape(len(raw), -1)


def _q3_k(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return blocks of q3_k [n, 110] as blocks of q6_k [n, 210]."""
    n = len(blocks)
    high, low, scales, d = np.split(blocks, [32, 96, 108], axis=1)
    codes = (low.reshape(n, 2, 1, 32) >> PAIRS) & 3
    codes |= np.unpackbits(high.reshape(n, 1, 32), axis=1, bitorder="little").reshape(codes.shape) << 2
    codes += 32 - 4  # what q6_k and q3_k take off
    of_subs = np.concatenate([scales[:, :8] & 15, scales[:, :8] >> 4], axis=1)
    of_subs |= ((scales[:, None, 8:] >> PAIRS) & 3).reshape(n, 16) << 4
    lows = (codes[:, :, :2] & 15) | (codes[:, :, 2:] << 4)
    highs = np.bitwise_or.reduce((codes >> 4) << PAIRS, axis=2)
    return np.concatenate([lows.reshape(n, 128), highs.reshape(n, 64), of_subs - 32, d], axis=1, dtype=np.uint8)


def _iq4_xs(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return blocks of iq4_xs [n, 136] as blocks of q8_0 [8 n, 34]."""
    n = len(blocks)
    d, high, low, codes = np.split(blocks, [2, 4, 8], axis=1)
    subs = np.stack([low & 15, low >> 4], axis=2).reshape(n, 8)
    subs |= ((high[:, :, None] >> PAIRS[:, 0]) & 3).reshape(n, 8) << 4
    scales = d.view(np.float16).astype(np.float32) * (subs.astype(np.float32) - 32)
    return _q8_0(scales.astype(np.float16).reshape(-1, 1).view(np.uint8), codes.reshape(-1, 16))


def _q8_0(d: NDArray[np.uint8], codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return blocks of q8_0 [n, 34].

    d: the bytes of their scales, float16 [n, 2].
    codes: two weights to a byte, places in the table of iq4_nl: weight i beside weight i + 16 [n, 16].
    """
    table = np.array(IQ4_NL.kvalues, np.int8).view(np.uint8)
    return np.concatenate([d, table[codes & 15], table[codes >> 4]], axis=1)
