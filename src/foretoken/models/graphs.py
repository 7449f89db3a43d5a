"""A forward recorded as a CUDA graph: one call starts all of its kernels, which Python would start one by one.

For small models and few nodes starting them takes most of a forward's time on a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Masks = Tensor | Mapping[str, Tensor]


class Graph:
    """The kernels of one forward, with the memory that they read and write."""

    def __init__(
        self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Any], planes: Sequence[Tensor], pool: Any
    ) -> None:
        """Record a forward.

        run: the forward, called as run(*inputs, planes). inputs: tensors, the masks last; later ones have the same
        shapes, on any device. planes: keys and values, which stay where they are. pool: graphs with one pool share the
        memory of their results between two layers, so that two of them must not run at once.
        """
        *first, masks = inputs
        self._inputs = (*(x.clone() for x in first), *(x.clone() for x in _tensors(masks)))
        kinds = list(masks) if isinstance(masks, Mapping) else None
        n = len(first)
        kept = self._inputs[n] if kinds is None else dict(zip(kinds, self._inputs[n:], strict=True))
        stream = torch.cuda.Stream(device=planes[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(*self._inputs[:n], kept, planes)  # what libraries set up at a first call must not be recorded
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._out = run(*self._inputs[:n], kept, planes)
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """What the forward gives for other inputs of the same shapes."""
        *first, masks = inputs
        for kept, given in zip(self._inputs, (*first, *_tensors(masks)), strict=True):
            kept.copy_(given)
        self._graph.replay()
        return tuple(x.clone() for x in self._out)  # the next replay writes over them


def _tensors(masks: Masks) -> tuple[Tensor, ...]:
    return (masks,) if isinstance(masks, Tensor) else tuple(masks.values())
