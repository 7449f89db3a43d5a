"""Models that cannot be kept in slots are refused when they are built, and the message names what was found."""

from typing import Any

import pytest
import torch
import transformers as hf

import foretoken
from foretoken.core.errors import ForetokenError
from foretoken.models.causal_lm import CausalLM
from foretoken.models.panels import pack
from foretoken.models.static import StaticForward
from models_zoo import tiny
from raising import raising

SMALL: dict[str, Any] = {"vocab_size": 101, "hidden_size": 32}
SIZES = {**SMALL, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GEMMA = {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16}
LLAMA4 = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2}
JAMBA = {**SIZES, "num_key_value_heads": 2, "num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2}
INKLING = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 4, "n_routed_experts": 4}
T5 = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
LOCAL = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}


def build(name: str, **arguments: Any) -> hf.PreTrainedModel:
    kind, head = name.split("-")
    torch.manual_seed(0)
    config = f"{kind}TextConfig" if kind in ("Llama4", "Inkling") else f"{kind}Config"
    return getattr(hf, kind + head)(getattr(hf, config)(**arguments)).eval()


@pytest.mark.parametrize(
    ("name", "arguments", "found"),
    [
        ("Mamba-ForCausalLM", {**SMALL, "num_hidden_layers": 2, "state_size": 4}, "Mamba"),
        ("Rwkv-ForCausalLM", {**SMALL, "num_hidden_layers": 2, "context_length": 64}, "Rwkv"),
        ("RecurrentGemma-ForCausalLM", {**SIZES, **GEMMA}, "RecurrentGemma"),
        ("Jamba-ForCausalLM", JAMBA, "Jamba.* reads several tokens behind a text without its recurrent states"),
        ("Llama4-ForCausalLM", {**LLAMA4, "layer_types": None}, "Llama4.*chunked_attention layers, .* token tree"),
        ("Llama4-ForCausalLM", {**LLAMA4, "layer_types": ["full_attention"] * 2}, "Llama4.*slots"),
        ("Inkling-ForCausalLM", INKLING, "Inkling.* distance of slots"),
        ("MegatronBert-ForCausalLM", {**SIZES, "is_decoder": True}, "MegatronBert.* EncoderDecoderCache"),
        ("Bloom-ForCausalLM", {**SMALL, "n_layer": 2, "n_head": 4}, "Bloom.*position_ids"),
        ("Falcon-ForCausalLM", {**SIZES, "alibi": True}, "Falcon.*ALiBi"),
        ("GPTNeo-ForCausalLM", {**SMALL, **LOCAL}, "GPTNeo.*local"),
        ("T5-ForConditionalGeneration", T5, "T5.*encoder-decoder"),
    ],
)
def test_unkeepable(name: str, arguments: dict[str, Any], found: str) -> None:
    with pytest.raises(ForetokenError, match=found):
        CausalLM(build(name, **arguments))


LAYERS = {"num_local_experts": 4, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 2}


ANOTHER = r"\): choose a model of another architecture\."
OFF = r"\): load it with compile off, or choose a model of another architecture\."


@pytest.mark.parametrize("packed", [False, True])
def test_a_forward_that_raises(packed: bool) -> None:
    """MiniMax takes no cache but its own; its sentence names the class, the error and what to do."""
    model = build("MiniMax-ForCausalLM", **SIZES, **LAYERS)
    if packed:
        pack(model)
    with pytest.raises(ForetokenError, match=r"^MiniMaxForCausalLM fails .*cache of its own.*" + ANOTHER):
        CausalLM(model)


@pytest.mark.parametrize(("packed", "advice"), [(False, ANOTHER), (True, OFF)])
def test_a_first_forward_that_raises(packed: bool, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without packed layers it is the one that it would be with compile off."""
    model = tiny("phi")
    if packed:
        pack(model)
    monkeypatch.setattr(model.lm_head, "forward", raising(AttributeError("no weight")))
    with pytest.raises(ForetokenError, match=r"^PhiForCausalLM fails .*AttributeError: no weight" + advice):
        CausalLM(model)


def test_a_forward_of_fixed_shapes_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StaticForward, "plain", raising(IndexError("no slot")))
    with pytest.raises(ForetokenError, match=r"^PhiForCausalLM fails .*IndexError: no slot" + OFF):
        CausalLM(tiny("phi"), traced=True)


@pytest.mark.parametrize("shortage", [MemoryError("1 bytes"), RuntimeError("alloc_cpu.cpp: can't allocate memory")])
def test_a_shortage_of_memory_is_no_fault_of_the_model(shortage: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2")
    monkeypatch.setattr(model.lm_head, "forward", raising(shortage))
    with pytest.raises(type(shortage), match=str(shortage)):
        CausalLM(model)


def test_training_mode() -> None:
    with pytest.raises(ForetokenError, match=r"model\.eval"):
        CausalLM(tiny("llama").train())


class Wrapper(torch.nn.Module):
    """Stands for PeftModel and DataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("llama")


@pytest.mark.usefixtures("unchecked")
def test_a_wrapper_is_no_model() -> None:
    for arguments in ({"target": Wrapper()}, {"target": tiny("llama"), "drafter": Wrapper()}):
        with pytest.raises(ForetokenError, match=r"^Wrapper is no transformers model: .* get_base_model\(\)"):
            foretoken.load(**arguments)


@pytest.mark.parametrize("name", ["Llama-Model", "Llama-ForSequenceClassification"])
def test_a_model_without_an_lm_head(name: str) -> None:
    with pytest.raises(ForetokenError, match="gives no logits per token: load the model by AutoModelForCausalLM"):
        CausalLM(build(name, **SIZES, pad_token_id=0))


def test_attention_without_masks() -> None:
    model = tiny("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ForetokenError, match="flex_attention"):
        CausalLM(model)
