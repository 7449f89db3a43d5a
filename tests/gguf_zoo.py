"""Tiny models and vocabularies, written as GGUF files the way llama.cpp's converter does."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from gguf import TokenType
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedModel

from foretoken.kernel.q4_k import quantise_q4_k

WORDS = "the cat sat on the mat, and the rat sat on that hat; 2024 is not 1999. def f(x): return x\n" * 3
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3moe": {
        "head_dim": 32,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    # Seven layers, so that the last but one is global; windows shorter than the texts of the tests.
    "gemma3": {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5},
    "phi3": {"sliding_window": 5, "pad_token_id": 0},
    # Five layers, of which the fourth does not rotate queries and keys.
    "smollm3": {"num_hidden_layers": 5, "pad_token_id": 0},
    "granite": {
        "residual_multiplier": 0.25,
        "embedding_multiplier": 12.0,
        "logits_scaling": 0.75,
        "attention_multiplier": 0.3,
    },
    "seed_oss": {"head_dim": 32},
    "gemma": {"head_dim": 32},  # its files have no LM head of their own
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "pad_token_id": 0},
}
INTERLEAVED = ("llama", "smollm3", "granite")  # whose files have the rows of query and key heads in another order
ARCHITECTURES = tuple(OWN)
UNTIED = tuple(name for name in OWN if name != "gemma")


def model(architecture: str, vocab_size: int | None = None, tied: bool = True, **more: Any) -> PreTrainedModel:
    """Random weights that bfloat16 holds exactly, so that nothing is rounded on the way. more: of the configuration."""
    sizes = {**SIZES, "vocab_size": vocab_size or VOCAB_SIZES[architecture], "tie_word_embeddings": tied}
    type_ = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}.get(architecture, architecture)
    config = hf.AutoConfig.for_model(type_, **sizes | OWN[architecture] | more)
    torch.manual_seed(0)
    made = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            values = torch.randn_like(parameter) * 0.15
            if architecture == "gemma" and parameter.ndim == 1:  # these norms multiply by 1 more than the others
                values -= 1
            # Apart from 0 by more than what is lost as 1 is added in float32 and taken away again.
            parameter.copy_((values + values.sign() * 0.01).to(torch.bfloat16).float())
    return made


def wide(architecture: str = "llama", tied: bool = True, head_dim: int = 64) -> PreTrainedModel:
    """A model whose rows fill blocks of 256 weights; a Llama's rotary positions are scaled.

    head_dim: of qwen3, qwen3moe, gemma, gemma3 and seed_oss.
    """
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    if architecture in ("qwen3", "qwen3moe", "gemma", "gemma3", "seed_oss"):
        sizes["head_dim"] = head_dim
    if architecture == "qwen3moe":
        sizes["moe_intermediate_size"] = 256
    if architecture == "llama":
        scaled = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0}
        sizes["rope_parameters"] = scaled | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return model(architecture, tied=tied, **sizes)


def save_folder(folder: Path, architecture: str = "llama", dtype: torch.dtype = torch.bfloat16, **how: Any) -> str:
    """A folder of Hugging Face's with the model; how: as for `wide`."""
    torch.nn.Module.to(wide(architecture, **how), dtype).save_pretrained(folder)
    return str(folder)


def save_wide(
    path: Path,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType | Sequence[gguf.GGMLQuantizationType] = gguf.GGMLQuantizationType.Q8_0,
    tied: bool = True,
    head_dim: int = 64,
    **how: Any,
) -> str:
    save(wide(architecture, tied, head_dim), architecture, path, kind, **how)
    return str(path)


