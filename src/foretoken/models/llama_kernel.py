"""The Llama family over packed weights: one compiled call a forward, float32 on a CPU."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.core.shapes import Float
from foretoken.core.softmax import inverse
from foretoken.models.features import FINAL, FeatureStore
from foretoken.models.growing_tree import causal_mask
from foretoken.models.llama import is_plain_llama
from foretoken.models.panels import COLUMNS, PanelLinear, use_threads

LANES = 16  # tile.LANES


class LlamaKernel:
    """The weights of one model in the form that kernel.py reads; shared by all rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        inner: Any = model.model
        layers = list(inner.layers)
        attention = layers[0].self_attn
        self.dim: int = attention.head_dim
        self.key_heads = attention.k_proj.out_features // self.dim
        query_heads = attention.q_proj.out_features // self.dim
        width: int = layers[0].mlp.gate_proj.out_features
        wide = -(-width // LANES) * LANES
        self.sizes = (query_heads, self.key_heads, self.dim, width, wide)
        self.scale = np.float32(attention.scaling)
        self.eps = np.float32(inner.norm.variance_epsilon)
        self.rotary = inner.rotary_emb
        self.embedding = _array(inner.embed_tokens.weight)
        self.norm = _array(inner.norm.weight)
        self.norms = np.stack(
            [np.stack([_array(x.input_layernorm.weight), _array(x.post_attention_layernorm.weight)]) for x in layers]
        )
        self.head_norms, self.head_eps = np.zeros((0, 2, self.dim), np.float32), np.float32(0)
        if hasattr(attention, "q_norm"):  # Qwen3: each query and key head by itself
            both = [(x.self_attn.q_norm.weight, x.self_attn.k_norm.weight) for x in layers]
            self.head_norms = np.stack([np.stack([_array(q), _array(k)]) for q, k in both])
            self.head_eps = np.float32(attention.q_norm.variance_epsilon)
        linears = [_linears(x) for x in layers]
        self.panels = [linear.panels for row in linears for linear in row]  # the addresses below point into these
        self.addresses = np.array([[linear.panels.ctypes.data for linear in row] for row in linears])
        self.halves = np.array([[linear.halved for linear in row] for row in linears])
        self.biases = (
            np.stack([np.concatenate([_bias(p) for p in row[:3]]) for row in linears]),
            np.stack([_bias(row[3]) for row in linears]),
            np.stack([np.concatenate([_bias(p, wide) for p in row[4:6]]) for row in linears]),
            np.stack([_bias(row[6]) for row in linears]),
        )
        head: Any = model.get_output_embeddings()
        self.head: PanelLinear = head
        self.head_address: int = head.panels.ctypes.data
        self.head_bias = _bias(head) if head.bias is not None else np.zeros(0, np.float32)
        kinds = getattr(config, "layer_types", None) or [None] * len(layers)
        self.kinds = list(dict.fromkeys(kinds))
        self.kind_of_layer = np.array([self.kinds.index(kind) for kind in kinds])
        self.low = np.float32(torch.finfo(torch.float32).min)

    def open(self, batch: int, slots: int) -> "KernelRows":
        return KernelRows(self, batch, slots)


class KernelRows:
    """The slot cache of a batch in the kernel's layout; the same calls as SlotCache, and the forward itself.

    keys [layers, batch, heads, slots / 64, dim, 64], values [layers, batch, heads, slots, dim].
    """

    def __init__(self, kernel: LlamaKernel, batch: int, slots: int) -> None:
        self.kernel = kernel
        layers, panels = len(kernel.addresses), slots // COLUMNS + 1  # one slot takes the writes of padding
        self.keys = np.zeros((layers, batch, kernel.key_heads, panels, kernel.dim, COLUMNS), np.float32)
        self.values = np.zeros((layers, batch, kernel.key_heads, panels * COLUMNS, kernel.dim), np.float32)
        cos, sin = kernel.rotary(torch.empty(0), torch.arange(slots)[None])
        self.cos, self.sin = cos[0].numpy(), sin[0].numpy()
        self._of: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}
        self._rows, self._slots, self._used = slice(0), np.zeros((0, 0), np.int64), 0

    def aim(self, rows: slice, start: int | Sequence[Sequence[int]], n: int, used: int) -> None:
        """Set where the next forward of `rows` writes its n nodes and that it reads slots [0, used)."""
        self._rows, self._used = rows, used
        if isinstance(start, int):
            self._slots = np.arange(start, start + n)[None].repeat(rows.stop - rows.start, 0)
        else:
            self._slots = np.array(start)

    def __call__(
        self,
        ids: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        masks: Mapping[str, np.ndarray | None],
        head: bool,
        features: FeatureStore | None = None,
    ) -> Float[Tensor, "b n v"]:
        """Logits of the nodes whose slots were aimed at; the last layer's states where head is False."""
        from foretoken.models import kernel as loops

        k, threads = self.kernel, use_threads()
        b, n = len(ids), len(ids[0])
        places = np.array(positions).reshape(-1)
        x = k.embedding[np.array(ids).reshape(-1)]
        given = [masks[kind or ""] for kind in k.kinds] if len(masks) > 1 else masks.values()
        seen = tuple([np.zeros((b, 1, n, 0), np.float32) if mask is None else mask for mask in given])
        wanted = () if features is None else features.layers
        for first, keys, values, kinds, weights in self._spans(wanted):
            if features is not None:
                features.write(first, torch.from_numpy(x).view(b, n, -1))
            loops.forward(
                x, places, self._rows.start, self._slots, keys, values, seen, kinds, self._used, k.low,
                self.cos, self.sin, k.sizes, k.eps, k.head_eps, k.scale, *weights, threads,
            )  # fmt: skip
        if FINAL in wanted and features is not None:
            normed = np.empty_like(x)
            loops.norm(x, k.norm, k.eps, normed)
            features.write(FINAL, torch.from_numpy(normed).view(b, n, -1))
        if not head:
            return torch.from_numpy(x).view(b, n, -1)
        y = np.empty((b * n, k.head.out_features), np.float32)
        loops.head(x, k.norm, k.eps, k.head_address, k.head.halved, k.head_bias, y, threads)
        return torch.from_numpy(y.reshape(b, n, -1))

    def draft_chain(
        self, row: int, read: Sequence[int], start: int, u: Float[Tensor, "n 1"], temperature: float, floor: float
    ) -> tuple[list[int], Float[Tensor, "_ v"]]:
        """Tokens drawn one after the other behind those `read`, whose first goes to slot `start` (its position too),
        and the q of each; at temperature 0 the likeliest ones, without q.

        What `forward`, softmax and draw would give level by level, bit for bit. Fewer than n where the product of q
        falls below `floor`, none where logits are not finite.
        """
        from foretoken.models.kernel_chain import draft_chain

        if not 0 <= min(read) <= max(read) < len(self.kernel.embedding):  # the loop does not look
            raise IndexError(f"Token {max(read)} has no embedding: the model has {len(self.kernel.embedding)}.")
        k, levels = self.kernel, len(u)
        factor, rows = (inverse(temperature), levels) if temperature > 0 else (np.float32(0), 0)
        tokens, q = np.empty(levels, np.int64), np.empty((rows, k.head.out_features), np.float32)
        none = (np.zeros((1, 1, 1, 0), np.float32),) * len(k.kinds)
        masks = none if len(read) == 1 else (causal_mask(start, len(read), float(k.low), None),) * len(k.kinds)
        ((_, keys, values, kinds, weights),) = self._spans(())
        last = (k.norm, k.head_address, k.head.halved, k.head_bias)
        done = draft_chain(
            np.array(read), row, start, keys, values, masks, none, kinds, k.low, self.cos, self.sin, k.sizes, k.eps,
            k.head_eps, k.scale, weights, k.embedding, last, u.numpy(), factor, floor, use_threads(), q, tokens,
        )  # fmt: skip
        return tokens[:done].tolist(), torch.from_numpy(q[:done])

    def _spans(self, wanted: tuple[int, ...]) -> list[tuple[Any, ...]]:
        """The runs of layers between which hidden states are read: first layer, and what `forward` takes of each."""
        if wanted not in self._of:
            k = self.kernel
            ends = sorted({0, len(k.addresses), *(layer for layer in wanted if layer != FINAL)})
            parts = [slice(first, last) for first, last in itertools.pairwise(ends)]
            self._of[wanted] = [
                (
                    part.start, self.keys[part], self.values[part], k.kind_of_layer[part],
                    (k.norms[part], k.head_norms[part], k.addresses[part], k.halves[part],
                     tuple(bias[part] for bias in k.biases)),
                )
                for part in parts
            ]  # fmt: skip
        return self._of[wanted]

    def move(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Copy the slots start + nodes of a row to start, start + 1, ... in every layer."""
        source, place = np.array(nodes) + start, np.arange(start, start + len(nodes))
        keys, values = self.keys[:, row], self.values[:, row]
        keys[:, :, place // COLUMNS, :, place % COLUMNS] = keys[:, :, source // COLUMNS, :, source % COLUMNS]
        values[:, :, place] = values[:, :, source]

    def copy_row(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` slots of row `source` to row `target`."""
        panels = -(-used // COLUMNS)
        self.keys[:, target, :, :panels] = self.keys[:, source, :, :panels]
        self.values[:, target, :, :used] = self.values[:, source, :, :used]


def llama_kernel(model: PreTrainedModel) -> LlamaKernel | None:
    """The compiled forward of a packed model, None where it would not be the same computation."""
    inner: Any = model.base_model
    if not is_plain_llama(model, PanelLinear) or not isinstance(model.get_output_embeddings(), PanelLinear):
        return None
    if inner.layers[0].self_attn.head_dim % LANES:
        return None
    return LlamaKernel(model)


def _linears(layer: Any) -> list[PanelLinear]:
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]  # fmt: skip  # noqa: E501


def _bias(linear: PanelLinear, width: int | None = None) -> np.ndarray:
    """The bias, zeros where there is none, with zeros up to `width`."""
    out = np.zeros(width or linear.out_features, np.float32)
    if linear.bias is not None:
        out[: linear.out_features] = _array(linear.bias)
    return out


def _array(parameter: Tensor) -> np.ndarray:
    return parameter.detach().numpy()
