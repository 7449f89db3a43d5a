"""Weights that are views of memory-mapped files: give their memory back as soon as they have been copied.

transformers maps a checkpoint into memory and makes every weight a view of it. A page of the file counts as memory of
the process from when it is first read until the whole file is unmapped, which is when the last of its weights is gone.
A model that is laid out anew would therefore stand in memory twice. So `forget` hands pages back to the operating
system, weight by weight. A later read of them brings back what the file holds, so that no other weight in these pages,
such as a tied one, can be harmed.
"""

import ctypes
import mmap
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread

import torch
from torch import Tensor

ENDINGS = (".safetensors",)  # of weight files
PART = 4096  # rows of a weight that are copied at a time
POPULATE_READ = 22  # Linux's MADV_POPULATE_READ, which older kernels refuse


@dataclass(frozen=True)
class MappedFiles:
    """The memory-mapped weight files of this process; starts, ends: their addresses, in ascending order."""

    starts: list[int]
    ends: list[int]

    def has(self, weight: Tensor) -> bool:
        """Whether the tensor `weight` is a view of one of the files."""
        at = bisect_right(self.starts, weight.data_ptr()) - 1
        return at >= 0 and weight.data_ptr() + weight.nbytes <= self.ends[at]

    def copied(self, weight: Tensor) -> Tensor:
        """Return a copy of the tensor `weight` if it is a view of one of the files, else the tensor itself."""
        if not self.has(weight):
            return weight
        out = torch.empty_like(weight)
        for part, into in zip(weight.split(PART), out.split(PART), strict=True):
            into.copy_(part)
            self.forget(part)
        return out

    def forget(self, weight: Tensor) -> None:
        """Give back the memory of all pages that lie wholly in the tensor `weight`, if it is a view of a file."""
        if not self.has(weight) or not weight.is_contiguous():
            return
        page = mmap.PAGESIZE
        first, last = -(-weight.data_ptr() // page) * page, (weight.data_ptr() + weight.nbytes) // page * page
        if last > first:
            _advise(first, last, mmap.MADV_DONTNEED)


NO_FILES = MappedFiles([], [])


def weight_files() -> MappedFiles:
    """Return the weight files that are mapped now, by Linux's /proc/self/maps; none on other systems."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return NO_FILES
    try:
        with open("/proc/self/maps", errors="surrogateescape") as file:
            lines = [line.split(maxsplit=5) for line in file]
    except OSError:
        return NO_FILES
    spans = [line[0].split("-") for line in lines if len(line) == 6 and line[5].rstrip().endswith(ENDINGS)]
    return MappedFiles([int(start, 16) for start, _ in spans], [int(end, 16) for _, end in spans])


def read_ahead(weights: Sequence[Tensor]) -> None:
    """Begin to bring weights of mapped files into this process's memory, by a thread that waits for nothing else.

    Else their first use does it, page by page: for a gigabyte in a fifth of a second, if the file is in memory already.

    weights: those of which all is used at every forward. What else the files hold stays out of this process's memory.
    """

    def populate() -> None:
        for weight in weights:
            first = weight.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            _advise(first, weight.data_ptr() + weight.nbytes, POPULATE_READ)

    if sys.platform == "linux":
        Thread(target=populate, daemon=True).start()


def _advise(first: int, end: int, advice: int) -> None:
    """Give the system an `advice` on the pages from the address `first`, where a page begins, to the address `end`."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
