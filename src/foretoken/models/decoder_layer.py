"""A decoder layer of transformers' as the kernel reads it: its matrices and norms, whatever the modules are called.

An architecture whose layers have other modules than those known here needs a branch in this file.
"""

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from foretoken.kernel.sizes import COLUMNS
from foretoken.models.experts import PanelMixture
from foretoken.models.panels import PanelLinear

# The names of a layer's MLP, the second and the third those of Granite's, the last one that of LFM2.
MLPS = ("mlp", "shared_mlp", "block_sparse_moe", "feed_forward")


class Matrix(NamedTuple):
    """A packed linear layer, or some neighbouring outputs of one.

    linear: the layer whose panels are read.
    out_features: the number of outputs.
    first: the index in the layer of the first output.
    """

    linear: PanelLinear
    out_features: int
    first: int = 0

    @property
    def address(self) -> int:
        """The memory address of the first panel; outputs that do not begin with a panel have none."""
        per_panel = self.linear.panels.nbytes // -(-self.linear.out_features // COLUMNS)
        return self.linear.address + self.first // COLUMNS * per_panel

    def bias(self, width: int | None = None) -> np.ndarray:
        """Return the bias in float32, filled up with zeros to `width` [width], by default to out_features."""
        out = np.zeros(width or self.out_features, np.float32)
        out[: self.out_features] = bias_of(self.linear)[self.first : self.first + self.out_features]
        return out


class DecoderLayer(NamedTuple):
    """The weights of a decoder layer with states of width d and attention heads of width dim.

    q, k, v, out, gate, up, down: the matrices.
    before_attention: weight of the norm before attention [d], None where attention reads the layer's input as it is.
    before_mlp: weight of the norm before the MLP [d].
    after: weights of the norms of what attention and the MLP put out [2, d]; without such norms [0, d].
    head_norms: weights of the norms of query and key heads [2, dim]; without such norms [0, dim].
    mixture: the experts, of which `gate`, `up` and `down` are the first one's; None in a layer without.
    filters: weights of the short convolution that stands in the place of attention, for the latest token last
        [taps, d]; its B, C and x (kernel/convolution.py) come from `q`, `k` and `v`. [0, d] in a layer with attention.
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
    mixture: PanelMixture | None
    filters: np.ndarray

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The seven matrices in the order in which a forward uses them."""
        return self[:7]


def read_layer(layer: Any, dim: int) -> DecoderLayer:
    """Return the weights of a decoder layer with the modules of Llama, Phi-3, Gemma 3, Granite 4, Qwen3-MoE or LFM2.

    layer: the module, its linear layers packed; its input_layernorm may be None.
    dim: the width of an attention head.
    """
    attention, before = named(layer, "self_attn", "conv"), named(layer, "input_layernorm", "operator_norm")
    norms = named(layer, "post_attention_layernorm", "ffn_norm")
    width = len(norms.weight)
    filters, after = np.zeros((0, width), np.float32), np.zeros((0, width), np.float32)
    if hasattr(attention, "in_proj"):  # LFM2's short convolution
        q, k, v = [Matrix(attention.in_proj, width, first) for first in (0, width, 2 * width)]
        filters = np.ascontiguousarray(array(attention.conv.weight)[:, 0].T)
    elif hasattr(attention, "qkv_proj"):  # Phi-3
        of_q, of_k = attention.o_proj.in_features, attention.num_key_value_heads * dim
        q = Matrix(attention.qkv_proj, of_q)
        k, v = [Matrix(attention.qkv_proj, of_k, first) for first in (of_q, of_q + of_k)]
    else:
        q, k, v = [_whole(x) for x in (attention.q_proj, attention.k_proj, attention.v_proj)]
    mlp = named(layer, *MLPS)
    if hasattr(mlp, "input_linear"):  # Granite 4
        both, down = mlp.input_linear, mlp.output_linear
    else:
        both, down = getattr(mlp, "gate_up_proj", None), named(mlp, "down_proj", "w2")
    if both is None:
        gate, up = _whole(named(mlp, "gate_proj", "w1")), _whole(named(mlp, "up_proj", "w3"))
    else:  # Phi-3, Granite 4 and experts: one behind the other
        gate, up = [Matrix(both, down.in_features, first) for first in (0, down.in_features)]
    if hasattr(layer, "post_feedforward_layernorm"):  # Gemma 3
        norms = layer.pre_feedforward_layernorm
        after = np.stack([norm_weight(layer.post_attention_layernorm), norm_weight(layer.post_feedforward_layernorm)])
    head_norms = np.zeros((0, dim), np.float32)
    if (of_q := head_norm(attention)) is not None:
        head_norms = np.stack([norm_weight(of_q), norm_weight(named(attention, "k_norm", "k_layernorm"))])
    return DecoderLayer(
        q, k, v, _whole(named(attention, "o_proj", "out_proj")), gate, up, Matrix(down, width),
        None if before is None else norm_weight(before), norm_weight(norms), after, head_norms,
        mlp if isinstance(mlp, PanelMixture) else None, filters,
    )  # fmt: skip


def named(module: Any, *names: str) -> Any:
    """Return the part of a `module` that has the first of these `names` that there is."""
    return getattr(module, next(name for name in names if hasattr(module, name)))


def first_attention(layers: Any) -> Any:
    """Return the attention of the first of some decoder `layers` that has one, None where none has."""
    return next((found for layer in layers if (found := getattr(layer, "self_attn", None)) is not None), None)


def head_norm(attention: Any) -> Any:
    """Return the norm of each query head by itself in a module of `attention`, None where there is none."""
    return getattr(attention, "q_norm", None) or getattr(attention, "q_layernorm", None)


def norm_weight(norm: Any) -> np.ndarray:
    """Return what a `norm` multiplies by, in float32 [d]."""
    weight = array(norm.weight)
    return weight + 1 if _is_of_gemma(norm) else weight


def norm_eps(norm: Any) -> float:
    """Return what a `norm` adds to the mean square."""
    return norm.eps if _is_of_gemma(norm) else norm.variance_epsilon


def bias_of(linear: PanelLinear) -> np.ndarray:
    """Return the bias of a `linear` layer in float32 [out], zeros where there is none."""
    return np.zeros(linear.out_features, np.float32) if linear.bias is None else array(linear.bias)


def array(parameter: Tensor) -> np.ndarray:
    """Return a `parameter` on a CPU as a float32 array of the same shape."""
    return parameter.detach().float().numpy()


def _is_of_gemma(norm: Any) -> bool:
    """Whether a norm is Gemma's, which multiplies by 1 + weight. Its class is not imported for models without it."""
    return type(norm).__name__ in ("GemmaRMSNorm", "Gemma3RMSNorm")


def _whole(linear: PanelLinear) -> Matrix:
    return Matrix(linear, linear.out_features)
