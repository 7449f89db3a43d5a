"""What models keep from going to another process: threads of forwards, which a fork lacks, and addresses of weights."""

import os
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, Never

import torch

from foretoken.core.errors import ForetokenError

_first: int | None = None  # the process in which models ran first in several threads


@dataclass(frozen=True)
class OfOneProcess:
    """The base of what can be copied, but not pickled, and so not sent to another process."""

    def __reduce_ex__(self, protocol: object) -> Never:
        raise ForetokenError(
            "An engine cannot be pickled: call foretoken.load in the other process, which shares the mapped files of "
            "the weights."
        )

    def __copy__(self) -> "OfOneProcess":
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OfOneProcess":
        return replace(self, **{field.name: deepcopy(getattr(self, field.name), memo) for field in fields(self)})


def check_not_forked() -> None:
    """Raise ForetokenError where a forward would wait for threads that only the process has that this is a fork of."""
    if _first not in (None, os.getpid()) and torch.get_num_threads() > 1:
        raise ForetokenError(
            "This process was forked from one in which models had run in several threads, and would hang: call "
            'torch.set_num_threads(1) in it, or start it otherwise, as by multiprocessing.get_context("spawn").'
        )


def models_run() -> None:
    """Note that models run in this process, in as many threads as torch uses now; raises as `check_not_forked`."""
    global _first
    check_not_forked()
    if _first is None and torch.get_num_threads() > 1:
        _first = os.getpid()
