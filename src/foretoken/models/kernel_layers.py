"""Decoder layers of the Llama family over packed weights, with their slot cache: one compiled call a forward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.softmax import inverse
from foretoken.kernel.memory import Arena
from foretoken.kernel.sizes import COLUMNS, DOTTED, LANES
from foretoken.models.features import FeatureStore
from foretoken.models.growing_tree import causal_mask
from foretoken.models.panels import PanelLinear, use_threads

# The cosines and sines [n, dim] of the first n positions.
Angles = Callable[[int], tuple[Tensor, Tensor]]
NO_LAYERS = np.empty(0, np.int64)


class KernelLayers:
    """The weights of layers in the form that kernel.py reads; shared by all rows.

    layers: modules with the names of Llama's, their linear ones packed; input_layernorm None: attention reads what
    enters the layer as it is. kinds: each layer's mask, by name.
    """

    def __init__(
        self, layers: Sequence[Any], dim: int, scale: float, eps: float, angles: Angles, kinds: Sequence[str | None]
    ) -> None:
        attention = layers[0].self_attn
        self.dim, self.angles = dim, angles
        self.key_heads = attention.k_proj.out_features // dim
        query_heads = attention.q_proj.out_features // dim
        width: int = layers[0].mlp.gate_proj.out_features
        wide = -(-width // LANES) * LANES
        self.scale, self.eps = np.float32(scale), np.float32(eps)
        after = [array(x.post_attention_layernorm.weight) for x in layers]
        before = [x.input_layernorm for x in layers]
        self.bare = np.array([norm is None for norm in before])
        self.norms = np.stack(
            [np.stack([y if norm is None else array(norm.weight), y]) for norm, y in zip(before, after, strict=True)]
        )
        self.head_norms, self.head_eps = np.zeros((0, 2, dim), np.float32), np.float32(0)
        if hasattr(attention, "q_norm"):  # Qwen3: each query and key head by itself
            both = [(x.self_attn.q_norm.weight, x.self_attn.k_norm.weight) for x in layers]
            self.head_norms = np.stack([np.stack([array(q), array(k)]) for q, k in both])
            self.head_eps = np.float32(attention.q_norm.variance_epsilon)
        linears = [_linears(x) for x in layers]
        self.panels = [linear.panels for row in linears for linear in row]  # the addresses below point into these
        self.addresses = np.array([[linear.address for linear in row] for row in linears])
        self.forms = np.array([[linear.form for linear in row] for row in linears])
        self.paired = bool((self.forms == DOTTED).all())  # how keys and values are stored: attention.py
        self.sizes = (query_heads, self.key_heads, dim, width, wide, self.paired)
        self.biases = (
            np.stack([np.concatenate([bias_of(p) for p in row[:3]]) for row in linears]),
            np.stack([bias_of(row[3]) for row in linears]),
            np.stack([np.concatenate([bias_of(p, wide) for p in row[4:6]]) for row in linears]),
            np.stack([bias_of(row[6]) for row in linears]),
        )
        self.kinds = list(dict.fromkeys(kinds))
        self.kind_of_layer = np.array([self.kinds.index(kind) for kind in kinds])
        self.low = np.float32(torch.finfo(torch.float32).min)
        self.weights = (self.bare, self.norms, self.head_norms, self.addresses, self.forms, self.biases)


class KernelSlots:
    """The slot cache of a batch in the kernel's layout; the same calls as SlotCache, and the layers themselves.

    keys, values: of every layer as attention.py has them.
    """

    def __init__(self, layers: KernelLayers, batch: int, slots: int) -> None:
        self.layers = layers
        count, panels = len(layers.addresses), slots // COLUMNS + 1  # one slot takes the writes of padding
        arena, per_word = Arena(), 2 if layers.paired else 1
        shape = count, batch, layers.key_heads
        self.keys = arena.zeros((*shape, panels, layers.dim // per_word, COLUMNS), np.float32)
        self.values = arena.zeros((*shape, panels * COLUMNS // per_word, layers.dim), np.float32)
        # [.., slots / per_word, dim, per_word]: a slot's values by themselves
        numbers = self.values.view(np.uint16 if layers.paired else np.float32)
        self._by_slot = numbers.reshape(*self.values.shape, per_word)
        cos, sin = layers.angles(slots)
        self.cos, self.sin = cos.numpy(), sin.numpy()
        self._rows, self._slots, self._used = slice(0), np.zeros((0, 0), np.int64), 0

    def aim(self, rows: slice, start: int | Sequence[Sequence[int]], n: int, used: int) -> None:
        """Set where the next forward of `rows` writes its n nodes and that it reads slots [0, used)."""
        self._rows, self._used = rows, used
        if isinstance(start, int):
            self._slots = np.arange(start, start + n)[None].repeat(rows.stop - rows.start, 0)
        else:
            self._slots = np.array(start)

    def run(
        self,
        x: np.ndarray,
        positions: np.ndarray,
        masks: Mapping[str, np.ndarray | None],
        features: FeatureStore | None = None,
        fed: np.ndarray | None = None,
    ) -> None:
        """x [batch * n, d], of the nodes whose slots were aimed at, through every layer, in place. positions: of each,
        in one axis. What enters the layers that `features` wants is kept there. fed [batch * n, w]: what attention
        reads in a layer without a norm before it; x by default."""
        from foretoken.kernel.forward import forward

        k, wanted = self.layers, NO_LAYERS if features is None else features.inputs
        states = np.empty((len(wanted), *x.shape), np.float32)
        forward(
            x, x if fed is None else fed, positions, self._rows.start, self._slots, self.keys, self.values,
            self._seen(masks), k.kind_of_layer, self._used, k.low, self.cos, self.sin, k.sizes, k.eps, k.head_eps,
            k.scale, *k.weights, wanted, states, use_threads(),
        )  # fmt: skip
        if features is not None:
            self._remember(features, states)

    def _remember(self, features: FeatureStore, states: np.ndarray) -> None:
        """Keep what entered the layers that `features` wants, states [f, batch * n, d], of the nodes aimed at."""
        b, n = self._slots.shape
        for layer, of_layer in zip(features.inputs.tolist(), states, strict=True):
            features.write(layer, torch.from_numpy(of_layer).view(b, n, -1))

    def _seen(self, masks: Mapping[str, np.ndarray | None]) -> tuple[np.ndarray, ...]:
        """The mask of every kind of layer, for the nodes whose slots were aimed at; no columns where all is seen."""
        given = [masks[kind or ""] for kind in self.layers.kinds] if len(masks) > 1 else masks.values()
        b, n = self._slots.shape
        return tuple([np.zeros((b, 1, n, 0), np.float32) if mask is None else mask for mask in given])

    def _chain(self, read: Sequence[int], start: int, table: np.ndarray) -> tuple[Any, ...]:
        """What a compiled chain takes of the layers and their slots: masks of the forward that reads `read`, and of
        the others."""
        k, n = self.layers, len(read)
        none = (np.zeros((1, 1, 1, 0), np.float32),) * len(k.kinds)
        masks = none if n == 1 else (causal_mask(start, n, float(k.low), None),) * len(k.kinds)
        check_known(read, table)
        return (*self._lone(start, (masks, none)), table)

    def _lone(self, start: int, masks: tuple[tuple[np.ndarray, ...], ...]) -> tuple[Any, ...]:
        """What one sequence's compiled calls take."""
        k = self.layers
        return (
            start, self.keys, self.values, *masks, k.kind_of_layer, k.low, self.cos, self.sin, k.sizes, k.eps,
            k.head_eps, k.scale, k.weights,
        )  # fmt: skip

    def move(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Copy the slots start + nodes of a row to start, start + 1, ... in every layer."""
        source, place = np.array(nodes) + start, np.arange(start, start + len(nodes))
        keys, values = self.keys[:, row], self._by_slot[:, row]
        keys[:, :, place // COLUMNS, :, place % COLUMNS] = keys[:, :, source // COLUMNS, :, source % COLUMNS]
        of_word = values.shape[-1]
        values[:, :, place // of_word, :, place % of_word] = values[:, :, source // of_word, :, source % of_word]

    def copy_row(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` slots of row `source` to row `target`."""
        panels, words = -(-used // COLUMNS), -(-used // self._by_slot.shape[-1])
        self.keys[:, target, :, :panels] = self.keys[:, source, :, :panels]
        self.values[:, target, :, :words] = self.values[:, source, :, :words]


def check_known(tokens: Sequence[int], table: np.ndarray) -> None:
    """Raises IndexError for a token beyond `table`, an embedding, since compiled loops do not look."""
    if not 0 <= min(tokens) <= max(tokens) < len(table):
        raise IndexError(f"Token {max(tokens)} has no embedding: the model has {len(table)}.")


def bias_of(linear: PanelLinear, width: int | None = None) -> np.ndarray:
    """The bias, zeros where there is none, with zeros up to `width`."""
    out = np.zeros(width or linear.out_features, np.float32)
    if linear.bias is not None:
        out[: linear.out_features] = array(linear.bias)
    return out


def array(parameter: Tensor) -> np.ndarray:
    return parameter.detach().float().numpy()


def table_of(embedding: Tensor) -> np.ndarray:
    """An embedding [vocabulary, d] as the kernel reads it: bfloat16 as it is stored, by its bits, since a float32 copy
    of a large vocabulary takes a gigabyte; all else in float32."""
    if embedding.dtype != torch.bfloat16:
        return array(embedding)
    return embedding.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


def embedded(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Rows `ids` [n] of a `table_of`, in float32 [n, d]; compiled loops do the same by `kernel_chain.embed`."""
    rows = table[ids]
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows


def factor_at(temperature: float) -> np.float32:
    """What scores are multiplied by; 0 at 0."""
    return inverse(temperature) if temperature > 0 else np.float32(0)


def chain_outputs(levels: int, vocab_size: int, temperature: float) -> tuple[np.float32, np.ndarray, np.ndarray]:
    """`factor_at`, and room for the q and the tokens of a compiled chain; no q at 0."""
    rows = levels if temperature > 0 else 0
    return factor_at(temperature), np.empty((rows, vocab_size), np.float32), np.empty(levels, np.int64)


def _linears(layer: Any) -> list[PanelLinear]:
    a, mlp = layer.self_attn, layer.mlp
    return [a.q_proj, a.k_proj, a.v_proj, a.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
