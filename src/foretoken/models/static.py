"""Forwards of fixed shapes, so that torch.compile can make one piece of code of each, or a GPU record it once: for any
transformers model, and for draft heads with layers of their own.

A *bucket* is one such shape: numbers of rows, nodes and slots. Inputs are padded to the smallest bucket that holds
them. A padded node sees slot 0 and is written to the last slot, which nothing reads. `step` is the plain forward, for
any shape. A bucket is compiled or recorded when it is first needed, and its results are then compared with those of the
plain forward. A model that cannot be compiled or recorded goes on running plainly.
"""

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, no_type_check
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn

from foretoken.core.shapes import Float, Int
from foretoken.models.cache import NodeCache, Place, Planes, Slots, first_planes
from foretoken.models.features import FeatureStore
from foretoken.models.graphs import Graph
from foretoken.models.growing_tree import causal_mask, lowest
from foretoken.models.hf_model import cache_name
from foretoken.models.layout import FULL, SLIDING
from foretoken.models.panels import PanelLinear

NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # a forward of more nodes, as in prefill, is not compiled
LEAST_SLOTS = 128
LIMIT = 1024  # how many buckets torch may compile in a process, over all models
# How far compiled and plain results may be apart, by `_difference`: in float32 (True), and in fewer bits. The bounds
# are loose, since wrong code moves results by far more.
ROUNDING = {True: 0.01, False: 0.25}
# How forwards run.
COMPILED, GRAPHS, COMPILED_GRAPHS = "torch.compile", "CUDA graphs", "CUDA graphs of torch.compile"
MESSAGE = 200  # characters of a compiler's error message that are shown
log = logging.getLogger(__name__)

Layers = tuple[int, ...]
Inputs = tuple[Tensor, ...]  # the arguments of `step` from `nodes` on, without the planes, on any device
Bucket = tuple[Layers, int, int, int]  # hidden states asked for, rows, nodes, slots


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


@no_type_check
class TracedCache(NodeCache):
    """The transformers `Cache` of one forward: node i of row b goes to slot slots[b, i], and all slots are read."""

    def __init__(self, planes, of_layer, slots):
        """Take `planes`, keys and values of every layer in turn, each [b, h, slots, d].

        of_layer: as in `NodeCache`. slots: where the nodes go [b, n].
        """
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
def step(names, model, of_layer, layers, scored, nodes, *masks_and_planes):
    """Run the forward of a transformers model on nodes; return their logits [b, n, v] and the states of `layers`.

    names: the argument by which the model takes its cache (`cache_name`), and that of the model without its LM head.
    model: the transformers model.
    of_layer: as in `NodeCache`.
    layers: which hidden states follow the logits, each [b, n, d], by their index in transformers' `hidden_states`.
    scored: whether the LM head runs; where it does not, hidden states stand in the place of the logits.
    nodes: ids, positions and slots of the nodes [3, b, n].
    masks_and_planes: what is added to the attention scores [b, 1, n, slots] for each type of layers, full attention
        first; at the end the planes, a list of [b, h, slots, d], which are read and written.
    """
    ids, positions, slots = nodes
    *masks, planes = masks_and_planes
    cache = TracedCache(planes, of_layer, slots)
    run, named = (model, names[0]) if scored else (model.base_model, names[1])
    out = run(
        input_ids=ids,
        position_ids=positions,
        attention_mask=masks[0] if len(masks) == 1 else dict(zip((FULL, SLIDING), masks, strict=True)),
        use_cache=True,
        output_hidden_states=len(layers) > 0,
        **{named: cache},
    )
    return (out[0], *(out.hidden_states[layer] for layer in layers))


class PlaneTensors:
    """The keys and values of a batch, and on a GPU the forwards that were recorded over them.

    tensors: keys and values of every layer in turn, each [rows, heads, slots, dim].
    batch: the number of rows.
    capacity: the number of slots per row.
    graphs: the recorded forwards, by bucket.
    """

    def __init__(self, forward: "StaticForward", batch: int, capacity: int) -> None:
        """Allocate them; forward: says which shapes a layer's keys and values have."""
        # Zeros, not empty: an unwritten slot is masked, but 0 * NaN would still be NaN.
        self.tensors = [
            torch.zeros(batch, plane.heads, capacity, plane.dim, dtype=plane.dtype, device=plane.device)
            for plane in forward.shapes
        ]
        self.batch, self.capacity = batch, capacity
        self.graphs: dict[Bucket, Graph] = {}
        self._first_rows: dict[int, list[Tensor]] = {}

    def of_rows(self, b: int) -> list[Tensor]:
        """Return the first b rows of every plane: the same tensors at every call."""
        if b not in self._first_rows:
            self._first_rows[b] = [plane[:b] for plane in self.tensors]
        return self._first_rows[b]


