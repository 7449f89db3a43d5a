"""Models with experts in the kernel: the logits of transformers, the same bits however many nodes share a forward, and
the same greedy text in every way."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import foretoken
import gguf_zoo
from foretoken.draft.own import OwnDrafter
from foretoken.kernel import model as kernel_model
from foretoken.models.causal_lm import CausalLM
from foretoken.models.experts import PanelMixture
from foretoken.models.llama_kernel import LlamaKernel, llama_kernel
from foretoken.models.load import load_model
from foretoken.models.packed import DequantisedWarning, share_read
from foretoken.models.panels import PackedLinear, pack
from foretoken.models.quantised import pack_quantised
from models_zoo import TOLERANCE, VOCAB, tiny
from same_bits import LOADED, TEXT, TEXTS, check_bits, check_greedy_texts, scores
from tiny import tokenizer

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_experts_per_tok": 3}
QWEN = {**SIZES, "moe_intermediate_size": 64, "num_experts": 8}
OTHERS = {**SIZES, "num_local_experts": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "shares as they are": ("qwen3_moe", {**QWEN, "norm_topk_prob": False}),
    "normed shares": ("qwen3_moe", {**QWEN, "norm_topk_prob": True}),
    "every other layer": ("qwen3_moe", {**QWEN, "decoder_sparse_step": 2}),
    "all but the first layer": ("qwen3_moe", {**QWEN, "mlp_only_layers": [0], "intermediate_size": 72}),
    "more experts than a panel has columns": ("qwen3_moe", {**QWEN, "num_experts": 70, "num_experts_per_tok": 8}),
    "every expert": ("qwen3_moe", {**QWEN, "num_experts": 3}),
    "mixtral": ("mixtral", OTHERS),
    "granite": ("granite_moe", OTHERS),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights, so large that a wrong expert shows."""
    family, changes = MODELS[name]
    model = tiny(family, random_weights=True, **changes)
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.15)
    return nn.Module.to(model, dtype)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    model = made(name)
    with torch.inference_mode():
        want = model(torch.tensor([TEXT])).logits[0]
    pack(model)
    lm = CausalLM(model)
    assert lm.execution == "kernel"
    with torch.inference_mode():
        panels = model(torch.tensor([TEXT])).logits[0]
    for got in (scores(lm, 64), panels):
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("form", ["whole", "bfloat16", "q4_0", "q8_0"])
def test_a_node_has_the_same_bits_alone_and_among_others(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("normed shares", torch.bfloat16 if form == "bfloat16" else torch.float32)
    if form.startswith("q"):
        pack_quantised(model, form)
    pack(model)
    lm = CausalLM(model)
    assert isinstance(lm.backend, LlamaKernel)
    check_bits(lm, monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    made("normed shares", torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("options", LOADED, ids=str)
def test_greedy_text_is_that_of_plain_decoding_bit_for_bit(folder: Path, options: dict[str, Any]) -> None:
    check_greedy_texts(folder, options)


def test_drafter_self_has_the_experts_in_4_bits_and_drafts_well(folder: Path) -> None:
    engine = foretoken.load(folder, tokenizer=tokenizer(), drafter="self", tree="chain:4")
    assert isinstance(engine.drafter, OwnDrafter)
    drafter = engine.drafter.lm
    assert isinstance(drafter, CausalLM)
    mixtures = [module for module in drafter.model.modules() if isinstance(module, PanelMixture)]
    kinds = {getattr(stack, "kind", None) for each in mixtures for stack in (each.gate_up_proj, each.down_proj)}
    assert len(mixtures) == 3
    assert kinds == {"q4_1"}  # of rows that fill no block of q4_k
    result = engine.generate(TEXTS[1], max_new_tokens=40, temperature=0.0)
    assert result.stats.num_accepted > result.stats.num_drafted / 2


@pytest.mark.usefixtures("home")
def test_quantised_experts_are_those_of_the_weights_rounded(tmp_path: Path) -> None:
    """At the first start, and from what it kept at the next. In a few rows rounding changes who is chosen."""
    model, ids = made("normed shares"), torch.tensor([TEXT])
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        want = model(ids).logits[0]
    for _ in range(2):
        lm = load_model(str(tmp_path), CPU, quantise="q8_0")
        assert lm.execution == "kernel"
        stacks = [stack for each in lm.model.modules() if isinstance(each, PanelMixture) for stack in each.children()]
        assert sum(isinstance(stack, PackedLinear) for stack in stacks) == 6
        got = scores(lm, 64)
        with torch.inference_mode():
            panels = lm.model(ids).logits[0]
        for other, allowed in ((panels, 1e-5), (want, 0.05)):
            assert (got - other).square().mean(1).median() < allowed**2 * want.var()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {**QWEN, "moe_intermediate_size": 32}),  # an expert's gate would begin in the middle of a panel
        ("qwen3_moe", {**QWEN, "hidden_size": 96}),
        (
            "granite_experts",
            {"hidden_size": 64, "head_dim": 16, "num_local_experts": 4, "shared_intermediate_size": 64},
        ),
    ],
)
def test_other_sizes_and_experts_run_in_transformers_modules(family: str, changes: dict[str, Any]) -> None:
    model = tiny(family, random_weights=True, **changes)
    with torch.inference_mode():
        want = model(torch.tensor([TEXT])).logits[0]
    pack(model)
    assert llama_kernel(model) is None
    lm = CausalLM(model)
    assert lm.execution == "panels"
    torch.testing.assert_close(scores(lm, 64), want, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.usefixtures("home")
def test_gguf_files_whose_experts_do_not_fill_panels(tmp_path: Path) -> None:
    """Either both stacks of a layer are packed or none: here the down matrices would begin between panels."""
    path, ids = tmp_path / "model.gguf", torch.tensor([TEXT])
    gguf_zoo.save(gguf_zoo.model("qwen3moe", hidden_size=96), "qwen3moe", path, gguf.GGMLQuantizationType.Q8_0)
    with torch.inference_mode():
        want = load_model(str(path), CPU, torch.float32, compile="off").model(ids).logits[0]
    with pytest.warns(DequantisedWarning, match="type q8_0: .*experts"):
        lm = load_model(str(path), CPU)
    assert lm.execution == "panels"
    assert (scores(lm, 64) - want).square().mean(1).median() < 0.03**2 * want.var()


@pytest.mark.usefixtures("home")
def test_gguf_files_in_bfloat16_run_as_folders_do(tmp_path: Path) -> None:
    """Although their routers are in float32."""
    path = gguf_zoo.save_wide(tmp_path / "model.gguf", "qwen3moe", gguf.GGMLQuantizationType.BF16)
    file, folder = load_model(path, CPU), load_model(path, CPU, torch.bfloat16)
    assert (file.dtype, file.execution) == (torch.bfloat16, "kernel")
    assert torch.equal(scores(file, 64), scores(folder, 64))


def test_a_row_that_is_not_finite_chooses_distinct_experts() -> None:
    model = made("shares as they are")
    model.get_input_embeddings().weight.data[5] = float("nan")
    pack(model)
    lm = CausalLM(model)
    rows = lm.open(1, 16)
    rows.join()
    (logits,) = rows.score([[5] * 9], [[-1] * 9])
    assert logits.shape == (9, VOCAB)
    assert logits.isnan().all()


def test_models_without_experts_do_without_their_code() -> None:
    assert not any(name.startswith("foretoken.kernel.experts.") for name in kernel_model.score._reached)


def test_bytes_say_nothing_of_the_time_of_experts_in_panels() -> None:
    model = made("normed shares")
    pack(model)
    lm = CausalLM(model)
    assert share_read(lm, lm) == 0
