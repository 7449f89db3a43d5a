"""The metadata of a GGUF file -> transformers' configuration of the model and of its generation."""

from typing import Any

import numpy as np
from gguf import TokenType
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from foretoken.core.errors import ForetokenError
from foretoken.gguf.architectures import ARCHITECTURES, architecture_of
from foretoken.gguf.reader import Reader

# Tokens that end a text or a turn in the chat formats of these models; llama.cpp stops at them too.
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>")


def gguf_config(reader: Reader) -> PreTrainedConfig:
    """The configuration of the model in the file.

    Raises ForetokenError for an architecture that is not known, a value that is missing, or scaled rotary positions.
    """
    architecture = architecture_of(reader)
    prefix = next(name for name, known in ARCHITECTURES.items() if known is architecture)

    def value(key: str, default: Any = None) -> Any:
        return reader.metadata(f"{prefix}.{key}", default)

    if value("rope.scaling.type", "none") != "none":
        raise ForetokenError(
            f"The GGUF file scales its rotary positions ({value('rope.scaling.type')}), which is not read: take a "
            "model without."
        )
    shapes = {tensor.name: [int(n) for n in reversed(tensor.shape)] for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ForetokenError("The GGUF file has no tensor token_embd.weight: it holds no whole language model.")
    vocab_size, hidden_size = shapes["token_embd.weight"]
    heads = value("attention.head_count")
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": reader.metadata("tokenizer.ggml.bos_token_id"),
        "eos_token_id": reader.metadata("tokenizer.ggml.eos_token_id"),
        "pad_token_id": reader.metadata("tokenizer.ggml.padding_token_id"),
    }
    missing = [name for name, given in options.items() if given is None and not name.endswith("token_id")]
    if missing:
        raise ForetokenError(f"The GGUF file does not tell {', '.join(missing)}: it is not whole, get it again.")
    head_dim = value("attention.key_length", hidden_size // heads)
    if prefix == "gemma3":
        # The file tells neither the pattern of the layers (five local ones, then a global one) nor the local layers'
        # rotary base: both are the same in every model of this family, as is a query scale of the width of a head
        # except in the largest one.
        local = value("rope.freq_base_swa", 10_000.0)
        options |= {
            "head_dim": head_dim,
            "query_pre_attn_scalar": head_dim,
            "sliding_window": value("attention.sliding_window"),
            "rope_parameters": {
                "full_attention": _rotary(value("rope.freq_base", 1_000_000.0)),
                "sliding_attention": _rotary(local),
            },
        }
    else:
        options["rope_parameters"] = _rotary(value("rope.freq_base", 10_000.0))
        if head_dim != hidden_size // heads:
            options["head_dim"] = head_dim
    if prefix == "llama":
        options["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config = AutoConfig.for_model(architecture.model_type, **options)
    config.architectures = [architecture.class_name]
    return config


def gguf_generation_config(reader: Reader) -> GenerationConfig:
    """What ends a text: the file's own end token and every token that ends one in a known chat format."""
    eos = reader.metadata("tokenizer.ggml.eos_token_id")
    tokens: list[str] = reader.metadata("tokenizer.ggml.tokens", [])
    types: list[int] = reader.metadata("tokenizer.ggml.token_type", [])
    control = {
        token: i for i, (token, type_) in enumerate(zip(tokens, types, strict=True)) if type_ == TokenType.CONTROL
    }
    ends = [] if eos is None else [eos]
    ends += [control[name] for name in END_TOKENS if name in control and control[name] != eos]
    return GenerationConfig(
        bos_token_id=reader.metadata("tokenizer.ggml.bos_token_id"),
        eos_token_id=ends or None,
        pad_token_id=reader.metadata("tokenizer.ggml.padding_token_id"),
    )


def _rotary(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": _shortest(base)}


def _shortest(value: float | None) -> float | None:
    """A float32 of the file as the shortest decimal that means it: 1e-05 and not 9.999999747378752e-06."""
    return None if value is None else float(str(np.float32(value)))
