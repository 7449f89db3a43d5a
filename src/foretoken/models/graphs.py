"""A forward recorded as a CUDA graph: one call starts all of its kernels, which Python would start one by one.

For small models and few nodes starting them takes most of a forward's time on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Graph:
    """The kernels of one forward, with the memory that they read and write."""

    def __init__(
        self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], planes: Sequence[Tensor], pool: Any
    ) -> None:
        """Record a forward.

        run: the forward, called as run(*inputs, planes).
        inputs: example inputs; later ones have the same shapes, on any device.
        planes: the keys and values that the forward reads and writes; the graph keeps using the same memory.
        pool: CUDA's memory pool for what the forward computes on its way. Graphs with one pool share this memory, so
            that two of them must not run at once.
        """
        self._inputs = tuple(x.clone() for x in inputs)
        stream = torch.cuda.Stream(device=planes[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(*self._inputs, planes)  # what libraries set up at a first call must not be recorded
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._out = run(*self._inputs, planes)
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the recorded forward for other `inputs` of the same shapes and return its results."""
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given)
        self._graph.replay()
        return tuple(x.clone() for x in self._out)  # the next replay writes over them
