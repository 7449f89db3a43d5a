"""Refuse to run models in a process that was forked from one that ran them: the threads of forwards do not survive."""

import os

import torch

from foretoken.core.errors import ForetokenError

_first: int | None = None  # the process in which models ran first in several threads


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
