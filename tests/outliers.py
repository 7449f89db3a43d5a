"""Tiny Llamas with activations like those of real models: channels in the hundreds, and a token that is a sink."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from foretoken.models.probe import probe_tokens
from models_zoo import tiny

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def with_outliers(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Change a Llama in place. Some channels of the residual stream and of the norms are up to a hundred times as large
    as the others, and one token, the first of the probe's, has an embedding that all later ones attend to."""
    inner: Any = model.model
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        inner.embed_tokens.weight[:, 3] *= 100
        inner.embed_tokens.weight[probe_tokens(model)[0]] *= 100
        for layer in inner.layers:
            layer.input_layernorm.weight[3] = 4.0
            layer.post_attention_layernorm.weight[5] = 50.0
            layer.mlp.down_proj.weight[7] *= 30
        inner.norm.weight.uniform_(0.5, 30.0, generator=generator)
    return nn.Module.to(model, dtype)


def outlier_llama(dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    return with_outliers(tiny("llama", random_weights=True, **{"head_dim": 16, **changes}), dtype)
