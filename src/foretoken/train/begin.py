"""The weights that a new head begins with instead of noise: those of its target, of a small model, of another head."""

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
STATE_SHARE = 0.3  # factor of the target's state in what the first layer reads, where that of the embedding is 1


@dataclass(frozen=True)
class Beginning:
    """The model or head that a new head begins with.

    name: its folder, for messages.
    source: a small language model, with whose last layers the head begins, or a head of the same kind, which is copied.
    """

    name: str
    source: CausalLM | PublishedHead

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digits that tell the source from others, for `Plan`."""
        if isinstance(self.source, CausalLM):
            return fingerprint(self.source)
        return fingerprint_of_weights(
            self.source, repr((self.source.kind, self.source.feature_scale, _make(self.source)))
        )

    @property
    def taken(self) -> str:
        """What the head takes of the source, in words, for the head's card."""
        return "the layers of" if isinstance(self.source, CausalLM) else "the head"

    @torch.no_grad()
    def fill(self, head: PublishedHead) -> None:
        """Set the weights of a new `head` to those of the source, and its scale of the states to a source head's.

        The target may be the one that a source head was trained for, or another of the same width. EAGLE-3 goes on to
        read the layers of its own target.

        Raises ForetokenError, which names what does not fit.
        """
        source, name = self.source, self.name
        if isinstance(source, CausalLM):
            start_from_model(head, source)
            return
        if head.kind != source.kind:
            raise ForetokenError(f"Head {name} is of kind {source.kind}: --begin needs one of kind {head.kind}.")
        here, there = _make(head), _make(source)
        for what in (*here, *there):
            if here.get(what) != there.get(what):
                raise ForetokenError(
                    f"Head {name} cannot be gone on from: its {what} is {there.get(what)}, here it is "
                    f"{here.get(what)}. If --layers and --levels cannot mend that, leave --begin out."
                )
        head.load_state_dict(source.state_dict())
        head.feature_scale = source.feature_scale


@torch.no_grad()
def start_from_target(head: PublishedHead) -> None:
    """Copy the target's LM head into the LM heads that a new `head` has of its own, as published.

    Where EAGLE-3 reads the target's final state, `fc` starts as that state divided by its size. From it the LM head
    makes the target's distribution, so that only the step to the next token is left to learn. The states of DFlash and
    JetFlow, which the target's LM head reads, start as large as the target's. An LM head of packed weights is not
    copied.
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


def _make(head: PublishedHead) -> dict[str, Any]:
    """Return what decides, besides the values of the weights, which function of the target's states a head computes.

    The layers whose states it reads are left out, since a new head reads those of its own target.
    """
    rotary = head.rotary.config
    entries = {key: value for key, value in head.config().items() if key not in rotary and key != LAYERS}
    return entries | {"rotary": rotary} | {key: tuple(value.shape) for key, value in head.state_dict().items()}


@torch.no_grad()
def start_from_model(head: PublishedHead, lm: CausalLM) -> None:
    """Let the layers of an EAGLE or Gumiho head start as the last layers of a small Llama.

    They read the target's embeddings, scaled to mean square 1 as the model's first norm would give them, and a share of
    the target's states. What they add to the residual stream is scaled alike.

    head: the new head, which is changed.
    lm: the Llama, whose layers have the sizes of the head's.

    Raises ForetokenError for other heads and models, and where sizes differ.
    """
    if not isinstance(head, Eagle):
        raise ForetokenError(
            f"Head {head.kind} has no layers that could begin as those of {lm.name}: leave --begin out."
        )
    table = head.target.embedding.get_parameter("weight") * head.target.embedding_scale
    size = float(table.float().square().mean().sqrt())
    model: Any = lm.model
    config: Any = model.config
    if not isinstance(model, LlamaForCausalLM) or config.hidden_act != "silu":
        raise ForetokenError(f"Model {lm.name} is no Llama, whose layers a head could begin with: leave --begin out.")
    found: list[Any] = list(model.model.layers)
    if found[0].self_attn.head_dim != head.shape.head_dim:
        raise ForetokenError(NOT_ALIKE.format(lm.name))
    if len(found) < head.num_layers:
        raise ForetokenError(
            f"Model {lm.name} has {len(found)} layers, fewer than the {head.num_layers} of the head: lower --layers."
        )
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