def save(
    made: PreTrainedModel,
    architecture: str,
    path: Path,
    kind: gguf.GGMLQuantizationType | Sequence[gguf.GGMLQuantizationType] = gguf.GGMLQuantizationType.F32,
    vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
    embedding: gguf.GGMLQuantizationType | None = None,
    fused: bool = False,
    split: dict[str, Any] | None = None,
    **more: str | float | list[Any],
) -> None:
    """One GGUF file: matrices in `kind`, or in several by turns, vectors in float32; `more` are strings, numbers and
    lists of the metadata, also in place of what stands there.

    embedding: the kind of the embedding, by default as all matrices.
    fused: whether queries, keys and values are one matrix.
    split: how the library cuts the file into parts, whose names it makes of `path`; None: the file is one.
    """
    config: Any = made.config
    writer = gguf.GGUFWriter(path, architecture, **split or {})
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "lfm2":
        writer.add_feed_forward_length(len(made.model.layers[0].feed_forward.w1.weight))
        heads_kv = [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types]
        writer.add_head_count_kv(heads_kv)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rotary = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rotary["rope_theta"])
    if rotary["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rotary["factor"])
    if rotary["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rotary["factor"])
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
    if rotary["rope_type"] == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rotary["attention_factor"])
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rotary[f"{length}_factor"], np.float32))
    if rotary["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rotary, config.hidden_size // config.num_attention_heads))
    if hasattr(config, "head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in ("gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if vocabulary is None:
        vocabulary = {"gemma": sentencepiece, "gemma3": sentencepiece, "phi3": partial(sentencepiece, prefix=True)}.get(
            architecture, byte_level
        )
    vocabulary(writer)
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in more.items():
        writer.kv_data[0].pop(key, None)
        add[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kinds = itertools.cycle(kind if isinstance(kind, Sequence) else [kind])
    state = made.state_dict()

    def ordered(name: str) -> np.ndarray:
        values = state[name].numpy()
        if architecture not in INTERLEAVED or (n := heads.get(name.split(".")[-2])) is None:
            return values
        return values.reshape(n, 2, len(values) // n // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

    for name in state:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = ordered(name)
        if ".experts." in name:
            layer, own = name.split(".")[2], next(kinds)
            halves = {"ffn_down_exps": values}
            if name.endswith("gate_up_proj"):
                halves = dict(zip(("ffn_up_exps", "ffn_gate_exps"), np.split(values, 2, axis=1)[::-1], strict=True))
            for stored, half in halves.items():
                made_blocks = blocks(half.reshape(-1, half.shape[-1]), own).reshape(*half.shape[:2], -1)
                writer.add_tensor(f"blk.{layer}.{stored}.weight", made_blocks, raw_dtype=own)
            continue
        part = name.split(".")[-2]
        if fused and part in ("k_proj", "v_proj"):
            continue
        if architecture in ("gemma", "gemma3") and part.endswith("norm"):
            values = values + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if fused and part == "q_proj":
            values = np.concatenate([ordered(name.replace(part, each)) for each in (part, "k_proj", "v_proj")])
            stored = stored.replace("attn_q", "attn_qkv")
        values = np.ascontiguousarray(values)
        if values.ndim != 2 or name.endswith("mlp.gate.weight"):  # routers and convolutions stay in float32
            writer.add_tensor(stored, values[:, 0] if values.ndim == 3 else values)
        else:
            own = embedding if embedding is not None and name.endswith("embed_tokens.weight") else next(kinds)
            writer.add_tensor(stored, blocks(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The values quantised; blocks of random weights of a kind to which neither the library nor we quantise."""
    if kind == gguf.GGMLQuantizationType.Q4_K:
        return quantise_q4_k(values)
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        count, size = gguf.GGML_QUANT_SIZES[kind]
        generator = np.random.default_rng(len(values))
        made = generator.integers(0, 256, (*values.shape[:-1], values.shape[-1] // count, size), np.uint8)
        # Where the scales of a block stand, as float16, and what they are multiplied with at most; the signs of the
        # smaller parts are among the random bytes.
        at, largest = {
            "Q6_K": ([208], 4096),
            "Q5_K": ([0, 2], 1953),
            "Q2_K": ([80, 82], 45),
            "Q3_K": ([108], 128),
            "IQ4_NL": ([0], 127),
            "IQ4_XS": ([0], 4064),
        }.get(kind.name, ([], 1))
        for place in at:
            scale = np.array(0.6 / largest, np.float16)
            made[..., place : place + 2] = scale[None].view(np.uint8)
        return made.reshape(*values.shape[:-1], -1)


def llama3_factors(rotary: dict[str, Any], width: int) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    factors = []
    for i in range(0, width, 2):
        wave = 2 * math.pi * rotary["rope_theta"] ** (i / width)
        low, high = (rotary["original_max_position_embeddings"] / rotary[f"{x}_freq_factor"] for x in ("low", "high"))
        if wave < high:
            factors.append(1.0)
        elif wave > low:
            factors.append(rotary["factor"])
        else:
            smooth = (rotary["original_max_position_embeddings"] / wave - rotary["low_freq_factor"]) / (
                rotary["high_freq_factor"] - rotary["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rotary["factor"] + smooth))
    return np.array(factors, np.float32)


def byte_level(writer: gguf.GGUFWriter, words: str = "smollm") -> None:
    """Byte-level BPE with special tokens, one token that is always whole, and one that only fills the matrix."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator([WORDS], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    pairs = json.loads(trained.to_str())["model"]["merges"]
    vocabulary = trained.get_vocab()
    tokens = [*CONTROL, *sorted(vocabulary, key=lambda token: vocabulary[token]), "<think>", "[PAD0]"]
    types = [TokenType.CONTROL] * len(CONTROL) + [TokenType.NORMAL] * len(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list(tokens)
    writer.add_token_types([*types, TokenType.USER_DEFINED, TokenType.UNUSED])
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if words not in ("llama-bpe", "smaug-bpe", "tekken", "lfm2"):
        writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


PIECES = ["▁t", "he", "at", "▁the", "▁s", "▁sat", "▁o", "▁on"]  # each from two others, best score first
LETTERS = list("▁thesaonmrdcf;,.()xu:in")


def sentencepiece(writer: gguf.GGUFWriter, prefix: bool = False) -> None:
    """SentencePiece's BPE with bytes, and runs of spaces and line ends that are always whole, as Gemma has them."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"]
    whole = ["\n", "\n\n", "  ", "   "]
    raw = [f"<0x{i:02X}>" for i in range(256)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*control, *whole, *raw, *PIECES, *LETTERS])
    scores = [-1000.0] * 9 + [0.0] * 256 + [-float(i) for i in range(len(PIECES) + len(LETTERS))]
    writer.add_token_scores(scores)
    types = [TokenType.CONTROL] * 5 + [TokenType.USER_DEFINED] * 4 + [TokenType.BYTE] * 256
    writer.add_token_types(types + [TokenType.NORMAL] * (len(PIECES) + len(LETTERS)))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(prefix)


SENTENCEPIECE = ("gemma", "gemma3", "phi3")
VOCAB_SIZES = {name: 9 + 256 + len(PIECES) + len(LETTERS) if name in SENTENCEPIECE else 305 for name in OWN}
