"""The architectures that are read from GGUF files: the names of models and tensors there and in transformers."""

from dataclasses import dataclass

from foretoken.core.errors import ForetokenError
from foretoken.gguf.reader import Reader

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Architecture:
    """How one architecture of a GGUF file differs from the transformers model of the same weights.

    model_type, class_name: transformers' names of the configuration and of the causal language model.
    layer: the modules inside one layer: name in the GGUF file -> name in transformers.
    interleaved: whether the file stores the rows of a query or key head pair by pair (0, h, 1, h + 1, ... of a head
        with 2h rows), since llama.cpp rotates neighbouring rows; transformers rotates row i with row h + i.
    norm_offset: what was added to the norm weights in the file; transformers adds it when the model runs.
    """

    model_type: str
    class_name: str
    layer: dict[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LAYER, interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER | _HEAD_NORMS),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _LAYER
        | _HEAD_NORMS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
    ),
}


def architecture_of(reader: Reader) -> Architecture:
    """Return the architecture that the file in `reader` names. Raises ForetokenError if it is none of ARCHITECTURES."""
    name = reader.metadata("general.architecture")
    if name not in ARCHITECTURES:
        raise ForetokenError(
            f"The GGUF file's architecture is {name}, which is not read: it must be one of {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[name]
