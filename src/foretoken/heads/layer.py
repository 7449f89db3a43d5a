"""The decoder layer that draft heads are made of: Llama's, with the published names of its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.shapes import Float
from foretoken.models.cache import SlotCache
from foretoken.models.parts import TargetParts
from foretoken.models.static import TracedCache

# q [b, heads, n, dim], k and v [b, kv_heads, n, dim] -> [b, heads, n, dim]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a decoder layer. width: of what attention reads; the residual stream has `hidden`. bias: of q, k, v."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    width: int
    bias: bool = False

    def config(self) -> dict[str, Any]:
        """As config.json names what tensors do not show."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "rms_norm_eps": self.eps,
        }


def layer_shape(parts: TargetParts, width: int | None = None) -> LayerShape:
    """A layer as wide as the target's own; width: of what its attention reads, by default the hidden size."""
    return LayerShape(
        parts.hidden, parts.heads, parts.kv_heads, parts.head_dim, parts.intermediate, parts.eps, width or parts.hidden
    )


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.width, queries, bias=shape.bias)
        self.k_proj = nn.Linear(shape.width, keys, bias=shape.bias)
        self.v_proj = nn.Linear(shape.width, keys, bias=shape.bias)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        b, n, _ = x.shape
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (p(x).view(b, n, -1, self.shape.head_dim).transpose(1, 2) for p in projections)
        y = attend(turned(q, cos, sin), turned(k, cos, sin), v)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, -1))


class MLP(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """x + attention, then + MLP; input_norm False: attention reads x as it is (EAGLE's first layer)."""

    def __init__(self, shape: LayerShape, input_norm: bool) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps) if input_norm else None
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(
        self, x: Float[Tensor, "b n d"], cos: Float[Tensor, "_ n h"], sin: Float[Tensor, "_ n h"], attend: Attend
    ) -> Float[Tensor, "b n d"]:
        read = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(read, cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every position sees those before it and itself: training on whole texts."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def cached(cache: SlotCache | TracedCache, layer: int, mask: Tensor | None) -> Attend:
    """The new nodes' keys and values go to the slots that were set; the mask, [b, 1, n, used] of 0 and LOW or [n, used]
    of True and False, says who sees what."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.update(k, v, layer)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return attend


class Unrolled:
    """Attention while a head drafts several steps from every position r of a text at once (EAGLE-3's training).

    Step j's node of root r stands at position r + j. It sees the text's keys up to r (step 0) and those of its own
    steps 1..j at the same r. The first call is step 0, of every position; later ones are of `roots` alone.

    roots: [m], the positions from which later steps are drafted; None: from every position.
    """

    def __init__(self, roots: Tensor | None = None) -> None:
        self.roots = roots
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rep = q.shape[1] // k.shape[1]
        self.keys.append(k.repeat_interleave(rep, 1))
        self.values.append(v.repeat_interleave(rep, 1))
        if len(self.keys) == 1:
            return causal(q, k, v)
        n = self.keys[0].shape[2]
        scale = q.shape[-1] ** -0.5
        places = torch.arange(n, device=q.device)
        hidden = places[None] > (places if self.roots is None else self.roots)[:, None]
        text = (q @ self.keys[0].mT * scale).masked_fill(hidden, float("-inf"))
        own = [(q * keys).sum(-1, keepdim=True) * scale for keys in self.keys[1:]]
        weights = torch.cat([text, *own], -1).softmax(-1)
        out = weights[..., :n] @ self.values[0]
        for j, values in enumerate(self.values[1:]):
            out = out + weights[..., n + j : n + j + 1] * values
        return out


def turned(x: Float[Tensor, "b h n d"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b h n d"]:
    """Queries or keys at their positions. cos, sin: the angles of these, see models/rotary.py."""
    left, right = x.chunk(2, -1)
    return x * cos[:, None].to(x.dtype) + torch.cat((-right, left), -1) * sin[:, None].to(x.dtype)
