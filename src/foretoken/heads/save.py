"""A head to a folder in its published layout."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foretoken.core.files import write
from foretoken.heads.flat import Medusa
from foretoken.heads.layout import FILES, published
from foretoken.heads.make import Head
from foretoken.heads.origin import origin
from foretoken.heads.serial import Eagle3


def save_head(head: Head, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head in its published layout, as safetensors, beside a config.json: its scale, its shape, its target."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = head.state_dict()
    if isinstance(head, Eagle3) and head.feature_sizes is not None:
        state["fc.weight"] = state["fc.weight"] / head.feature_sizes
    weights = {
        published(head.kind, key): (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for key, value in state.items()
    }
    name = {"medusa": "medusa_lm_head.safetensors", "hydra": "hydra_lm_head.safetensors"}.get(head.kind, FILES[0])
    config: dict[str, Any] = {
        "foretoken_head": head.kind,
        "feature_scale": head.feature_scale,
        "vocab_size": head.target.vocab_size,
        "hidden_size": head.target.hidden,
        "target": origin(head.target),
    }
    if not isinstance(head, Medusa):
        shape = head.shape
        config |= {
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.intermediate,
            "rms_norm_eps": shape.eps,
        }
    if isinstance(head, Eagle3):
        config |= {
            "eagle_aux_hidden_state_layer_ids": list(head.feature_layers),
            "draft_vocab_size": head.lm_head.out_features,
            "norm_before_residual": head.midlayer.norm_before_residual,
            "norm_output": head.norm_output,
        }
    write(folder / name, lambda path: save_file(weights, path))
    write(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))
