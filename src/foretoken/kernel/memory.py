"""Memory for what a CPU reads at every forward: weights and caches, one array behind the other in huge pages."""

import math
import mmap

import numpy as np

LINE = 64  # bytes of a cache line
STRETCH = 32 << 20  # bytes asked for at a time; the system gives memory only to pages that are used


class Arena:
    """Makes arrays that stand one behind the other, in the order in which they are asked for.

    This is faster for two reasons. In pages of 4 KiB the processor would look up thousands of addresses per forward,
    and stop fetching ahead at the end of each page. And the matrix that is used next stands behind the current one, so
    that it can be fetched meanwhile (product.py). The memory lives as long as an array in it.
    """

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        """Return a new array of zeros, which begins at a cache line. Raises MemoryError where there is no room.

        shape, dtype: the array's sizes, and the type of its numbers.
        """
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
