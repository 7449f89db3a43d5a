"""Tiny random models of many families: 2 to 3 layers, 101 tokens, 64 positions; weights large enough that a wrong mask
or a wrong position shows in the logits."""

from functools import cache
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

VOCAB = 101
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GQA = {**SMALL, "num_key_value_heads": 2}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GQA),
    "qwen2": ("Qwen2", GQA),
    "qwen2_sliding": ("Qwen2", {**GQA, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 16}),
    "mistral": ("Mistral", {**GQA, "sliding_window": 9}),
    "gemma2": ("Gemma2", {**GQA, "head_dim": 8, "sliding_window": 9, "layer_types": MIXED}),
    "gemma3": ("Gemma3Text", {**GQA, "head_dim": 8, "sliding_window": 9, "layer_types": MIXED}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoX", SMALL),
    "opt": ("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("Phi", SMALL),
    "starcoder2": ("Starcoder2", GQA),
    "starcoder2_sliding": ("Starcoder2", {**GQA, "sliding_window": 9}),
    "cohere": ("Cohere", {**GQA, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**GQA, "sliding_window": 9, "layer_types": MIXED}),
    "granite": ("Granite", GQA),
}


@cache
def _weights(family: str) -> dict[str, torch.Tensor]:
    return _build(family, "eager").state_dict()


def _build(family: str, attention: str, **changes: Any) -> PreTrainedModel:
    name, arguments = FAMILIES[family]
    config = getattr(hf, f"{name}Config")(**{**arguments, **changes})
    config._attn_implementation = "eager" if name == "Gemma2" else attention  # sdpa has no softcap for the scores
    torch.manual_seed(0)
    kind = {"Gemma3Text": "Gemma3"}.get(name, name)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(hf, kind + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.15)
    return model


def tiny(family: str, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """A fresh model in eval mode, float32, with the same weights on every call."""
    model = _build(family, attention, **changes)
    model.load_state_dict(_weights(family))
    return model
