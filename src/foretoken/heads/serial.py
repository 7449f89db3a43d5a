"""Heads that draft token after token with a small Transformer of their own: EAGLE, Gumiho's first part, EAGLE-3.

With h_i the target's state at position i and x_{i+1} the token after it, one step maps (x_{i+1}, h_i) to a state o_i
that stands for h_{i+1}; the target's LM head on it gives q of x_{i+2}. The next step takes o_i in place of the target's
state. Inside a head, states are divided by `feature_scale`, so that noise and losses mean the same on any target.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.heads.layer import Attend, DecoderLayer, LayerShape, RMSNorm
from foretoken.models.features import FINAL
from foretoken.models.parts import TargetParts


class Serial(nn.Module, ABC):
    """What drafting and training need of such a head.

    depth: levels it can draft, None for any. step: one pass over new nodes. attends: one Attend per layer.
    """

    kind: ClassVar[str]
    depth: int | None = None
    feature_scale: float = 1.0

    def __init__(self, parts: TargetParts, shape: LayerShape, num_layers: int) -> None:
        super().__init__()
        self.target, self.shape, self.num_layers = parts, shape, num_layers

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (FINAL,)

    def own_lm_heads(self) -> list[nn.Linear]:
        return []

    def enter(self, features: Float[Tensor, "... f"]) -> Float[Tensor, "... d"]:
        """The target's states in the form of the head's own."""
        return features / self.feature_scale

    @abstractmethod
    def step(
        self,
        embedded: Float[Tensor, "b n d"],
        states: Float[Tensor, "b n d"],
        cos: Float[Tensor, "_ n h"],
        sin: Float[Tensor, "_ n h"],
        attends: list[Attend],
    ) -> Float[Tensor, "b n d"]: ...

    def logits(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """Scores of the token that follows a node, from its state o."""
        return self.target.logits(states * self.feature_scale)


class Eagle(Serial):
    """EAGLE-1/2: one decoder layer without input norm on Linear(embedding, state). Li et al. 2024, EAGLE."""

    kind = "eagle"

    def __init__(self, parts: TargetParts, shape: LayerShape, num_layers: int = 1, bias: bool = True) -> None:
        super().__init__(parts, shape, num_layers)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=bias)
        self.layers = nn.ModuleList(DecoderLayer(shape, input_norm=i > 0) for i in range(num_layers))

    def step(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attends: list[Attend]) -> Tensor:
        x = self.fc(torch.cat((embedded.to(states.dtype), states), -1))
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, cos, sin, attend)
        return x


class Block(nn.Module):
    """x + SiLU(Linear x); without the residual where the width changes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        self.residual = width == hidden

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.silu(self.linear(x))
        return x + y if self.residual else y


