"""The expanded model is bigger and has the same function."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import models_zoo
from benchmarks.expand import SIZES, choose_shape, expand
from foretoken.core.errors import ForetokenError
from foretoken.models.hf_model import cache_name

DEMO: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 592, "num_hidden_layers": 12, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def tiny(**changes: Any) -> LlamaForCausalLM:
    settings = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 40, "rms_norm_eps": 1e-5} | changes
    model = models_zoo.tiny("llama", random_weights=True, **settings)
    assert isinstance(model, LlamaForCausalLM)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):  # their initial values would hide mistakes
                parameter.normal_(1.0, 0.3)
            else:
                parameter.normal_(0.0, 0.25)
    return model


@pytest.mark.parametrize("params", [20_000, 200_000, 2_000_000])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1, "head_dim": 8},
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
        {"rms_norm_eps": 0.5},  # an eps that was not scaled would show
    ],
    ids=["plain", "tied", "one kv head", "biases", "large eps"],
)
def test_logits_equal_the_original(params: int, changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    big = expand(model, params)
    assert abs(big.num_parameters() / params - 1) <= 0.1
    assert big.num_parameters() == choose_shape(model.config, params).num_params
    ids = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want, got = model(ids).logits, big(ids).logits
        named = cache_name(type(big))
        past = big(ids[:, :-1], use_cache=True)[named]
        cached = big(ids[:, -1:], **{named: past}).logits
    scale = want.abs().max()
    assert (got - want).abs().max() < 1e-5 * scale
    assert (cached[:, -1] - want[:, -1]).abs().max() < 1e-5 * scale


def test_bfloat16_differs_by_rounding_only() -> None:
    model = tiny().bfloat16()
    big = expand(model, 200_000)
    assert big.dtype == torch.bfloat16
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        want, got = model(ids).logits.float(), big(ids).logits.float()
        exact = model.float()(ids).logits
    assert (got - exact).abs().max() < 2 * (want - exact).abs().max()


def test_every_added_weight_takes_part() -> None:
    """Added projections are random, so that no kernel meets a matrix of zeros but those that write to the stream."""
    big = expand(tiny(), 200_000)
    for name, parameter in big.named_parameters():
        filled = float((parameter != 0).float().mean())
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            assert filled > 0.99, name


def test_seed_decides_the_weights() -> None:
    one, same, other = (expand(tiny(), 60_000, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_tied_embeddings_stay_tied() -> None:
    big = expand(tiny(tie_word_embeddings=True), 60_000)
    assert big.get_parameter("lm_head.weight") is big.get_parameter("model.embed_tokens.weight")


@pytest.mark.parametrize("name", SIZES)
def test_demo_target_reaches_the_named_sizes(name: str) -> None:
    shape = choose_shape(LlamaConfig(**DEMO), SIZES[name])
    assert abs(shape.num_params / SIZES[name] - 1) <= 0.1
    assert shape.hidden % 64 == 0
    assert shape.intermediate % 64 == 0
    assert shape.heads == 3 * shape.kv_heads
    assert 12 <= shape.layers <= 32


def test_refusals() -> None:
    with pytest.raises(ForetokenError, match="GPT2LMHeadModel cannot be expanded"):
        expand(GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)), 100_000)
    with pytest.raises(ForetokenError, match="parameters already"):
        expand(tiny(), 1_000)
