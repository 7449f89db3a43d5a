"""Refuse to run models in a process that was forked from one that ran them: the threads of forwards do not survive."""

import os

import torch

from foretoken.core.errors import ForetokenError

_first: int | None = None  # the process in which models ran first in several threads


def check_not_forked() -> None:
    """Note that models run in this process. Raises ForetokenError where they ran in the one it was forked from."""
    global _first
    if torch.get_num_threads() > 1:
        _first = _first or os.getpid()
    if _first not in (None, os.getpid()):
        raise ForetokenError(
            "This process was forked from one in which models had run in several threads, and would hang: start it "
            'otherwise, as by multiprocessing.get_context("spawn"), or set OMP_NUM_THREADS=1 for the first one.'
        )
