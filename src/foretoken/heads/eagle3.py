"""EAGLE-3: a head on the states of several target layers, with a layer of double width and an LM head of its own."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.heads.checkpoint import LAYERS, Checkpoint
from foretoken.heads.layer import MLP, Attend, Attention, RMSNorm
from foretoken.heads.serial import SerialLayers
from foretoken.models.features import FINAL
from foretoken.models.parts import LayerShape, TargetParts

# The first layer in config.json of heads that name the layers which the states leave. Heads that name the layers which
# the states enter begin with a later one.
AFTER_FIRST = 1


class Eagle3Layer(nn.Module):
    """EAGLE-3's decoder layer, whose attention reads (norm(embedding), norm(state)), 2d wide.

    norm_before_residual: whether the residual stream begins with the normed state instead of the state itself.
    """

    def __init__(self, shape: LayerShape, norm_before_residual: bool) -> None:
        """Make an untrained layer; shape: its sizes; norm_before_residual: as in the class's docstring."""
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream after the layer [b, n, d].

        embedded, states: embeddings of the tokens and the states before them [b, n, d].
        cos, sin, attend: as in `Attention`.
        """
        normed = self.hidden_norm(states)
        x = normed if self.norm_before_residual else states
        x = x + self.self_attn(
            torch.cat((self.input_layernorm(embedded.to(states.dtype)), normed), -1), cos, sin, attend
        )
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(SerialLayers):
    """EAGLE-3: states of several target layers, a layer of double width, norm and LM head of its own. Li et al. 2025.

    `fc` maps the target's states to one of the head's width, once per committed token; for draft tokens the
    head's own states take its place.
    d2t: where the LM head has only some of the target's tokens, its token i is target token i + d2t[i]; else None.
    t2d: per target token whether the LM head has it [v]; None where it has all.
    norm_output: whether the head's own states, which the next level reads, are normed.
    """

    kind = "eagle3"
    marks = (r"fc\.weight$", r"midlayer\.hidden_norm\.")
    d2t: Tensor | None
    t2d: Tensor | None
    feature_sizes: Tensor | None  # [f], see `normalise`

    def __init__(
        self, parts: TargetParts, shape: LayerShape, tokens: Tensor | None = None, layers: tuple[int, ...] = (),
        norm_before_residual: bool = False, norm_output: bool = False, input_norm: bool = False, fc_norm: bool = False,
        borrows_lm_head: bool = False,
    ) -> None:  # fmt: skip
        """Make an untrained head.

        parts: what the head borrows of its target.
        shape: sizes of its layer.
        tokens: target ids of the tokens that its LM head has [m]; None: all.
        layers: the target's layers whose states it reads, see models/features.py; (): as published, those that enter
            layers 2, n / 2 and n - 3 of n.
        norm_before_residual: as in `Eagle3Layer`.
        norm_output: as in the class's docstring.
        input_norm, fc_norm: whether `fc` reads the states normed, all of them as one vector, or layer by layer.
        borrows_lm_head: whether it uses the target's LM head instead of one of its own.
        """
        super().__init__(parts, shape, 1)
        self.feature_layers = layers or (2, parts.layers // 2, parts.layers - 3)
        count = len(self.feature_layers)
        self.input_norm = RMSNorm(count * parts.hidden, shape.eps) if input_norm else None
        self.fc_norm = nn.ModuleList(RMSNorm(parts.hidden, shape.eps) for _ in range(count)) if fc_norm else None
        self.fc = nn.Linear(count * parts.hidden, shape.hidden, bias=False)
        self.midlayer = Eagle3Layer(shape, norm_before_residual)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        vocab = parts.vocab_size if tokens is None else len(tokens)
        self.lm_head = None if borrows_lm_head else nn.Linear(shape.hidden, vocab, bias=False)
        self.norm_output = norm_output
        self.register_buffer("feature_sizes", None, persistent=False)
        known = torch.zeros(parts.vocab_size, dtype=torch.bool)
        self.register_buffer("d2t", None if tokens is None else tokens - torch.arange(vocab))
        self.register_buffer("t2d", None if tokens is None else known.index_fill_(0, tokens, True))

    @classmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "Eagle3":
        if parts.layers < 4:  # it reads what enters layers 2, n / 2 and n - 3
            raise ForetokenError(f"Head eagle3 needs a target of 4 layers, and {parts.name} has {parts.layers}.")
        read = (2, parts.layers // 2, parts.layers - 3, FINAL)  # as published, and one for `start_from_target`
        return cls(parts, replace(parts.shape, width=2 * parts.hidden), tokens, read)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Eagle3":
        config, parts, weights = checkpoint.config, checkpoint.parts, checkpoint.weights
        shape, layers = checkpoint.layer_shape("midlayer."), _layers_read(checkpoint)
        checkpoint.check("hidden size", checkpoint.size("fc.weight")[1] // (len(layers) or 3), parts.hidden)
        offsets, borrows = weights.get("d2t"), "lm_head.weight" not in weights
        if borrows and (offsets is not None or shape.hidden != parts.hidden):
            checkpoint.size("lm_head.weight")
        if offsets is None and not borrows:
            checkpoint.check("vocabulary", checkpoint.size("lm_head.weight")[0], parts.vocab_size)
        head = cls(
            parts, shape, None if offsets is None else _named_tokens(checkpoint, offsets), layers,
            norm_before_residual=bool(config.get("norm_before_residual")),
            norm_output=bool(config.get("norm_output")),
            input_norm=bool(config.get("norm_before_fc")) or "input_norm.weight" in weights,
            fc_norm=bool(config.get("fc_norm")) or "fc_norm.0.weight" in weights,
            borrows_lm_head=borrows,
        )  # fmt: skip
        head.take_own(checkpoint)
        if head.t2d is not None:
            weights.setdefault("t2d", head.t2d)
        return head

    def published_weights(self) -> dict[str, Tensor]:
        weights = super().published_weights()
        if self.feature_sizes is not None:
            weights["fc.weight"] = weights["fc.weight"] / self.feature_sizes
        return weights

    def config(self) -> dict[str, Any]:
        return super().config() | {
            LAYERS: list(self.feature_layers),
            "draft_vocab_size": self.target.vocab_size if self.d2t is None else len(self.d2t),
            "norm_before_residual": self.midlayer.norm_before_residual,
            "norm_output": self.norm_output,
            "norm_before_fc": self.input_norm is not None,
            "fc_norm": self.fc_norm is not None,
        }

    def own_lm_heads(self) -> list[nn.Linear]:
        return [] if self.lm_head is None else [self.lm_head]

    def enter(self, features: Tensor) -> Tensor:
        if self.feature_sizes is not None:
            features = features / self.feature_sizes
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            of_layers = features.chunk(len(self.feature_layers), -1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, of_layers, strict=True)], -1)
        return self.fc(features)

    @torch.no_grad()
    def normalise(self, sizes: Float[Tensor, " f"] | None) -> None:
        """Let `fc` read each channel of the target's states divided by its size; the head's function stays the same.

        Training needs it: the channels of real models differ a hundredfold, which spoils every step of an optimiser.

        sizes: root mean square of each channel [f]; None: undo an earlier call, so that `fc` reads the states as such.
        """
        if self.feature_sizes is not None:
            self.fc.weight.div_(self.feature_sizes)
        self.feature_sizes = None if sizes is None else sizes.to(self.fc.weight)
        if self.feature_sizes is not None:
            self.fc.weight.mul_(self.feature_sizes)

    def step(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attends: list[Attend]) -> Tensor:
        x = self.midlayer(embedded, states, cos, sin, attends[0])
        return self.norm(x) if self.norm_output else x

    def logits(self, states: Tensor) -> Tensor:
        normed = states if self.norm_output else self.norm(states)
        return self.target.logits(normed) if self.lm_head is None else self.lm_head(normed)

    @property
    def columns(self) -> Int[Tensor, " c"] | None:
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def order_vocabulary(self) -> None:
        """Sort the head's own vocabulary by the target's ids, as published heads have it.

        Then one uniform draws the same token from q over the head's vocabulary as from q over the target's.
        """
        columns = self.columns
        if columns is not None and bool((columns[1:] < columns[:-1]).any()):
            assert self.d2t is not None
            assert self.lm_head is not None
            order = columns.argsort()
            self.lm_head.weight.copy_(self.lm_head.weight[order])
            self.d2t.copy_(columns[order] - torch.arange(len(order), device=order.device))


def _layers_read(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the target's layers that the states read by the head enter, () where its config.json names none.

    Heads of SpecForge and SGLang name the layers that the states leave, layer 1 first; this project's heads and those
    of vLLM name the layers that the states enter. Raises ForetokenError where the target lacks a layer.
    """
    layers: tuple[int, ...] = tuple(checkpoint.config.get(LAYERS) or ())
    path, parts = checkpoint.path, checkpoint.parts
    if layers and layers[0] == AFTER_FIRST and "foretoken_head" not in checkpoint.config:
        layers = tuple(layer + 1 for layer in layers)
    if not all(FINAL <= layer < parts.layers for layer in layers):
        raise ForetokenError(f"{path} reads the target's layers {layers}, and {parts.name} has {parts.layers}.")
    return layers


def _named_tokens(checkpoint: Checkpoint, offsets: Tensor) -> Tensor:
    """Return the target ids of the head's own vocabulary [m].

    offsets: the checkpoint's d2t [m].

    Raises ForetokenError where it is no list of whole numbers, and where an id occurs twice or is none of the target's.
    """
    count = checkpoint.parts.vocab_size
    if offsets.ndim != 1 or not len(offsets) or offsets.dtype.is_floating_point:
        raise ForetokenError(f"{checkpoint.path} has a d2t that is no list of whole numbers: mend it.")
    if "t2d" in checkpoint.weights:
        checkpoint.check("vocabulary", checkpoint.size("t2d", 1)[0], count)
    ids = torch.arange(len(offsets)) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= count or len(ids.unique()) != len(ids):
        raise ForetokenError(f"{checkpoint.path} maps draft tokens by d2t to ids that the target lacks, or two to one.")
    return ids
