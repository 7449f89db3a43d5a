"""Turn the metadata of a GGUF file into transformers' configurations of the model and of its generation."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedConfig

from foretoken.core.errors import ForetokenError
from foretoken.gguf.reader import Reader
from foretoken.gguf.tensors import FREQUENCIES, FUSED, LONG, OF_ROTARY, SHORT, architecture_of
from foretoken.gguf.tokenizer import Vocabulary, vocabulary_of

ROTARY_BASES = {"gemma3": 1_000_000.0}  # by architecture, for files that lack it
# Entries of transformers' `rope_parameters`, by their keys in the file behind `rope.scaling.`.
YARN = {  # as llama.cpp's converter writes transformers' numbers
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
USUAL_YARN = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}  # numbers without a place there
LONGROPE = {"original_max_position_embeddings": "original_context_length", "attention_factor": "attn_factor"}
GRANITE = {  # its configuration's numbers, by their keys in the file
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
EXPERTS = {  # likewise of Qwen3-MoE
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
LAYERS_27B = 62  # by which llama.cpp too tells Gemma 3's largest model, whose queries have a scale of their own


def gguf_config(reader: Reader) -> PreTrainedConfig:
    """Return the configuration of the model in the file of `reader`.

    Raises ForetokenError for an architecture that is not known, a value that is missing, a model that reads texts in
    both directions, and for rotary positions of a kind that is not known, or none in a model of Granite's.
    """
    from transformers import AutoConfig  # takes a second

    architecture = architecture_of(reader)
    prefix, value = reader.metadata("general.architecture"), reader.of_model
    shapes = {tensor.name: [int(n) for n in reversed(tensor.shape)] for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ForetokenError("The GGUF file has no tensor token_embd.weight: it holds no whole language model.")
    if value("attention.causal") is False:
        raise ForetokenError("The model in the GGUF file reads texts in both directions: it makes no text.")
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
        "norm_eps" if prefix == "lfm2" else "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in shapes,
        **_named_ids(vocabulary_of(reader), "bos", "eos", "padding"),
    }
    if prefix == "qwen3moe":
        options |= {name: value(key) for name, key in EXPERTS.items()} | {"norm_topk_prob": True}  # as llama.cpp has it
    if prefix == "lfm2":
        per_layer = reader.metadata("lfm2.attention.head_count_kv")  # 0 in those with a short convolution
        if isinstance(per_layer, list):
            options["layer_types"] = ["full_attention" if count else "conv" for count in per_layer]
        options |= {"conv_L_cache": value("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
    missing = [name for name, given in options.items() if given is None and not name.endswith("token_id")]
    if missing:
        raise ForetokenError(f"The GGUF file does not tell {', '.join(missing)}: it is not whole, get it again.")
    head_dim = value("attention.key_length", hidden_size // heads)
    if prefix in ("qwen3", "qwen3moe", "gemma", "gemma3", "seed_oss") or head_dim != hidden_size // heads:
        options["head_dim"] = head_dim
    rotary, window = _rotary(reader, prefix, head_dim), value("attention.sliding_window") or None  # 0 stands for none
    if prefix == "gemma3":
        # Most files have neither the pattern of the layers (five local ones, then a global one) nor the local layers'
        # rotary base: both are the same in every published model of this family. No file has the query scale.
        layers, pattern = options["num_hidden_layers"], reader.metadata("gemma3.attention.sliding_window_pattern", 6)
        if window is None:  # every layer is global; transformers wants a number all the same
            pattern, window = 1, options["max_position_embeddings"]
        if isinstance(pattern, list):  # per layer, whether it is local
            is_global = [not local for local in pattern]
        else:  # every so many layers one is global; 0: none is
            is_global = [pattern > 0 and i % pattern == pattern - 1 for i in range(layers)]
        options["layer_types"] = ["full_attention" if it else "sliding_attention" for it in is_global]
        options["query_pre_attn_scalar"] = hidden_size // heads if layers == LAYERS_27B else head_dim
        options["final_logit_softcapping"] = _shortest(value("final_logit_softcapping")) or None
        local = {"rope_type": "default", "rope_theta": _shortest(value("rope.freq_base_swa", 10_000.0))}
        rotary = {"full_attention": rotary, "sliding_attention": local}
    if prefix in ("gemma3", "phi3"):
        options["sliding_window"] = window
    if prefix == "lfm2" and window is not None:
        raise ForetokenError("The LFM2 model in the GGUF file has sliding windows, which is not supported.")
    if prefix == "phi3" and rotary["rope_type"] == "longrope":  # which it takes before that of rope_parameters
        options["original_max_position_embeddings"] = rotary["original_max_position_embeddings"]
    options["rope_parameters"] = rotary
    if prefix == "granite":
        if not value("rope.scaling.finetuned", True):  # by which llama.cpp too tells such models
            raise ForetokenError("The model in the GGUF file rotates no queries and keys, which is not supported.")
        usual = {"attention_multiplier": head_dim**-0.5}  # where the number is missing or 0
        options |= {name: _shortest(value(key)) or usual.get(name, 1.0) for name, key in GRANITE.items()}
    if prefix in ("llama", "smollm3", "granite"):
        options["attention_bias"] = "blk.0.attn_output.bias" in shapes
        options["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    if prefix == "seed_oss":
        options["attention_bias"] = any(f"blk.0.{part}.bias" in shapes for part in ("attn_q", FUSED))
    config = AutoConfig.for_model(architecture.model_type, **options)
    config.architectures = [architecture.class_name]
    return config


def gguf_generation_config(reader: Reader) -> GenerationConfig:
    """Return the generation configuration of the model in the file of `reader`.

    A text ends at the file's own tokens for the end of a text, a turn and a message, and at every token that ends one
    in a known chat format.
    """
    vocabulary = vocabulary_of(reader)
    return GenerationConfig(eos_token_id=vocabulary.ends or None, **_named_ids(vocabulary, "bos", "padding"))


def _named_ids(vocabulary: Vocabulary, *names: str) -> dict[str, int | None]:
    """Return ids of special tokens under transformers' names; names: those of Vocabulary.special."""
    return {f"{'pad' if name == 'padding' else name}_token_id": vocabulary.special.get(name) for name in names}