class StaticForward:
    """The compiled or recorded forwards of one model, shared by all rows; its weights are the model's own.

    On a CPU, torch.compile's inductor makes the weights constants of its code, for each bucket in a layout of its own,
    unless some are in panels. It keeps its code on disk between runs. On a GPU every bucket is recorded as a CUDA
    graph, which reads and writes the planes that it was recorded with; these are kept for the next batch of as many
    rows and slots.

    shapes: keys and values of every layer in turn.
    of_layer: as in `NodeCache`.
    low: what a mask adds to the attention score of a hidden slot.
    execution: how forwards run, for messages.
    ready: the buckets whose code was found right.
    compiling: whether forwards are compiled or recorded; else they run plainly. It is False until the model has been
        checked, and again once compiling has failed.
    """

    def __init__(
        self, model: nn.Module, name: str, planes: Planes, compiled: bool = True, own: Callable[..., Any] | None = None
    ) -> None:
        """Prepare plain forwards; set `compiling` to have them compiled or recorded.

        model: the model or draft head.
        name: its name for messages.
        planes: the shapes of what each layer keeps per token.
        compiled: whether torch.compile makes the code of forwards; on a GPU they are recorded in either case.
        own: a plain forward in the place of `step`, called with the arguments of that from `model` on.
        """
        self.model, self.name = model, name
        self._step = own or partial(step, tuple(cache_name(type(part)) for part in (model, model.base_model)))
        self.shapes = [plane for pair in planes if pair for plane in pair]
        self.of_layer = first_planes(planes)
        self.dtype, self.device = self.shapes[0].dtype, self.shapes[0].device
        self.low = lowest(self.dtype)
        self.on_gpu = self.device.type == "cuda"
        self.execution = COMPILED if not self.on_gpu else COMPILED_GRAPHS if compiled else GRAPHS
        self._compiled: Callable[..., tuple[Tensor, ...]] = self._step
        if compiled:
            packed = any(isinstance(module, PanelLinear) for module in model.modules())
            options: dict[str, Any] = {"freezing": not self.on_gpu and not packed}
            self._compiled = torch.compile(self._step, fullgraph=True, dynamic=False, options=options)
        self._pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self._free: dict[tuple[int, int], list[PlaneTensors]] = {}
        self.ready: set[Bucket] = set()
        self.compiling = False

    def open(self, batch: int, slots: int) -> "StaticRows":
        """Allocate a slot cache for `batch` rows of up to `slots` slots each."""
        return StaticRows(self, batch, slots)

    def take(self, batch: int, capacity: int) -> PlaneTensors:
        """Return planes of zeros for `batch` rows of `capacity` slots each."""
        free = self._free.get((batch, capacity))
        if not free:
            return PlaneTensors(self, batch, capacity)
        planes = free.pop()
        for plane in planes.tensors:
            plane.zero_()
        return planes

    def give(self, planes: PlaneTensors) -> None:
        """Take back `planes` that are not used any more, on a GPU for the next call of `take`."""
        if self.on_gpu:
            self._free.setdefault((planes.batch, planes.capacity), []).append(planes)

    def plain(
        self, layers: Layers, inputs: Inputs, planes: Sequence[Tensor], scored: bool = True
    ) -> tuple[Tensor, ...]:
        """Run `step` plainly and return its results.

        layers, scored: as in `step`.
        inputs: as in `Inputs`, of any shape; planes: those of their rows.
        """
        return self._step(self.model, self.of_layer, layers, scored, *self._here(inputs), planes)

    def __call__(self, layers: Layers, inputs: Inputs, planes: PlaneTensors) -> tuple[Tensor, ...]:
        """Run `step` with the LM head, compiled or recorded; plainly where `compiling` is False.

        layers: as in `step`.
        inputs: as in `Inputs`, of the shape of a bucket.
        planes: all rows of the batch; the first ones are those of `inputs`.
        """
        _, b, n = inputs[0].shape
        if not self.compiling:
            return self.plain(layers, inputs, planes.of_rows(b))
        bucket: Bucket = (layers, b, n, planes.capacity)
        known = planes.graphs if self.on_gpu else self.ready
        return self._run(bucket, inputs, planes) if bucket in known else self._first(bucket, inputs, planes)

    def _run(self, bucket: Bucket, inputs: Inputs, planes: PlaneTensors) -> tuple[Tensor, ...]:
        if bucket in planes.graphs:
            return planes.graphs[bucket](inputs)
        run, first = partial(self._compiled, self.model, self.of_layer, bucket[0], True), planes.of_rows(bucket[1])
        if not self.on_gpu:
            return run(*inputs, first)
        graph = planes.graphs[bucket] = Graph(run, self._here(inputs), first, self._pool)
        return graph(inputs)

    def _here(self, inputs: Inputs) -> Inputs:
        return tuple(x.to(self.device) for x in inputs)

    def _first(self, bucket: Bucket, inputs: Inputs, planes: PlaneTensors) -> tuple[Tensor, ...]:
        """Compile or record a bucket, compare it with the plain forward, and return the results of the latter.

        Both forwards write the same keys and values, so that their order does not matter.
        """
        layers, *sizes = bucket
        if self.execution != GRAPHS:
            log.info("compiling %s for %d rows, %d nodes, %d slots", self.name, *sizes)
        begin = time.perf_counter()
        want = self.plain(layers, inputs, planes.of_rows(sizes[0]))
        try:
            with torch._dynamo.config.patch(recompile_limit=LIMIT, accumulated_recompile_limit=LIMIT):
                got = self._run(bucket, inputs, planes)
        except Exception as error:  # compilers fail in as many ways as there are models and machines
            return self._give_up(bucket, inputs, planes, " ".join(str(error).split())[:MESSAGE] or type(error).__name__)
        if not all(x.isfinite().all() for x in want):
            planes.graphs.pop(bucket, None)  # what cannot be compared is not used
            return want  # the caller checks its logits and raises the error
        difference = max(_difference(x.float(), y.float()) for x, y in zip(got, want, strict=True))
        if not difference <= ROUNDING[self.dtype == torch.float32]:
            why = f"its logits are wrong (by {difference:.2g} of their spread)"
            return self._give_up(bucket, inputs, planes, why)
        self.ready.add(bucket)
        if self.execution != GRAPHS:
            log.info("compiled in %.0f s", time.perf_counter() - begin)
        return want

    def _give_up(self, bucket: Bucket, inputs: Inputs, planes: PlaneTensors, why: str) -> tuple[Tensor, ...]:
        """Stop compiling, warn, and run the plain forward again, since the keys and values may be wrong as well."""
        self.compiling = False
        planes.graphs.pop(bucket, None)
        warnings.warn(f"{self.name} runs without {self.execution}: {why}", stacklevel=2)
        return self.plain(bucket[0], inputs, planes.of_rows(bucket[1]))


