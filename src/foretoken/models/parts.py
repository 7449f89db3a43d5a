"""What a draft head borrows from its target: sizes, embedding, LM head and rotary angles; none of it is trained."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.models.causal_lm import CausalLM
from foretoken.models.panels import PanelLinear
from foretoken.models.rotary import Rotary, rotary_of, usual


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a decoder layer.

    hidden: width of the residual stream.
    heads, kv_heads: numbers of attention heads, and of those that have keys and values of their own.
    head_dim: width of one attention head.
    intermediate: width of the MLP.
    eps: what the norms add to the mean square.
    width: width of what attention reads, which is twice `hidden` in EAGLE-3.
    bias: whether the projections to queries, keys and values have biases.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    width: int
    bias: bool = False

    def config(self) -> dict[str, Any]:
        """Return the entries of config.json for these sizes, by the names that transformers uses."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "rms_norm_eps": self.eps,
        }


@dataclass(frozen=True)
class TargetParts:
    """What a draft head borrows from its target; `parts` returns it.

    name: the target's, for messages.
    shape: the sizes of its decoder layers.
    layers: number of decoder layers.
    vocab_size: v, the columns of the logits.
    rotary: the rotary positions.
    embedding, unembedding: the modules that embed tokens and that are the LM head.
    embedding_scale, logit_scale: factors of what these two put out.
    softcap: logits are bounded to [-softcap, softcap] by a tanh; None: they are not.
    dtype, device: the target's.
    execution: how the target's forwards run, as in `CausalLM.execution`.
    """

    name: str
    shape: LayerShape
    layers: int
    vocab_size: int
    rotary: Rotary
    embedding: nn.Module
    unembedding: nn.Module
    embedding_scale: float
    logit_scale: float
    softcap: float | None
    dtype: torch.dtype
    device: torch.device
    execution: str

    @property
    def hidden(self) -> int:
        """d, the width of the hidden states."""
        return self.shape.hidden

    def embed(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        """Return the input of the target's first layer for the tokens `ids` [...], [..., d]."""
        return self.embedding(ids) * self.embedding_scale

    def logits(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """Return the target's logits [..., v]; states: those after its final norm [..., d]."""
        packed = isinstance(self.unembedding, PanelLinear)  # takes any dtype, rounds by itself, returns the same dtype
        return self._scaled(self.unembedding(states if packed else states.to(self.dtype)))

    def logits_of(self, states: Float[Tensor, "... d"], tokens: Int[Tensor, " m"]) -> Float[Tensor, "... m"]:
        """Return the logits of some tokens alone [..., m], for training; the target's weights must not be packed.

        states: those after the target's final norm [..., d].
        tokens: the ids of m tokens [m].
        """
        bias = getattr(self.unembedding, "bias", None)
        weight = self.unembedding.get_parameter("weight")[tokens]
        return self._scaled(F.linear(states.to(self.dtype), weight, None if bias is None else bias[tokens]))

    def _scaled(self, out: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        out = out * self.logit_scale
        return out if self.softcap is None else self.softcap * torch.tanh(out / self.softcap)


def parts(lm: CausalLM) -> TargetParts:
    """Return what draft heads borrow from the model `lm`.

    A model without rotary positions gets the usual ones (base 10000), since a head has positions of its own.

    Raises ForetokenError for a model whose embedding or LM head cannot be found, or whose embedding has another width
    than its hidden states.
    """
    model: Any = lm.weights
    config: Any = model.config.get_text_config(decoder=True)
    embedding, unembedding = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or unembedding is None:
        raise ForetokenError(f"{type(model).__name__} shows no embedding or no LM head, which draft heads borrow.")
    hidden, heads = lm.hidden_size, config.num_attention_heads
    if embedding.embedding_dim != hidden:
        raise ForetokenError(
            f"{type(model).__name__} embeds tokens in {embedding.embedding_dim} dimensions and has {hidden} hidden "
            "ones: draft heads need them equal."
        )
    dim = getattr(config, "head_dim", None) or hidden // heads
    rotary: Any = getattr(model.base_model, "rotary_emb", None)
    inv_freq = getattr(rotary, "inv_freq", None)
    fits = inv_freq is not None and 2 * len(inv_freq) == dim
    turned = rotary_of(rotary) if fits else usual(dim, lm.device)
    names = ("intermediate_size", "ffn_dim", "n_inner")
    inner = next((n for n in (getattr(config, name, None) for name in names) if n), 4 * hidden)
    return TargetParts(
        name=lm.name,
        shape=LayerShape(
            hidden=hidden,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=dim,
            intermediate=inner,
            eps=getattr(config, "rms_norm_eps", None) or 1e-6,
            width=hidden,
        ),
        layers=lm.num_layers,
        vocab_size=lm.vocab_size,
        rotary=turned,
        embedding=embedding,
        unembedding=unembedding,
        embedding_scale=float(getattr(config, "embedding_multiplier", 1.0)),  # Gemma's embedding scales by itself
        logit_scale=float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", 1.0)),
        softcap=getattr(config, "final_logit_softcapping", None),
        dtype=lm.dtype,
        device=lm.device,
        execution=lm.execution,
    )
