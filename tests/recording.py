"""Forwards that are recorded, on a CPU: what stands for a CUDA graph there."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretoken.models import static


class Replayed:
    """Stands for a CUDA graph on a CPU: what it was recorded with stays, inputs are copied there, the forward runs."""

    def __init__(self, run: Any, inputs: tuple[Any, ...], planes: Sequence[Any], pool: object) -> None:
        del pool
        self.run, self.inputs, self.planes = run, inputs, planes

    def __call__(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        assert [x.shape for x in inputs[:-1]] == [x.shape for x in self.inputs[:-1]]  # the masks are the last
        return self.run(*inputs, self.planes)


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are padded and dispatched, and run as Python."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, not_compiled: None) -> None:
    monkeypatch.setattr(static, "Graph", Replayed)