def _rotary(reader: Reader, prefix: str, head_dim: int) -> dict[str, Any]:
    """Return transformers' `rope_parameters` of the model; where there are two sorts of layers, of the global ones.

    Raises ForetokenError for a scaling that is not known.
    """
    base = reader.of_model("rope.freq_base", ROTARY_BASES.get(prefix, 10_000.0))
    rotary = {"rope_type": "default", "rope_theta": _shortest(base)}
    scaling, width = reader.of_model("rope.scaling.type", "linear"), reader.of_model("rope.dimension_count", head_dim)
    factor = _shortest(reader.of_model("rope.scaling.factor", reader.of_model("rope.scale_linear")))
    factors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors if tensor.name in OF_ROTARY}
    if any(tensor.name.startswith("rope_factors_") for tensor in reader.tensors):
        scaling = "longrope"
    if scaling == "longrope" and factors.keys() >= {LONG, SHORT}:
        divisors = {"long_factor": LONG, "short_factor": SHORT}
        rotary |= {"rope_type": scaling, **{name: [*map(_shortest, factors[key])] for name, key in divisors.items()}}
        rotary |= _of_scaling(reader, LONGROPE)
    elif scaling in ("linear", "yarn"):  # linear is, as in llama.cpp, what files without a type have
        if factor not in (None, 0, 1):
            for key, usual in USUAL_YARN.items() if scaling == "yarn" else ():
                if reader.of_model(f"rope.scaling.{key}", usual) not in (-1, 0, usual):  # as llama.cpp says unset
                    raise ForetokenError(f"The GGUF file has its own {key} for yarn, which is not supported.")
            rotary |= {"rope_type": scaling, "factor": factor}
            rotary |= _of_scaling(reader, YARN) if scaling == "yarn" else {}
    elif scaling != "none":
        raise ForetokenError(
            f"The GGUF file scales its rotary positions ({scaling}), which is not supported: take a model without."
        )
    if width != head_dim:
        if prefix != "phi3":
            raise ForetokenError(
                f"The GGUF file rotates {width} of {head_dim} channels of a head, which is not supported."
            )
        rotary["partial_rotary_factor"] = width / head_dim
    if FREQUENCIES in factors:
        rotary |= _llama3(factors[FREQUENCIES], rotary["rope_theta"], width)
    return rotary


def _of_scaling(reader: Reader, names: dict[str, str]) -> dict[str, Any]:
    """Return those entries of transformers' `rope_parameters` that the file has; names: YARN or LONGROPE.

    A file that does not name the context before scaling has that of the whole model, as in llama.cpp.
    """
    values = {name: reader.of_model(f"rope.scaling.{key}") for name, key in names.items()}
    found = {name: value if isinstance(value, int) else _shortest(value) for name, value in values.items() if value}
    return {"original_max_position_embeddings": reader.of_model("context_length")} | found


def _llama3(factors: NDArray[np.float32], base: float, width: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling of rotary positions, of which the file has only the result.

    The lowest frequencies are divided by the whole factor. The context before scaling follows from those divided by a
    part of it; the rest of the rule is the same in every model of this family.

    factors: what each frequency is divided by [width / 2]; width: the number of a head's channels that are rotated.

    Raises ForetokenError for divisors that do not follow from that rule.
    """
    factor, low, high, context = float(factors.max()), 1.0, 4.0, 8192
    waves = 2 * np.pi * base ** (np.arange(0, width, 2) / width)
    between = (factors > 1) & (factors < factor)
    if between.any():
        shares = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        context = round(float(np.median(waves[between] * (low + shares * (high - low)))))
    smooth = np.clip((context / waves - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise ForetokenError(
            f"The GGUF file scales its rotary positions ({FREQUENCIES}) otherwise than Llama 3, which is not "
            "supported: take a model without."
        )
    return {
        "rope_type": "llama3",
        "factor": _shortest(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _shortest(value: float | None) -> float | None:
    """Return a float32 of the file as the shortest decimal that stands for it: 1e-05, not 9.999999747378752e-06."""
    return None if value is None else float(str(np.float32(value)))
