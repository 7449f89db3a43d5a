"""Weights that are read through a memory-mapped file: the memory they take is given back as soon as they are copied.

transformers maps a checkpoint into memory and makes every weight a view of it. A page of the file counts as memory of
the process from when it is first read until the whole file is unmapped, which is when the last of its weights is gone.
A model that is laid out anew would therefore stand in memory twice. The kernel learns here, weight by weight, that a
range of pages is not needed any more; whoever reads it again finds what the file holds, so that no weight that shares
these pages, such as a tied one, can be harmed.
"""

import ctypes
import mmap
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

ENDINGS = (".safetensors",)
PART = 4096  # rows that are copied at a time


@dataclass(frozen=True)
class MappedFiles:
    """starts, ends: addresses of this process's mapped weight files, in ascending order."""

    starts: list[int]
    ends: list[int]

    def has(self, weight: Tensor) -> bool:
        """Whether a tensor is a view of a mapped file."""
        at = bisect_right(self.starts, weight.data_ptr()) - 1
        return at >= 0 and weight.data_ptr() + weight.nbytes <= self.ends[at]

    def copied(self, weight: Tensor) -> Tensor:
        """The same values in memory of their own, if the tensor is a view of a mapped file."""
        if not self.has(weight):
            return weight
        out = torch.empty_like(weight)
        for part, into in zip(weight.split(PART), out.split(PART), strict=True):
            into.copy_(part)
            self.forget(part)
        return out

    def forget(self, weight: Tensor) -> None:
        """Give back the whole pages that a tensor lies in, if it is a view of a mapped file."""
        if not self.has(weight) or not weight.is_contiguous():
            return
        page = mmap.PAGESIZE
        first, last = -(-weight.data_ptr() // page) * page, (weight.data_ptr() + weight.nbytes) // page * page
        if last > first:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


NO_FILES = MappedFiles([], [])


def weight_files() -> MappedFiles:
    """Those that are mapped now; none where the system does not list them (/proc/self/maps is Linux's)."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return NO_FILES
    try:
        with open("/proc/self/maps") as file:
            lines = [line.split(maxsplit=5) for line in file]
    except OSError:
        return NO_FILES
    spans = [line[0].split("-") for line in lines if len(line) == 6 and line[5].rstrip().endswith(ENDINGS)]
    return MappedFiles([int(start, 16) for start, _ in spans], [int(end, 16) for _, end in spans])
