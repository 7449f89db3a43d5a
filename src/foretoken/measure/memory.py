"""The growth of memory while a text grows: the resident set on a CPU, the allocator's peak on a GPU."""

import os
from pathlib import Path

import torch

STATM = Path("/proc/self/statm")  # only Linux has it; elsewhere growth on a CPU is not known
EVERY = 16  # one call of so many reads the file, which takes a fifteenth of the time of a small model's forward


class MemoryGrowth:
    """Measures how much memory a generation takes beyond that at its first step, when the prompt is in the cache."""

    def __init__(self, device: torch.device) -> None:
        """Begin a measurement; device: where the models run."""
        self._gpu = device if device.type == "cuda" else None
        self._base: int | None = None
        self._peak = 0
        self._calls = 0

    def sample(self, last: bool = False) -> None:
        """Note the memory in use after a step; to take no time most calls do nothing, but that of the `last` step."""
        self._calls += 1
        if self._calls % EVERY != 1 and not last:
            return
        now = self._bytes()
        if now is None:
            return
        if self._base is None:
            self._base = now
            if self._gpu is not None:
                torch.cuda.reset_peak_memory_stats(self._gpu)
        self._peak = max(self._peak, now)

    def bytes_per_token(self, num_tokens: int) -> float | None:
        """Return the growth in bytes, divided by `num_tokens`, the tokens of the run; None where it is not known."""
        return None if self._base is None else (self._peak - self._base) / num_tokens

    def _bytes(self) -> int | None:
        if self._gpu is not None:
            known = torch.cuda.memory_allocated if self._base is None else torch.cuda.max_memory_allocated
            return known(self._gpu)
        if not STATM.exists():
            return None
        return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
