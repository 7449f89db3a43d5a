"""A decoder layer of transformers' as the kernel reads it: its matrices and norms, whatever the modules are called.

An architecture whose layers have other modules than those known here needs a branch in this file.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from foretoken.kernel.sizes import COLUMNS
from foretoken.models.panels import PanelLinear


class Matrix(NamedTuple):
    """A packed linear layer, or some neighbouring outputs of one.

    linear: whose panels are read. address: of the first of them. out_features: how many outputs. first: the first one.
    """

    linear: PanelLinear
    address: int
    out_features: int
    first: int

    def bias(self, width: int | None = None) -> np.ndarray:
        """The bias, zeros where there is none, with zeros up to `width`."""
        out = np.zeros(width or self.out_features, np.float32)
        out[: self.out_features] = bias_of(self.linear)[self.first : self.first + self.out_features]
        return out


class DecoderLayer(NamedTuple):
    """q, k, v, out, gate, up, down: the matrices.

    before_attention: weight of a norm [d], or None where attention reads what enters the layer as it is.
    before_mlp: weight of a norm [d].
    after: weights of the norms of what attention and the MLP give [2, d], or none [0, d].
    head_norms: weights of the norms of query and key heads [2, dim], or none [0, dim].
    """

    q: Matrix
    k: Matrix
    v: Matrix
    out: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    before_attention: np.ndarray | None
    before_mlp: np.ndarray
    after: np.ndarray
    head_norms: np.ndarray

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """In the order in which a forward uses them."""
        return self[:7]


def read_layer(layer: Any, dim: int) -> DecoderLayer:
    """The parts of a decoder layer with the modules of Llama, Phi-3 or Gemma 3, all linear ones packed.

    layer: the module; its input_layernorm may be None. dim: the width of an attention head.
    """
    attention, mlp = layer.self_attn, layer.mlp
    before = layer.input_layernorm
    if hasattr(attention, "qkv_proj"):  # Phi-3
        heads = attention.o_proj.in_features
        key_heads = attention.num_key_value_heads * dim
        q, k, v = _split(attention.qkv_proj, heads, key_heads, key_heads)
        gate, up = _split(mlp.gate_up_proj, *[mlp.gate_up_proj.out_features // 2] * 2)
    else:
        q, k, v = [_whole(x) for x in (attention.q_proj, attention.k_proj, attention.v_proj)]
        gate, up = _whole(mlp.gate_proj), _whole(mlp.up_proj)
    norms, after = layer.post_attention_layernorm, np.zeros((0, len(layer.post_attention_layernorm.weight)), np.float32)
    if hasattr(layer, "post_feedforward_layernorm"):  # Gemma 3
        norms = layer.pre_feedforward_layernorm
        after = np.stack([norm_weight(layer.post_attention_layernorm), norm_weight(layer.post_feedforward_layernorm)])
    head_norms = np.zeros((0, dim), np.float32)
    if hasattr(attention, "q_norm"):  # each query and key head by itself
        head_norms = np.stack([norm_weight(attention.q_norm), norm_weight(attention.k_norm)])
    return DecoderLayer(
        q, k, v, _whole(attention.o_proj), gate, up, _whole(mlp.down_proj),
        None if before is None else norm_weight(before), norm_weight(norms), after, head_norms,
    )  # fmt: skip


def norm_weight(norm: Any) -> np.ndarray:
    """What a norm multiplies by, in float32."""
    weight = array(norm.weight)
    return weight + 1 if type(norm).__name__ == "Gemma3RMSNorm" else weight


def norm_eps(norm: Any) -> float:
    """What a norm adds to the mean square."""
    return norm.eps if type(norm).__name__ == "Gemma3RMSNorm" else norm.variance_epsilon


def bias_of(linear: PanelLinear) -> np.ndarray:
    """The bias, zeros where there is none."""
    return np.zeros(linear.out_features, np.float32) if linear.bias is None else array(linear.bias)


def array(parameter: Tensor) -> np.ndarray:
    return parameter.detach().float().numpy()


def _whole(linear: PanelLinear) -> Matrix:
    return Matrix(linear, linear.address, linear.out_features, 0)


def _split(linear: PanelLinear, *widths: int) -> Iterator[Matrix]:
    """Neighbouring outputs of a linear layer, so many at a time, each a multiple of a panel's columns."""
    first = 0
    for width in widths:
        per_panel = linear.panels.nbytes // -(-linear.out_features // COLUMNS)
        yield Matrix(linear, linear.address + first // COLUMNS * per_panel, width, first)
        first += width
