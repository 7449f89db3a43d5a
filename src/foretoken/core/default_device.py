"""Independence of the device on which a caller's program has torch make tensors, as by `torch.set_default_device`."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def on_cpu_by_default(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` as it runs where torch makes tensors on the CPU unless another device is named."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            return function(*args, **kwargs)

    return call
