"""The forward of the Llama family (Llama, Mistral, Qwen2, Qwen3) by hand, for float32 on a CPU.

The same mathematics as transformers' modules, in about half as many operations and without their calls, which
outweigh the work of a small model. It reads the weights of the modules themselves and holds no copy of a matrix, so it
serves a caller's own model too. `llama_forward` says None to whatever it does not know; the generic path serves that.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from foretoken.core.shapes import Float, Int
from foretoken.models.cache import SlotCache
from foretoken.models.features import FINAL, FeatureStore
from foretoken.models.panels import PanelLinear

FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
GROUPED = 32  # up to so many nodes, the heads that share a key are laid out as further queries of that key

Product = Callable[[Tensor], Tensor]
Sum = Callable[[Tensor, Tensor], Tensor]


def llama_forward(model: PreTrainedModel, positions: int) -> "LlamaForward | None":
    """The fast forward of `model` for positions [0, positions), None where it would not be the same computation."""
    return LlamaForward(model, positions) if is_plain_llama(model, nn.Linear) else None


def is_plain_llama(model: PreTrainedModel, linear: type[nn.Module]) -> bool:
    """Whether `model` computes as its class does on a CPU, its linear layers all being of class `linear`: in float32,
    or, packed, in bfloat16."""
    if type(model) not in FAMILY or model.device.type != "cpu":
        return False
    if model.dtype != torch.float32 and not (model.dtype == torch.bfloat16 and linear is PanelLinear):
        return False
    config: Any = model.config
    if config.hidden_act != "silu" or config.rope_parameters.get("rope_type") not in STATIC_ROPE:
        return False
    known = (linear, nn.Embedding, nn.ModuleList, nn.SiLU)
    for module in model.modules():
        ours = type(module) in known or type(module).__module__ == type(model).__module__ or _is_silu(module)
        changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
        if not ours or changed:  # adapters, quantised layers, hooks, offloading
            return False
    inner: Any = model.model
    return 2 * inner.rotary_emb.inv_freq.numel() == inner.layers[0].self_attn.head_dim


def _is_silu(module: nn.Module) -> bool:
    return type(module).__name__ in ("SiLUActivation", "SiLU")


class LlamaForward:
    """See `llama_forward`. Activations are [b * n, ...]: rows and nodes in one axis."""

    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        inner: Any = model.model
        self.embedding: Tensor = inner.embed_tokens.weight.detach()
        self.layers = [_Layer(layer, i) for i, layer in enumerate(inner.layers)]
        types = getattr(model.config, "layer_types", None) or [None] * len(self.layers)
        self.layer_types: list[str | None] = list(types)
        self.norm = _rms_norm(inner.norm)
        head: Any = model.get_output_embeddings()
        self.head = _product(head)
        cos, sin = inner.rotary_emb(self.embedding, torch.arange(positions)[None])
        half = cos.shape[-1] // 2
        self.cos: Tensor = cos[0]
        self.sin: Tensor = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)  # signed: goes with x rolled by half
        self.rep: int = inner.layers[0].self_attn.num_key_value_groups

    def __call__(
        self,
        ids: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        masks: Mapping[str, np.ndarray | None],
        cache: SlotCache,
        head: bool,
        features: FeatureStore | None = None,
    ) -> Float[Tensor, "b n v"]:
        """Logits of nodes whose slots `cache` was aimed at; the last layer's states where head is False."""
        b, n = ids.shape
        grouped = n <= GROUPED
        at = positions.view(-1)
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        tensors = {kind: self._mask(mask, grouped) for kind, mask in masks.items()}
        only = next(iter(tensors.values()))
        pairs = cache.pairs()
        x = F.embedding(ids.view(-1), self.embedding)
        for layer, kind in zip(self.layers, self.layer_types, strict=True):
            mask = only if len(tensors) == 1 else tensors[kind or ""]
            if features is not None and layer.index in features.layers:
                features.write(layer.index, x.view(b, n, -1))
            x = layer(x, b, n, cos, sin, mask, grouped, cache, pairs)
        if features is not None and FINAL in features.layers:
            features.write(FINAL, self.norm(x).view(b, n, -1))
        if not head:
            return x.view(b, n, -1)
        return self.head(self.norm(x)).view(b, n, -1)

    def _mask(self, mask: np.ndarray | None, grouped: bool) -> Float[Tensor, "b 1 n used"] | None:
        if mask is None:
            return None
        return torch.from_numpy(mask.repeat(self.rep, 2) if grouped and self.rep > 1 else mask)


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.query_heads = attention.q_proj.out_features // self.dim
        self.key_heads = attention.k_proj.out_features // self.dim
        self.rep = self.query_heads // self.key_heads
        self.input_norm = _rms_norm(layer.input_layernorm)
        self.qkv = _joint_product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.head_norm = self.head_eps = None
        if hasattr(attention, "q_norm"):  # Qwen3: each query and key head by itself
            q, k = attention.q_norm, attention.k_norm
            heads = [q.weight.detach()] * self.query_heads + [k.weight.detach()] * self.key_heads
            self.head_norm, self.head_eps = torch.stack(heads), q.variance_epsilon
        self.out = _product_plus(attention.o_proj)
        self.output_norm = _rms_norm(layer.post_attention_layernorm)
        self.gated = _gated(mlp.gate_proj, mlp.up_proj)
        self.down = _product_plus(mlp.down_proj)

    def __call__(
        self,
        x: Float[Tensor, "bn d"],
        b: int,
        n: int,
        cos: Float[Tensor, "bn 1 h"],
        sin: Float[Tensor, "bn 1 h"],
        mask: Float[Tensor, "b 1 _ used"] | None,
        grouped: bool,
        cache: SlotCache,
        pairs: list[Tensor] | None,
    ) -> Float[Tensor, "bn d"]:
        query_heads, key_heads, dim = self.query_heads, self.key_heads, self.dim
        qkv = self.qkv(self.input_norm(x)).view(b * n, query_heads + 2 * key_heads, dim)
        qk = qkv[:, : query_heads + key_heads]
        if self.head_norm is not None:
            torch.mul(torch.rms_norm(qk, (dim,), None, self.head_eps), self.head_norm, out=qk)
        rolled = qk.roll(dim // 2, -1)
        qk.mul_(cos).addcmul_(rolled, sin)
        kv = qkv[:, query_heads:].view(b, n, 2, key_heads, dim).permute(2, 0, 3, 1, 4)
        if pairs is not None:
            pairs[self.index].copy_(kv)
            keys, values = cache.read(self.index)
        else:
            keys, values = cache.update(kv[0], kv[1], self.index)
        q = qkv[:, :query_heads]
        if grouped:
            q = q.view(b, n, key_heads, self.rep, dim).transpose(1, 2).reshape(b, key_heads, n * self.rep, dim)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.scale)
            y = y.view(b, key_heads, n, self.rep, dim).transpose(1, 2).reshape(b * n, query_heads * dim)
        else:
            q = q.view(b, n, query_heads, dim).transpose(1, 2)
            y = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, scale=self.scale, enable_gqa=self.rep > 1
            )
            y = y.transpose(1, 2).reshape(b * n, query_heads * dim)
        x = self.out(y, x)
        return self.down(self.gated(self.output_norm(x)), x)


