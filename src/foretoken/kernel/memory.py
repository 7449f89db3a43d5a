"""Memory for what a CPU reads at every forward: weights and caches, one behind the other in huge pages."""

import math
import mmap

import numpy as np

LINE = 64  # bytes of a cache line
STRETCH = 32 << 20  # bytes taken at a time; what is never touched is none


class Arena:
    """Makes arrays that stand one behind the other, in the order in which they are asked for.

    In pages of 4 KiB the processor would look up thousands of addresses per forward, and stop fetching ahead at the end
    of each page. And behind a matrix stands the one that is used next, which can be fetched meanwhile (product.py). The
    memory lives as long as an array in it.
    """

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        """A new array of zeros, at the start of a cache line."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size > len(self._free):
            try:
                stretch = mmap.mmap(-1, max(STRETCH, size))  # starts as zeros, at the start of a page
            except OSError as error:
                raise MemoryError(f"{size} bytes cannot be had") from error
            if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; a wish, which it may not grant
                stretch.madvise(mmap.MADV_HUGEPAGE)
            self._free = np.frombuffer(stretch, np.uint8)
        out = self._free[:size].view(dtype).reshape(shape)
        self._free = self._free[-(-size // LINE) * LINE :]
        return out
