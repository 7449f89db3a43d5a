"""The decoder layer that draft heads are made of: Llama's, with the published names of its weights."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.shapes import Float
from foretoken.models.cache import SlotCache
from foretoken.models.parts import LayerShape
from foretoken.models.static import TracedCache

# Attention without its linear layers: q [b, heads, n, dim], k and v [b, kv_heads, n, dim] -> [b, heads, n, dim].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.RMSNorm):
    """A norm that divides by the root mean square, then multiplies each channel by a weight."""

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Return x normed over its last axis [..., d], in the dtype of x."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Multi-head attention with rotary positions, its four linear layers included."""

    def __init__(self, shape: LayerShape, normed: bool = False) -> None:
        """Make the untrained linear layers, and norms.

        shape: the sizes of the layer.
        normed: whether queries and keys are normed head by head, as in Qwen3.
        """
        super().__init__()
        self.shape, self.normed = shape, normed
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.width, queries, bias=shape.bias)
        self.k_proj = nn.Linear(shape.width, keys, bias=shape.bias)
        self.v_proj = nn.Linear(shape.width, keys, bias=shape.bias)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)
        if normed:
            self.q_norm, self.k_norm = (RMSNorm(shape.head_dim, shape.eps) for _ in range(2))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.shape.head_dim).transpose(1, 2)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return (keys, turned by their positions; values), each [b, kv_heads, n, head_dim].

        x, cos, sin: as in `forward`.
        """
        k = self._by_head(self.k_proj(x))
        return turned(self.k_norm(k) if self.normed else k, cos, sin), self._by_head(self.v_proj(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return what attention adds to the residual stream [b, n, hidden].

        x: what it reads [b, n, width].
        cos, sin: cosines and sines of the positions' rotary angles [1 or b, n, head_dim].
        attend: computes attention from turned queries and keys, and values; it decides which positions are seen.
        """
        q = self._by_head(self.q_proj(x))
        y = attend(turned(self.q_norm(q) if self.normed else q, cos, sin), *self.keys_values(x, cos, sin))
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    """Llama's gated MLP: down(SiLU(gate x) * up x)."""

    def __init__(self, shape: LayerShape) -> None:
        """Make the untrained linear layers; shape: the sizes of the layer."""
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the MLP makes of x, both [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A decoder layer: attention is added to x, then the MLP; each reads x through a norm."""

    def __init__(self, shape: LayerShape, input_norm: bool) -> None:
        """Make an untrained layer.

        shape: its sizes.
        input_norm: whether attention reads x through a norm; in EAGLE's first layer it reads x as it is.
        """
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps) if input_norm else None
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(
        self, x: Float[Tensor, "b n d"], cos: Float[Tensor, "_ n h"], sin: Float[Tensor, "_ n h"], attend: Attend
    ) -> Float[Tensor, "b n d"]:
        """Return x after the layer [b, n, d]; x: the residual stream [b, n, d]; cos, sin, attend: as in `Attention`."""
        read = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(read, cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention [b, heads, n, dim] in which every position sees itself and those before it, for whole texts.

    q: queries [b, heads, n, dim].
    k, v: keys and values [b, kv_heads, n, dim].
    """
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def cached(cache: SlotCache | TracedCache, layer: int, mask: Tensor | None) -> Attend:
    """Return attention that first writes the nodes' keys and values into the slots that `place` has set in the cache.

    cache: the slot cache.
    layer: the index of the layer in it.
    mask: which slots the nodes see: 0 or LOW [b, 1, n, used], or True and False [n, used]; None: all of them.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.update(k, v, layer)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return attend


class Unrolled:
    """Attention in EAGLE-3's training, where a head drafts several levels from many positions of a text at once.

    Level j below position r stands at position r + j. It sees the keys that level 0 made at positions up to r, and
    those of levels 1 to j below the same r. The first call is for level 0, at all n positions of the text. The call
    after it is for level 1 below `roots` alone, and so on.

    roots: the positions below which levels 1 and on are drafted [m]; None: all positions.
    """

    def __init__(self, roots: Tensor | None = None) -> None:
        self.roots = roots
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of the next level.

        q: queries [b, heads, n, dim] of level 0, [b, heads, m, dim] of later ones; the result has the same shape.
        k, v: keys and values of these nodes [b, kv_heads, n or m, dim].
        """
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
    """Return queries or keys x [b, h, n, d], each turned by the rotary angles of its position.

    cos, sin: cosines and sines of these angles [1 or b, n, d], see models/rotary.py.
    """
    left, right = x.chunk(2, -1)
    return x * cos[:, None].to(x.dtype) + torch.cat((-right, left), -1) * sin[:, None].to(x.dtype)