class Gumiho(Eagle):
    """Two layers draft the first two tokens, then MLPs side by side the next ones, each from (o_i, o_{i+1}).

    With o_i for h_{i+1} and o_{i+1} for h_{i+2}, MLP j gives the state of position i + 3 + j: the token at depth 3 + j
    below root x_{i+1}, whatever stands at the depths between. Li et al. 2025, Gumiho, s. 3.3; blocks as in its Table 5.
    """

    kind = "gumiho"
    SERIAL: ClassVar[int] = 2  # levels drafted by the serial part

    def __init__(
        self, parts: TargetParts, shape: LayerShape, num_layers: int = 2, num_mlps: int = 5, num_blocks: int = 6,
        bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(parts, shape, num_layers, bias)
        d = shape.hidden
        self.mlp = nn.ModuleList(
            nn.Sequential(*(Block(2 * d if i == 0 else d, d) for i in range(num_blocks))) for _ in range(num_mlps)
        )
        self.depth = self.SERIAL + num_mlps

    def cut(self, levels: int) -> None:
        """Keep only the MLPs of the first `levels` levels. Raises ForetokenError where it has fewer."""
        most = self.SERIAL + len(self.mlp)
        if not self.SERIAL <= levels <= most:
            raise ForetokenError(f"Gumiho's head drafts {self.SERIAL} to {most} levels, not {levels}.")
        self.mlp, self.depth = self.mlp[: levels - self.SERIAL], levels

    def parallel(self, first: Float[Tensor, "... d"], second: Float[Tensor, "... d"]) -> Float[Tensor, "... m d"]:
        """The states of all MLPs from o_i and o_{i+1}."""
        both = torch.cat((first, second), -1)
        return torch.stack([mlp(both) for mlp in self.mlp], -2)


class Eagle3Layer(nn.Module):
    """Attention reads (norm(embedding), norm(state)), 2d wide; the residual is the state itself, or normed."""

    def __init__(self, shape: LayerShape, norm_before_residual: bool) -> None:
        super().__init__()
        inner = DecoderLayer(shape, input_norm=True)
        self.self_attn, self.mlp = inner.self_attn, inner.mlp
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed = self.hidden_norm(states)
        x = normed if self.norm_before_residual else states
        x = x + self.self_attn(
            torch.cat((self.input_layernorm(embedded.to(states.dtype)), normed), -1), cos, sin, attend
        )
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(Serial):
    """EAGLE-3: states of several target layers, a layer of double width, norm and LM head of its own. Li et al. 2025.

    layers: whose states it reads, see models/features.py; by default, as published, those that enter layers 2, n / 2
    and n - 3. `fc` reads them once per committed token, not per drafted one.
    draft_vocab: its LM head may know only some tokens: draft token i is target token i + d2t[i]; None: all of them.
    """

    kind = "eagle3"
    d2t: Tensor | None
    t2d: Tensor | None
    feature_sizes: Tensor | None  # [f], see `normalise`

    def __init__(
        self, parts: TargetParts, shape: LayerShape, draft_vocab: int | None = None, layers: tuple[int, ...] = (),
        norm_before_residual: bool = False, norm_output: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(parts, shape, 1)
        self._layers = layers or (2, parts.layers // 2, parts.layers - 3)
        self.fc = nn.Linear(len(self._layers) * parts.hidden, shape.hidden, bias=False)
        self.midlayer = Eagle3Layer(shape, norm_before_residual)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, draft_vocab or parts.vocab_size, bias=False)
        self.norm_output = norm_output
        self.register_buffer("feature_sizes", None, persistent=False)
        whole = draft_vocab is None
        self.register_buffer("d2t", None if whole else torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", None if whole else torch.zeros(parts.vocab_size, dtype=torch.bool))

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._layers

    def own_lm_heads(self) -> list[nn.Linear]:
        return [self.lm_head]

    def enter(self, features: Tensor) -> Tensor:
        return self.fc(features if self.feature_sizes is None else features / self.feature_sizes)

    def name_tokens(self, tokens: Tensor) -> None:
        """Set which target tokens a trimmed LM head knows: tokens [draft_vocab], ids in ascending order."""
        assert self.d2t is not None
        assert self.t2d is not None
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()
        self.t2d[tokens] = True

    @torch.no_grad()
    def normalise(self, sizes: Float[Tensor, " f"] | None) -> None:
        """Let `fc` read each channel of the target's states divided by its size; the head's function stays the same.

        For training: the channels of real models differ a hundredfold, which spoils every step of an optimiser.
        sizes: root mean square of each channel; None folds those there are back into the weights.
        """
        if self.feature_sizes is not None:
            self.fc.weight.div_(self.feature_sizes)
        self.feature_sizes = None if sizes is None else sizes.to(self.fc.weight)
        if self.feature_sizes is not None:
            self.fc.weight.mul_(self.feature_sizes)

    def step(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attends: list[Attend]) -> Tensor:
        x = self.midlayer(embedded, states, cos, sin, attends[0])
        return self.norm(x) if self.norm_output else x

    def draft_logits(self, states: Tensor) -> Tensor:
        """Over its own vocabulary."""
        return self.lm_head(states if self.norm_output else self.norm(states))

    @property
    def columns(self) -> Int[Tensor, " c"] | None:
        """The target ids of its own vocabulary, None where that is the target's."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def order_vocabulary(self) -> None:
        """Put its own vocabulary in the order of the target's ids, as published heads have it: one uniform then draws
        the same token from its probabilities over either vocabulary."""
        columns = self.columns
        if columns is not None and bool((columns[1:] < columns[:-1]).any()):
            assert self.d2t is not None
            order = columns.argsort()
            self.lm_head.weight.copy_(self.lm_head.weight[order])
            self.d2t.copy_(columns[order] - torch.arange(len(order), device=order.device))

    def logits(self, states: Tensor) -> Tensor:
        own, columns = self.draft_logits(states), self.columns
        return own if columns is None else scattered(own, columns, self.target.vocab_size, float("-inf"))


def scattered(
    own: Float[Tensor, "*n c"], columns: Int[Tensor, " c"], vocab_size: int, rest: float
) -> Float[Tensor, "*n v"]:
    """Numbers of some tokens among those of a whole vocabulary, of which all others are `rest`."""
    return own.new_full((*own.shape[:-1], vocab_size), rest).index_copy_(-1, columns, own)
