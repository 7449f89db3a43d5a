"""Forwards of fixed shapes, so that torch.compile can make one piece of code of each: for any transformers model.

Nodes, rows and slots are padded to the smallest bucket that holds them. A padded node sees slot 0 and is written to the
last slot, which nothing reads. `step` is the plain forward, for any shape; a bucket is compiled when it is first
needed, and compared with the plain forward there and then. What cannot be compiled goes on running plainly.
"""

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, no_type_check

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.core.shapes import Float
from foretoken.models.cache import NodeCache, first_planes
from foretoken.models.features import FeatureStore
from foretoken.models.growing_tree import lowest
from foretoken.models.layout import Layout, decoder
from foretoken.models.panels import PanelLinear

NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # a forward of more nodes, as in prefill, is not compiled
LEAST_SLOTS = 128
LIMIT = 1024  # compiled buckets of all models of a process
# How far compiled and plain logits may be apart, as a share of their spread, in float32 and below: loose, since wrong
# code moves them by far more.
ROUNDING = {True: 0.01, False: 0.25}
MESSAGE = 200  # characters of a compiler's complaint that are shown
log = logging.getLogger(__name__)

Layers = tuple[int, ...]
Bucket = tuple[Layers, int, int, int]  # hidden states asked for, rows, nodes, slots


def nodes_bucket(n: int) -> int | None:
    """The smallest bucket that holds n nodes, None if there is none."""
    return next((size for size in NODES if size >= n), None)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


@no_type_check
class TracedCache(NodeCache):
    """Lives for one forward: the keys and values of node i of row b are written to slots[b, i] of the layer's planes,
    and all slots are read."""

    def __init__(self, planes, of_layer, slots):
        super().__init__(of_layer, planes[0].shape[2], slots.shape[1])
        self.planes, self.slots = planes, slots
        self.rows = torch.arange(slots.shape[0], device=slots.device)[:, None]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        i = self.of_layer[layer_idx]
        keys, values = self.planes[i], self.planes[i + 1]
        keys[self.rows, :, self.slots] = key_states.transpose(1, 2)
        values[self.rows, :, self.slots] = value_states.transpose(1, 2)
        return keys, values


@no_type_check
def step(model, of_layer, layers, ids, positions, slots, masks, planes):
    """Logits [b, n, v] (states where `model` has no head) of nodes [b, n], read and written in planes [b, h, slots, d];
    after them the hidden states of `layers`.

    masks: additive [b, 1, n, slots], by layer type, or the mask itself where all layers are of one type.
    """
    cache = TracedCache(planes, of_layer, slots)
    out = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=masks,
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=len(layers) > 0,
    )
    return (out[0], *(out.hidden_states[layer] for layer in layers))


