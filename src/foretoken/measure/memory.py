"""How memory grows while text does: the resident set on a CPU, the allocator's peak on an accelerator."""

import os
from pathlib import Path

import torch

STATM = Path("/proc/self/statm")  # Linux; elsewhere growth on a CPU is not known
EVERY = 16  # calls: reading the file takes as long as a fifteenth of a small model's forward


class MemoryGrowth:
    """Call `sample` after every step; the first call, with the prompt in the cache, is the base. Most calls do nothing,
    so that the run is not slowed down by being watched; tell it which is the last."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._base: int | None = None
        self._peak = 0
        self._calls = 0

    def sample(self, last: bool = False) -> None:
        self._calls += 1
        if self._calls % EVERY != 1 and not last:
            return
        now = self._bytes()
        if now is None:
            return
        if self._base is None:
            self._base = now
            if self._cuda:
                torch.cuda.reset_peak_memory_stats()
        self._peak = max(self._peak, now)

    def bytes_per_token(self, num_tokens: int) -> float | None:
        """Peak over base, spread over the tokens of the run."""
        return None if self._base is None else (self._peak - self._base) / num_tokens

    def _bytes(self) -> int | None:
        if self._cuda:
            return torch.cuda.memory_allocated() if self._base is None else torch.cuda.max_memory_allocated()
        if not STATM.exists():
            return None
        return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