def _difference(one: Float[Tensor, "b n _"], other: Float[Tensor, "b n _"]) -> float:
    """Return how far two results of a forward are apart: the largest value over all nodes.

    A node's value is the root mean square of the differences of its numbers, as a share of their standard deviation. It
    is not the largest difference of single numbers: activations have outliers, on which rounding shows most.
    """
    spread = other.std(-1).clamp(min=torch.finfo(torch.float32).tiny)  # that of a padded node may be 0
    return float(((one - other).square().mean(-1).sqrt() / spread).max())


class StaticRows(Slots):
    """The slot cache of a batch, and the forward of the whole model; numbers of rows and slots are powers of two.

    The number of slots doubles when they no longer hold the text, so that a forward reads at most twice what there is.

    padding: the number that callers give as the slot of a padded node.
    """

    def __init__(self, forward: StaticForward, batch: int, slots: int) -> None:
        """Allocate the first LEAST_SLOTS slots; forward: the model's; batch, slots: rows, and slots per row at most."""
        self.forward = forward
        self.padding = slots
        self._batch = power_of_two(batch)
        self._take(LEAST_SLOTS)

    @property
    def capacity(self) -> int:
        """The number of slots per row that are allocated now."""
        return self._planes.capacity

    @torch.inference_mode()
    def _take(self, capacity: int) -> None:
        self._planes = self.forward.take(self._batch, capacity)
        self.stores = self._planes.tensors
        self._give = finalize(self, self.forward.give, self._planes)

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        old, give = self._planes, self._give
        self._take(capacity)
        for new, plane in zip(self._planes.tensors, old.tensors, strict=True):
            new[:, :, : old.capacity] = plane
        give()

    def place(self, at: Place) -> None:
        """Set which slots the next forward reads and writes; at: these slots."""
        if at.used >= self.capacity:  # one slot is left for padding
            self._grow(power_of_two(at.used + 1))
        self.at = at

    def __call__(
        self,
        ids: list[list[int]],
        positions: list[list[int]],
        masks: Mapping[str, np.ndarray | None],
        head: bool,
        features: FeatureStore | None = None,
    ) -> Float[Tensor, "b n _"]:
        """Run the model on the nodes whose slots `place` has set; the arguments are those of `ModuleSlots`."""
        out = self.run(ids, positions, masks, head, () if features is None else features.distinct)
        if features is not None:
            features.keep(self.at, out[1:])
        return out[0]

    @torch.inference_mode()
    def run(
        self,
        ids: list[list[int]],
        positions: Sequence[Sequence[int]] | np.ndarray,
        masks: Mapping[str, np.ndarray | None],
        scored: bool,
        layers: Layers = (),
        *more: Float[Tensor, "b n _"],
    ) -> tuple[Float[Tensor, "b n _"], ...]:
        """Return the results of `step` for the nodes whose slots `place` has set, without padding.

        ids, positions: token ids and positions of the nodes [b][n].
        masks: per type of layer what is added to the attention scores [b, 1, n, used], None where all slots are seen.
        scored, layers: as in `step`.
        more: further inputs of a draft head's `step`, between the nodes and the masks, each [b, n, _].
        """
        n, rows = self.at.n, self.at.rows
        size = next((size for size in NODES if size >= n), None)
        if not scored or size is None or not self.forward.compiling:
            width = self.at.used + 1  # what is read, and a slot for padded nodes
            planes = [store[rows, :, :width] for store in self.stores]
            return self.forward.plain(layers, self._padded(ids, positions, masks, more, rows, n, width), planes, scored)
        inputs = self._padded(ids, positions, masks, more, slice(0, power_of_two(rows.stop)), size, self.capacity)
        return tuple(x[rows, :n] for x in self.forward(layers, inputs, self._planes))  # a bucket begins at row 0

    @torch.inference_mode()
    def levels(self, start: int, n: int, window: int | None = None) -> Callable[..., tuple[Tensor, ...]]:
        """Prepare forwards of one node each that extend the first row: a function that runs one of them.

        For models whose layers are all of one type.

        start: the slot, and the position, of the first node; the row's slots before it are filled.
        n: how many forwards there are at most.
        window: how many positions a node sees, its own included; None: all.

        Returns a function of the number of the forward, from 0 on, of the node's token [1] on the device, and of
        further inputs [1, 1, _] as for `run`. It returns the results of `step`.
        """
        self.place(Place(slice(0, 1), start, 1, start + n))
        forward, planes = self.forward, self._planes
        mask = np.full((n, 1, 1, 1, self.capacity), forward.low, np.float32)
        mask[..., : start + n] = causal_mask(start, n, forward.low, window).reshape(n, 1, 1, 1, start + n)
        masks = torch.from_numpy(mask).to(forward.dtype).to(forward.device)
        slots = torch.arange(start, start + n, device=forward.device)[:, None]

        def level(i: int, token: Int[Tensor, " 1"], *more: Float[Tensor, "1 1 _"]) -> tuple[Tensor, ...]:
            nodes = torch.stack((token, slots[i], slots[i])).view(3, 1, 1)
            return forward((), (nodes, *more, masks[i]), planes)

        return level

    def _padded(
        self,
        ids: list[list[int]],
        positions: Sequence[Sequence[int]] | np.ndarray,
        masks: Mapping[str, np.ndarray | None],
        more: Sequence[Float[Tensor, "b n _"]],
        whole: slice,
        size: int,
        width: int,
    ) -> Inputs:
        """Return the inputs of `step` but the planes, padded to the rows in `whole`, `size` nodes and `width` slots."""
        at, b, n = self.at, whole.stop - whole.start, self.at.n
        place = (slice(at.rows.start - whole.start, at.rows.stop - whole.start), slice(0, n))
        nodes = np.zeros((3, b, size), np.int64)
        nodes[2] = width - 1
        slots = np.where(at.slots == self.padding, width - 1, at.slots)
        for full, given in zip(nodes, (ids, positions, slots), strict=True):
            full[place] = given
        padded = []
        for given in masks.values():
            mask = np.full((b, 1, size, width), self.forward.low, np.float32)
            mask[..., 0] = 0.0
            seen = mask[place[0], :, place[1]]
            seen[..., : at.used] = 0.0 if given is None else given
            padded.append(torch.from_numpy(mask).to(self.forward.dtype))
        around = (0, 0, 0, size - n, place[0].start, b - place[0].stop)  # the zeros that pad each of the further inputs
        filled = [nn.functional.pad(x, around) if any(around) else x for x in more]
        return torch.from_numpy(nodes), *filled, *padded

    def write(self, row: int, start: int, end: int, parts: Sequence[Tensor]) -> None:
        """Do as `Slots.write`, with more slots where these do not suffice; row, start, end, parts: as there."""
        if end >= self.capacity:
            self._grow(power_of_two(end + 1))
        super().write(row, start, end, parts)