def _rms_norm(norm: Any) -> Product:
    """x / sqrt(mean(x^2) + eps) * weight, as sqrt(d) * weight * x / sqrt(|x|^2 + d * eps)."""
    d = norm.weight.shape[0]
    weight = norm.weight.detach() * math.sqrt(d)
    least = torch.full((1,), d * norm.variance_epsilon)

    def apply(x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(least, size, size).rsqrt_()).mul_(weight)

    return apply


def _product(linear: nn.Linear) -> Product:
    weight, bias = _weights(linear)
    return lambda x: F.linear(x, weight, bias)


def _joint_product(linears: list[nn.Linear]) -> Product:
    """The outputs of several linear layers one after the other."""
    first, second, third = (_product(p) for p in linears)
    return lambda x: torch.cat((first(x), second(x), third(x)), -1)


def _product_plus(linear: nn.Linear) -> Sum:
    """(y, x) -> linear(y) + x."""
    weight, bias = _weights(linear)
    return lambda y, x: F.linear(y, weight, bias).add_(x)


def _gated(gate: nn.Linear, up: nn.Linear) -> Product:
    """x -> silu(gate(x)) * up(x)."""
    left, right = _product(gate), _product(up)
    return lambda x: F.silu(left(x)).mul_(right(x))


def _weights(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
