"""Tiny random models and a tokenizer, saved as Hugging Face folders, for tests that need no quality."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|endoftext|>"


def tokenizer(extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Bytes and an end-of-text token, plus whole-word tokens where a test wants another vocabulary."""
    vocab = {symbol: i for i, symbol in enumerate([EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *extra])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, clean_up_tokenization_spaces=False)


def llama(seed: int, vocab: int = 257, hidden: int = 32, layers: int = 2, context: int = 256) -> LlamaForCausalLM:
    """Random weights with a wide output scale, so that distributions are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def perturbed(model: LlamaForCausalLM, amount: float, seed: int) -> LlamaForCausalLM:
    """A drafter that agrees with `model` often, but not always: the same weights with noise."""
    torch.manual_seed(seed)
    copy = LlamaForCausalLM(model.config).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in copy.parameters():
            weight.add_(amount * weight.std() * torch.randn_like(weight))
    return copy


def save(model: LlamaForCausalLM, folder: Path, extra: tuple[str, ...] = ()) -> str:
    model.save_pretrained(folder)
    tokenizer(extra).save_pretrained(folder)
    return str(folder)
