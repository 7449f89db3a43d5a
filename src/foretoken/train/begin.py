"""What a new head begins as, besides noise: copies of weights of its target, a small language model, another head."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaForCausalLM

from foretoken.core.errors import ForetokenError
from foretoken.heads.checkpoint import LAYERS
from foretoken.heads.dflash import DFlash
from foretoken.heads.eagle import Eagle
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.head import PublishedHead
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.models.identity import fingerprint, fingerprint_of_weights

NOT_ALIKE = "The layers of model {} have other sizes than the target's, so that a head cannot begin as they are."
STATE_SHARE = 0.3  # of the target's state in what the first layer reads, beside the embedding


@dataclass(frozen=True)
class Beginning:
    """A small model whose last layers a head begins with, or a head of the same kind, as it is; name: of its folder."""

    name: str
    source: CausalLM | PublishedHead

    @property
    def fingerprint(self) -> str:
        if isinstance(self.source, CausalLM):
            return fingerprint(self.source)
        return fingerprint_of_weights(
            self.source, repr((self.source.kind, self.source.feature_scale, _make(self.source)))
        )

    @property
    def taken(self) -> str:
        """What the head has of it, for the card."""
        return "the layers of" if isinstance(self.source, CausalLM) else "the head"

    def fill(self, head: PublishedHead) -> None:
        """Raises ForetokenError where it does not fit the head."""
        if isinstance(self.source, CausalLM):
            start_from_model(head, self.source)
        else:
            start_from_head(head, self.source, self.name)


@torch.no_grad()
def start_from_target(head: PublishedHead) -> None:
    """LM heads of a head's own start as the target's, as published.

    EAGLE-3's first state starts as the target's final one, divided by its size, of which that LM head gives the
    target's distribution: what is left to learn is the step to the next token. The states of DFlash and JetFlow, which
    the target's LM head reads, start as large as the target's.
    """
    if isinstance(head, DFlash):
        head.norm.weight.fill_(head.feature_scale)
    if isinstance(head, Eagle3) and head.feature_layers[-1] == FINAL:
        d = head.shape.hidden
        head.fc.weight.zero_()
        head.fc.weight[:, -d:] = torch.eye(d) / head.feature_scale
    weight = getattr(head.target.unembedding, "weight", None)
    if weight is None:
        return
    if isinstance(head, Eagle3) and head.t2d is not None:
        weight = weight[head.t2d]
    for linear in head.own_lm_heads():
        if linear.weight.shape == weight.shape:
            linear.weight.copy_(weight * head.feature_scale * head.target.logit_scale)


@torch.no_grad()
def start_from_head(head: PublishedHead, other: PublishedHead, name: str) -> None:
    """All that another head of the same kind and sizes learnt, its scale of the states included.

    The target may be the one it was trained for or another as wide; EAGLE-3 reads the new target's own layers.
    Raises ForetokenError naming what differs.
    """
    if head.kind != other.kind:
        raise ForetokenError(f"Head {name} is of kind {other.kind}: --begin needs one of kind {head.kind}.")
    here, there = _make(head), _make(other)
    for what in (*here, *there):
        if here.get(what) != there.get(what):
            raise ForetokenError(
                f"Head {name} cannot be gone on from: its {what} is {there.get(what)}, here it is {here.get(what)}. "
                "If --layers and --levels cannot mend that, leave --begin out."
            )
    head.load_state_dict(other.state_dict())
    head.feature_scale = other.feature_scale


def _make(head: PublishedHead) -> dict[str, Any]:
    """What decides, besides the weights, which function a head computes of the target's states.

    Which layers' states it reads is left out: a new head reads its own target's.
    """
    rotary = head.rotary.config
    entries = {key: value for key, value in head.config().items() if key not in rotary and key != LAYERS}
    return entries | {"rotary": rotary} | {key: tuple(value.shape) for key, value in head.state_dict().items()}


@torch.no_grad()
def start_from_model(head: PublishedHead, lm: CausalLM) -> None:
    """The layers of an EAGLE or Gumiho head start as the last ones of a small Llama with the target's sizes.

    They read the embeddings scaled to mean square 1, as the model's first norm would give them, and a share of the
    target's states; what they add to the residual stream is scaled alike. Raises ForetokenError where layers differ.
    """
    if not isinstance(head, Eagle):
        raise ForetokenError(f"Head {head.kind} has no layers that could begin as those of {lm.name}: leave it out.")
    table = head.target.embedding.get_parameter("weight") * head.target.embedding_scale
    size = float(table.float().square().mean().sqrt())
    model: Any = lm.model
    config: Any = model.config
    if not isinstance(model, LlamaForCausalLM) or config.hidden_act != "silu":
        raise ForetokenError(f"Model {lm.name} is no Llama, whose layers a head could begin with: leave it out.")
    found: list[Any] = list(model.model.layers)
    if found[0].self_attn.head_dim != head.shape.head_dim:
        raise ForetokenError(NOT_ALIKE.format(lm.name))
    if len(found) < head.num_layers:
        raise ForetokenError(f"Model {lm.name} has {len(found)} layers to begin with, and the head {head.num_layers}.")
    unit = torch.eye(head.shape.hidden, device=head.fc.weight.device)
    head.fc.weight.copy_(torch.cat((unit / size, STATE_SHARE * unit), 1))
    if head.fc.bias is not None:
        head.fc.bias.zero_()
    for i, (layer, source) in enumerate(zip(head.layers, found[-head.num_layers :], strict=True)):
        weights = {key: value.float() for key, value in source.state_dict().items()}
        if i == 0 and "input_layernorm.weight" in weights:
            gain = weights.pop("input_layernorm.weight")
            for name in "qkv":
                weights[f"self_attn.{name}_proj.weight"] = weights[f"self_attn.{name}_proj.weight"] * gain
        for key in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            weights[key] = weights[key] / size
        try:
            layer.load_state_dict(weights)
        except (RuntimeError, KeyError) as error:
            raise ForetokenError(NOT_ALIKE.format(lm.name)) from error
