"""What a draft head borrows of its target: sizes, embedding, LM head and rotary angles; all of it frozen."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.models.causal_lm import CausalLM
from foretoken.models.panels import PanelLinear
from foretoken.models.rotary import Rotary, usual


@dataclass(frozen=True)
class TargetParts:
    """See `parts`. intermediate: channels of the MLP. execution: how the target's forwards are run."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    vocab_size: int
    eps: float
    rotary: Rotary
    embedding: nn.Module
    unembedding: nn.Module
    embedding_scale: float
    logit_scale: float
    softcap: float | None
    dtype: torch.dtype
    device: torch.device
    execution: str

    def embed(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        """What the target's first layer reads for a token."""
        return self.embedding(ids) * self.embedding_scale

    def logits(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """The target's logits from states after its final norm."""
        packed = isinstance(self.unembedding, PanelLinear)  # which rounds by itself, and answers in what it is asked in
        return self._scaled(self.unembedding(states if packed else states.to(self.dtype)))

    def logits_of(self, states: Float[Tensor, "... d"], tokens: Int[Tensor, " m"]) -> Float[Tensor, "... m"]:
        """The same for some tokens alone, of a target whose weights are not packed: of use in training."""
        bias = getattr(self.unembedding, "bias", None)
        weight = self.unembedding.get_parameter("weight")[tokens]
        return self._scaled(F.linear(states.to(self.dtype), weight, None if bias is None else bias[tokens]))

    def _scaled(self, out: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        out = out * self.logit_scale
        return out if self.softcap is None else self.softcap * torch.tanh(out / self.softcap)


def parts(lm: CausalLM) -> TargetParts:
    """Read them from the model. Raises ForetokenError for one whose embedding or LM head cannot be found.

    A model without rotary positions gets the usual ones (base 10000), since a head has positions of its own.
    """
    model: Any = lm.model
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
    rotary = getattr(lm.model.base_model, "rotary_emb", None)
    inv_freq = getattr(rotary, "inv_freq", None)
    if inv_freq is None or 2 * len(inv_freq) != dim:
        turned = usual(dim, lm.device)
    else:
        turned = Rotary(inv_freq.float(), float(getattr(rotary, "attention_scaling", 1.0)))
    names = ("intermediate_size", "ffn_dim", "n_inner")
    inner = next((n for n in (getattr(config, name, None) for name in names) if n), 4 * hidden)
    return TargetParts(
        name=lm.name,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=dim,
        intermediate=inner,
        layers=lm.num_layers,
        vocab_size=lm.vocab_size,
        eps=getattr(config, "rms_norm_eps", None) or 1e-6,
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
