"""Tiny models and vocabularies, written as GGUF files the way llama.cpp's converter does."""

import json
from collections.abc import Callable
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
LIBRARY_NAMES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "gemma3": gguf.MODEL_ARCH.GEMMA3}


def model(architecture: str, vocab_size: int, tied: bool = True) -> PreTrainedModel:
    """Random weights that bfloat16 holds exactly, so that nothing is rounded on the way."""
    sizes = {**SIZES, "vocab_size": vocab_size, "tie_word_embeddings": tied}
    if architecture == "llama":
        rotary = {"rope_type": "default", "rope_theta": 5000.0}
        config: Any = hf.LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=rotary)
    elif architecture == "qwen2":
        config = hf.Qwen2Config(**sizes)
    else:
        # Seven layers, so that the last but one is global; windows shorter than the texts of the tests.
        sizes |= {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5}
        config = hf.Gemma3TextConfig(**sizes)
    torch.manual_seed(0)
    made = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            values = torch.randn_like(parameter) * 0.15
            # Apart from 0 by more than what is lost as 1 is added in float32 and taken away again.
            parameter.copy_((values + values.sign() * 0.01).to(torch.bfloat16).float())
    return made


def save(
    made: PreTrainedModel,
    architecture: str,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    leave_out: str = "",
    vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
    **more: str,
) -> None:
    """One GGUF file: matrices in `kind`, vectors in float32; `more` are string values of the metadata."""
    config: Any = made.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rotary = config.rope_parameters
    writer.add_rope_freq_base(rotary.get("full_attention", rotary)["rope_theta"])
    if architecture == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    (vocabulary or (sentencepiece if architecture == "gemma3" else byte_level))(writer)
    for key, value in more.items():
        writer.add_string(key, value)
    names = gguf.get_tensor_name_map(LIBRARY_NAMES[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in made.state_dict().items():
        if name == leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy()
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            n = heads[part]
            values = values.reshape(n, 2, len(values) // n // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and part.endswith("norm"):
            values = values + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        values = np.ascontiguousarray(values)
        if values.ndim == 1:
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


PIECES = ["▁t", "he", "at", "▁the", "▁s", "▁sat", "▁o", "▁on"]  # each from two others, best score first
LETTERS = list("▁thesaonmrdcf;,.()xu:in")


def sentencepiece(writer: gguf.GGUFWriter) -> None:
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
    writer.add_add_space_prefix(False)


VOCAB_SIZES = {"llama": 305, "qwen2": 305, "gemma3": 9 + 256 + len(PIECES) + len(LETTERS)}
