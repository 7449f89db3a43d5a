"""Forwards that transformers' own modules run, over a slot cache."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.models.cache import SlotCache
from foretoken.models.features import FeatureStore
from foretoken.models.hf_model import HFModel, cache_name
from foretoken.models.layout import Layout
from foretoken.models.panels import PanelLinear

UNMASKED: dict[str, Tensor | None] = {"linear_attention": None, "conv": None}  # types of layers that have no mask


class Modules:
    """The forwards of one model, shared by all batches; its linear layers may be packed."""

    def __init__(self, model: HFModel, layout: Layout) -> None:
        """Keep the model; layout: what `layout.layout` found out about `model`."""
        self.model, self.layout = model, layout
        self.execution = "panels" if any(isinstance(m, PanelLinear) for m in model.modules()) else "modules"

    def open(self, batch: int, slots: int) -> "ModuleSlots":
        """Allocate a slot cache for `batch` rows of `slots` slots each."""
        return ModuleSlots(self, batch, slots)


class ModuleSlots(SlotCache):
    """The slot cache of a batch, and the forward of the whole model."""

    def __init__(self, modules: Modules, batch: int, slots: int) -> None:
        """Allocate the cache; modules: the forwards that read it; batch: rows; slots: per row."""
        super().__init__(modules.layout.planes, batch, slots)
        self._modules = modules

    @torch.inference_mode()
    def __call__(
        self,
        ids: list[list[int]],
        positions: list[list[int]],
        masks: Mapping[str, np.ndarray | None],
        head: bool,
        features: FeatureStore | None = None,
    ) -> Float[Tensor, "b n _"]:
        """Run the model on the nodes whose slots `place` has set, and return their logits [b, n, v].

        ids, positions: token ids and positions of the nodes [b][n].
        masks: per type of layer what is added to the attention scores [b, 1, n, used], None where all slots are seen.
        head: whether the LM head runs. Where it is False, the result is not logits and is not to be used.
        features: where the nodes' hidden states are written; None: they are not kept.
        """
        model = self._modules.model if head else self._modules.model.base_model
        device, dtype = self._modules.model.device, self._modules.model.dtype
        tensors = {
            kind: None if mask is None else torch.from_numpy(mask).to(device=device, dtype=dtype)
            for kind, mask in masks.items()
        }
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(ids, device=device),
            "position_ids": torch.tensor(positions, device=device),
            # A model whose layers are all of one type takes (and some only take) the mask itself.
            "attention_mask": UNMASKED | tensors if len(tensors) > 1 else next(iter(tensors.values())),
            cache_name(type(model)): self,
            "use_cache": True,
        }
        out = model(**inputs, output_hidden_states=features is not None)
        if features is not None:
            features.keep(self.at, [out.hidden_states[layer] for layer in features.distinct])
        return out[0]