class StaticForward:
    """The compiled forwards of one model, shared by all rows; its weights are the model's own.

    On a CPU inductor freezes weights that are not in panels, for each bucket into a layout of its own; on a GPU every
    bucket is recorded as a CUDA graph (not yet tried on one). Inductor keeps its code on disk between runs.
    """

    execution = "torch.compile"

    def __init__(self, model: PreTrainedModel, layout: Layout, name: str) -> None:
        self.model, self.name = model, name
        self.body = decoder(model) or model
        self.shapes = [plane for pair in layout.planes if pair for plane in pair]
        self.of_layer = first_planes(layout.planes)
        self.kinds = tuple(layout.windows)
        self.dtype, self.device = model.dtype, model.device
        self.low = lowest(self.dtype)
        self.on_gpu = self.device.type == "cuda"
        packed = any(isinstance(module, PanelLinear) for module in model.modules())
        options: dict[str, Any] = {"triton.cudagraphs": True} if self.on_gpu else {"freezing": not packed}
        self._compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(
            step, fullgraph=True, dynamic=False, options=options
        )
        self.ready: set[Bucket] = set()
        self.compiling = False  # until the model has been checked, and again once compiling has failed

    def open(self, batch: int, slots: int) -> "StaticRows":
        return StaticRows(self, batch, slots)

    def plain(self, layers: Layers, *inputs: Any, head: bool = True) -> tuple[Tensor, ...]:
        """`step` as Python runs it, for inputs of any shape."""
        return step(self.model if head else self.body, self.of_layer, layers, *inputs)

    def __call__(self, layers: Layers, *inputs: Any) -> tuple[Tensor, ...]:
        """The same, compiled, for inputs that fill a bucket."""
        ids, planes = inputs[0], inputs[-1]
        bucket: Bucket = (layers, *ids.shape, planes[0].shape[2])
        return self._run(layers, inputs) if bucket in self.ready else self._first(bucket, inputs)

    def _run(self, layers: Layers, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        if not self.on_gpu:
            return self._compiled(self.model, self.of_layer, layers, *inputs)
        torch.compiler.cudagraph_mark_step_begin()
        out = self._compiled(self.model, self.of_layer, layers, *inputs)
        return tuple(x.clone() for x in out)  # the next replay writes over its outputs

    def _first(self, bucket: Bucket, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Compile and compare. Both forwards write the same keys and values, so that the order does not matter."""
        layers, *sizes = bucket
        log.info("compiling %s for %d rows, %d nodes, %d slots", self.name, *sizes)
        begin = time.perf_counter()
        want = self.plain(layers, *inputs)
        try:
            with torch._dynamo.config.patch(recompile_limit=LIMIT, accumulated_recompile_limit=LIMIT):
                got = self._run(layers, inputs)
        except Exception as error:  # compilers fail in as many ways as there are models and machines
            return self._give_up(layers, inputs, " ".join(str(error).split())[:MESSAGE] or type(error).__name__)
        difference = max(_difference(x.float(), y.float()) for x, y in zip(got, want, strict=True))
        if not difference <= ROUNDING[self.dtype == torch.float32]:
            return self._give_up(layers, inputs, f"its compiled logits are wrong (by {difference:.2g} of their spread)")
        self.ready.add(bucket)
        log.info("compiled in %.0f s", time.perf_counter() - begin)
        return want

    def _give_up(self, layers: Layers, inputs: tuple[Any, ...], why: str) -> tuple[Tensor, ...]:
        self.compiling = False
        warnings.warn(f"{self.name} runs without torch.compile: {why}", stacklevel=2)
        return self.plain(layers, *inputs)


def _difference(one: Float[Tensor, "b n _"], other: Float[Tensor, "b n _"]) -> float:
    """The largest difference of a node's states, root mean square over the states and as a share of their spread. Not
    that of a single number: activations have outliers, on which rounding shows most."""
    return float(((one - other).square().mean(-1).sqrt() / other.std(-1)).max())


class StaticRows:
    """The slot cache of a batch: planes [rows, heads, slots, dim], rows and slots powers of two.

    The slots double when they no longer hold the text, so that a forward reads at most twice what there is.
    """

    def __init__(self, forward: StaticForward, batch: int, slots: int) -> None:
        self.forward = forward
        self.padding = slots  # how callers name the slot of a padded node
        self.planes: list[Tensor] = []
        self._batch = power_of_two(batch)
        self._grow(LEAST_SLOTS)
        self._rows, self._slots, self._used = slice(0), np.zeros((0, 0), np.int64), 0

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        old, self.planes = self.planes, []
        for i, plane in enumerate(self.forward.shapes):
            # Zeros, not empty: an unwritten slot is masked, but 0 * NaN would still be NaN.
            new = torch.zeros(self._batch, plane.heads, capacity, plane.dim, dtype=plane.dtype, device=plane.device)
            if old:
                new[:, :, : self.capacity] = old[i]
            self.planes.append(new)
        self.capacity = capacity
        self._first_rows: dict[int, list[Tensor]] = {}

    def _of_rows(self, b: int) -> list[Tensor]:
        """The first b rows of every plane: the same tensors at every call."""
        if b not in self._first_rows:
            self._first_rows[b] = views = [plane[:b] for plane in self.planes]
            for view in views if self.forward.on_gpu else ():
                torch._dynamo.mark_static_address(view)  # else a graph would copy it into memory of its own
        return self._first_rows[b]

    def place(self, rows: slice, start: int | Sequence[Sequence[int]], n: int, used: int) -> None:
        """Set where the next forward of `rows` writes its n nodes and that it reads slots [0, used)."""
        if used >= self.capacity:  # one slot is left for padding
            self._grow(power_of_two(used + 1))
        self._rows, self._used = rows, used
        if isinstance(start, int):
            self._slots = np.arange(start, start + n)[None].repeat(rows.stop - rows.start, 0)
        else:
            slots = np.array(start)
            self._slots = np.where(slots == self.padding, self.capacity - 1, slots)

    @torch.inference_mode()
    def __call__(
        self,
        ids: list[list[int]],
        positions: list[list[int]],
        masks: Mapping[str, np.ndarray | None],
        head: bool,
        features: FeatureStore | None = None,
    ) -> Float[Tensor, "b n _"]:
        """Logits of the nodes whose slots were set; states where head is False."""
        layers = () if features is None else features.distinct
        n, rows = len(ids[0]), self._rows
        size = nodes_bucket(n)
        if not head or size is None or not self.forward.compiling:
            planes = [plane[rows] for plane in self.planes]
            out = self.forward.plain(layers, *self._padded(ids, positions, masks, rows, n), planes, head=head)
        else:
            b = power_of_two(rows.stop)  # a bucket begins at row 0
            inputs = self._padded(ids, positions, masks, slice(0, b), size)
            out = tuple(x[rows, :n] for x in self.forward(layers, *inputs, self._of_rows(b)))
        if features is not None:
            features.write_all(out[1:])
        return out[0]

    def _padded(
        self,
        ids: list[list[int]],
        positions: list[list[int]],
        masks: Mapping[str, np.ndarray | None],
        whole: slice,
        size: int,
    ) -> tuple[Any, ...]:
        """The inputs of `step` but for its planes: rows `whole`, and `size` nodes each."""
        device, dtype = self.forward.device, self.forward.dtype
        b, n = whole.stop - whole.start, len(ids[0])
        place = (slice(self._rows.start - whole.start, self._rows.stop - whole.start), slice(0, n))
        slots = np.full((b, size), self.capacity - 1)
        slots[place] = self._slots
        padded = {}
        for kind in self.forward.kinds:
            mask = np.full((b, 1, size, self.capacity), self.forward.low, np.float32)
            mask[..., 0] = 0.0
            given = masks[kind]
            seen = mask[place[0], :, place[1]]
            seen[..., : self._used] = 0.0 if given is None else given
            padded[kind] = torch.from_numpy(mask).to(device, dtype)
        full_ids, full_positions = torch.zeros(2, b, size, dtype=torch.int64)
        full_ids[place], full_positions[place] = torch.tensor(ids), torch.tensor(positions)
        return (
            full_ids.to(device),
            full_positions.to(device),
            torch.from_numpy(slots).to(device),
            padded if len(padded) > 1 else next(iter(padded.values())),
        )

    @torch.inference_mode()
    def move(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Copy the slots start + nodes of a row to start, start + 1, ... in every layer."""
        source = torch.tensor(nodes, device=self.forward.device) + start
        for plane in self.planes:
            plane[row, :, start : start + len(nodes)] = plane[row].index_select(1, source)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` slots of row `source` to row `target`."""
        for plane in self.planes:
            plane[target, :, :used] = plane[source, :, :used]

    @torch.inference_mode()
    def read(self, row: int, start: int, end: int) -> tuple[Tensor, ...]:
        """A copy of a row's slots [start, end) in every layer, for `write`."""
        return tuple(plane[row, :, start:end].clone() for plane in self.planes)

    @torch.inference_mode()
    def write(self, row: int, start: int, end: int, parts: Sequence[Tensor]) -> None:
        """Put what `read` gave into slots [start, end) of a row."""
        if end >= self.capacity:
            self._grow(power_of_two(end + 1))
        for plane, part in zip(self.planes, parts, strict=True):
            plane[row, :, start:end] = part
