"""Multi-token prediction: some models are published with a layer that predicts the token after the next one.

The layer was trained together with its model, and reads the model's final states. transformers reads it from the
model's own checkpoint, for architectures that transformers supports. Where there are several such layers, only the
first one drafts, level after level on its own states.
"""

from typing import Any, no_type_check

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_layers import MtpModel

from foretoken.core.errors import ForetokenError
from foretoken.core.making import making
from foretoken.heads.serial import Serial
from foretoken.models.causal_lm import CausalLM
from foretoken.models.hf_model import cache_name
from foretoken.models.layout import FULL, SLIDING, planes_kept, states_kept
from foretoken.models.parts import parts


class Mtp(Serial):
    """A decoder layer of the target's own kind on Linear(norm(embedding), norm(state)), followed by a norm.

    Source: DeepSeek-AI 2024, DeepSeek-V3 technical report, equations 21 to 23.
    """

    kind = "mtp"

    def __init__(self, target: CausalLM, model: MtpModel) -> None:
        """Take the first layer of `model`; target: the model that drafts are for; model: its prediction layers."""
        super().__init__(parts(target))
        config: Any = model.config
        self.layer = model.layers[0]
        self.after = model.shared_post_norm if model.use_shared_post_norm else nn.Identity()
        for own in (self.layer, self.after):  # all else in `model` belongs to the target
            own.to(target.device, target.dtype).requires_grad_(False).eval()
        self.width = config.hidden_size
        sees = (getattr(config, "layer_types", None) or [FULL])[0]
        self.window = config.sliding_window if sees == SLIDING else None
        self._turn = model.rotary_emb
        self._about = {"layer_type": sees} if model.has_per_layer_rope else {}
        self.planes = self._planes()

    @no_type_check
    def made(self, embedded, states, positions, cache, mask):
        states = states.to(self.target.dtype)
        angles = None if self._turn is None else self._turn(states, position_ids=positions + 1, **self._about)
        made = self.layer(
            embedded.to(states.dtype),
            states,
            position_embeddings=angles,
            attention_mask=mask,
            position_ids=positions + 1,  # of the tokens, as it was trained
            **{cache_name(type(self.layer)): cache},
        )
        return self.after(made)

    @torch.inference_mode()
    def _planes(self) -> Any:
        """Return the shapes of the keys and values that the layer keeps per token, found by running it on one token."""
        cache, device = DynamicCache(), self.target.device
        states = torch.zeros(1, 1, self.width, dtype=self.target.dtype, device=device)
        self.made(states, states, torch.zeros(1, 1, dtype=torch.int64, device=device), cache, None)
        kind = f"The layer of multi-token prediction of {self.target.name}"
        if states_kept(cache.layers[0], 0):
            raise ForetokenError(f"{kind} keeps recurrent states, which is not supported.")
        return [planes_kept(cache.layers[0], kind)]


def own_mtp(target: CausalLM) -> Mtp:
    """Read the layer of multi-token prediction from the checkpoint of `target`, and return it as a head, frozen.

    Raises ForetokenError where there is none, or transformers cannot read it.
    """
    config: Any = target.weights.config.get_text_config(decoder=True)
    if not getattr(config, "num_mtp_layers", None):
        raise ForetokenError(
            f"Drafter mtp is a layer that a model is published with, and the configuration of {target.name} names none "
            "that transformers reads: choose drafter auto, which fits every model."
        )
    try:
        with making:
            own = MtpModel.from_pretrained(target.model, device_map={"": target.device})
        return Mtp(target, own)
    except ForetokenError:
        raise
    except Exception as error:  # checkpoints fail in as many ways as there are formats
        why = " ".join(str(error).split()) or type(error).__name__
        raise ForetokenError(f"Cannot load the layer of multi-token prediction of {target.name}: {why}") from error
