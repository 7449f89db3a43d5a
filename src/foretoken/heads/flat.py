"""Heads without a cache of drafted tokens: Medusa guesses every depth from one state, Hydra adds the tokens between.

h_t is the target's state before the root x_{t+1}; level i drafts x_{t+2+i}, the children of nodes at depth i.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from foretoken.core.shapes import Float
from foretoken.heads.layer import Attend, DecoderLayer, LayerShape, RMSNorm
from foretoken.models.features import FINAL
from foretoken.models.parts import TargetParts


class ResidualBlock(nn.Module):
    """r(x) + SiLU(Linear x); r is a second Linear where the width changes. Starts as r."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        nn.init.zeros_(self.linear.weight)
        self.res_connection = nn.Identity() if width == hidden else nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + torch.nn.functional.silu(self.linear(x))


class Flat(nn.Module):
    """What drafting needs of such a head; `depth` levels."""

    kind: ClassVar[str]
    feature_scale: float = 1.0

    def __init__(self, parts: TargetParts, depth: int) -> None:
        super().__init__()
        self.target, self.depth = parts, depth

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (FINAL,)


class Medusa(Flat):
    """Level i: Linear(d -> V) on (x + SiLU(Linear x)) repeated, x = h_t. q depends on the depth alone. Cai et al. 2024.

    A node's children are drawn from its level's q whatever its path, which any law and rule allows: q is what was
    drawn from, only a worse guess than one that knows the path.
    """

    kind = "medusa"

    def __init__(self, parts: TargetParts, num_heads: int = 4, num_blocks: int = 1, bias: bool = False) -> None:
        super().__init__(parts, num_heads)
        d = parts.hidden
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(d, d) for _ in range(num_blocks)), nn.Linear(d, parts.vocab_size, bias=bias))
            for _ in range(num_heads)
        )

    def own_lm_heads(self) -> list[nn.Linear]:
        return [
            module
            for name, module in self.heads.named_modules()
            if name.count(".") == 1 and isinstance(module, nn.Linear)
        ]

    def levels(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... k v"]:
        """Scores of every level from h_t."""
        scaled = states / self.feature_scale
        return torch.stack([head(scaled) for head in self.heads], -2)


class Hydra(Flat):
    """Level i: MLP and Linear(d -> V) on (prefix state, embeddings of the i + 1 tokens from the root on).

    The prefix state comes from one decoder layer over the states h_0..h_t (Hydra++), or is h_t itself. Ankner et al.
    2024.
    """

    kind = "hydra"

    def __init__(
        self, parts: TargetParts, shape: LayerShape, num_heads: int = 4, num_blocks: int = 1, prefix: bool = True
    ) -> None:
        super().__init__(parts, num_heads)
        self.shape = shape
        d = parts.hidden
        self.prefix = DecoderLayer(shape, input_norm=True) if prefix else None
        self.prefix_norm = RMSNorm(d, shape.eps) if prefix else None
        self.mlps = nn.ModuleList(
            nn.Sequential(ResidualBlock(d, (i + 2) * d), *(ResidualBlock(d, d) for _ in range(num_blocks - 1)))
            for i in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(d, parts.vocab_size) for _ in range(num_heads))

    def own_lm_heads(self) -> list[nn.Linear]:
        return [module for module in self.lm_heads if isinstance(module, nn.Linear)]

    def prefix_states(
        self, features: Float[Tensor, "b n d"], cos: Float[Tensor, "_ n h"], sin: Float[Tensor, "_ n h"], attend: Attend
    ) -> Float[Tensor, "b n d"]:
        scaled = features / self.feature_scale
        if self.prefix is None or self.prefix_norm is None:
            return scaled
        return self.prefix_norm(self.prefix(scaled, cos, sin, attend))

    def level(self, i: int, prefix: Float[Tensor, "... d"], embedded: list[Tensor]) -> Float[Tensor, "... v"]:
        """embedded: those of the root and the i tokens below it."""
        return self.lm_heads[i](self.mlps[i](torch.cat((prefix, *(e.to(prefix.dtype) for e in embedded)), -1)))
