"""Models in the kernel whose layers are not all Llama's, with short convolutions or with experts: the logits of
transformers, the same bits however many nodes share a forward, and the same greedy text in every way."""

from itertools import product
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import foretoken
import gguf_zoo
from foretoken.core.tree import path_to
from foretoken.draft.own import OwnDrafter
from foretoken.kernel import model as kernel_model
from foretoken.models.causal_lm import CausalLM
from foretoken.models.experts import PanelMixture
from foretoken.models.features import FINAL
from foretoken.models.fused_rows import GuestRows
from foretoken.models.llama_kernel import KernelRows, LlamaKernel, llama_kernel
from foretoken.models.load import load_model
from foretoken.models.packed import DequantisedWarning, share_read
from foretoken.models.panels import PackedLinear, pack
from foretoken.models.quantised import pack_quantised
from foretoken.models.rows import Rows
from models_zoo import TOLERANCE, VOCAB, check_random_steps, tiny
from same_bits import LOADED, TEXT, TEXTS, check_bits, check_greedy_texts, scores
from thinning import one_in
from tiny import tokenizer
from watching import calls_of

CPU = torch.device("cpu")
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "as published": {},
    "attention first": {"layer_types": ["full_attention", "conv", "conv"]},
    "a window of 2": {"conv_L_cache": 2},
    "a window of 5": {"conv_L_cache": 5},
    "an LM head of its own": {"tie_word_embeddings": False},
    "more channels than the heads have": {"head_dim": 32, "hidden_size": 192, "num_attention_heads": 2},
    "attention alone": {"layer_types": ["full_attention"] * 3},
}
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_experts_per_tok": 3}
QWEN = {**SIZES, "moe_intermediate_size": 64, "num_experts": 8}
OTHERS = {**SIZES, "num_local_experts": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("lfm2", {"hidden_size": 64, **changes}) for name, changes in CONVOLUTIONS.items()},
    "shares as they are": ("qwen3_moe", {**QWEN, "norm_topk_prob": False}),
    "normed shares": ("qwen3_moe", {**QWEN, "norm_topk_prob": True}),
    "every other layer": ("qwen3_moe", {**QWEN, "decoder_sparse_step": 2}),
    "all but the first layer": ("qwen3_moe", {**QWEN, "mlp_only_layers": [0], "intermediate_size": 72}),
    "more experts than a panel has columns": ("qwen3_moe", {**QWEN, "num_experts": 70, "num_experts_per_tok": 8}),
    "every expert": ("qwen3_moe", {**QWEN, "num_experts": 3}),
    "mixtral": ("mixtral", OTHERS),
    "granite": ("granite_moe", OTHERS),
}
TREE = [-1, 0, 0, 2, -1, 1, 3, 4, 0, 6]
FORMS = ["whole", "bfloat16", "q4_0", "q8_0"]
KEPT = ("as published", "normed shares")  # which are kept in folders


def made(name: str = "as published", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights, so large that a wrong neighbour or a wrong expert shows."""
    family, changes = MODELS[name]
    model = tiny(family, random_weights=True, **changes)
    torch.manual_seed(1)
    for parameter in model.parameters():
        is_filter = family == "lfm2" and parameter.ndim == 3
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.5 if is_filter else 0.15)
    return nn.Module.to(model, dtype)


def packed_lm(form: str = "whole", name: str = "as published") -> CausalLM:
    model = made(name, torch.bfloat16 if form == "bfloat16" else torch.float32)
    if form.startswith("q"):
        pack_quantised(model, form)  # pyright: ignore[reportArgumentType]
    pack(model)
    lm = CausalLM(model)
    assert lm.execution == "kernel"
    return lm


def next_scores(rows: Rows, token: int = 9) -> torch.Tensor:
    """The logits after one more token in row 0."""
    logits = rows.score([[token], *[[] for _ in range(len(rows) - 1)]], [[-1], *[[] for _ in range(len(rows) - 1)]])[0]
    rows.keep([[]] * len(rows))
    return logits[0].clone()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    model = made(name)
    with torch.inference_mode():
        want = model(torch.tensor([TEXT])).logits[0]
    pack(model)
    lm = CausalLM(model)
    assert (lm.execution, lm.recurrent) == ("kernel", False)
    with torch.inference_mode():
        panels = model(torch.tensor([TEXT])).logits[0]
    for got in (scores(lm, 64), scores(lm, *[1] * 64), panels):
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("name", "form"), [*one_in(3, product(KEPT[:1], FORMS)), *(("normed shares", form) for form in FORMS)]
)
def test_a_node_has_the_same_bits_alone_and_among_others(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = packed_lm(form, name)
    assert isinstance(lm.backend, LlamaKernel)
    check_bits(lm, monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layers")
    for name in KEPT:
        made(name, torch.bfloat16).save_pretrained(root / name)
    return {name: root / name for name in KEPT}


@pytest.mark.parametrize(("options", "name"), one_in(3, product(LOADED, KEPT)), ids=str)
def test_greedy_text_is_that_of_plain_decoding_bit_for_bit(
    folders: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    check_greedy_texts(folders[name], options)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("lfm2", {"hidden_size": 64, "conv_bias": True}),
        ("lfm2", {"hidden_size": 96, "head_dim": 16}),  # C would begin in the middle of a panel
        ("qwen3_moe", {**QWEN, "moe_intermediate_size": 32}),  # an expert's gate would begin in the middle of a panel
        ("qwen3_moe", {**QWEN, "hidden_size": 96}),
        (
            "granite_experts",
            {"hidden_size": 64, "head_dim": 16, "num_local_experts": 4, "shared_intermediate_size": 64},
        ),
    ],
)
def test_what_the_kernel_does_not_have_runs_in_transformers_modules(family: str, changes: dict[str, Any]) -> None:
    model = tiny(family, random_weights=True, **changes)
    with torch.inference_mode():
        want = model(torch.tensor([TEXT])).logits[0]
    pack(model)
    assert llama_kernel(model) is None
    lm = CausalLM(model)
    assert (lm.execution, lm.recurrent) == ("panels", family == "lfm2")
    torch.testing.assert_close(scores(lm, 64), want, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("part", ["convolution", "experts"])
def test_other_models_do_without_their_code(part: str) -> None:
    assert not any(name.startswith(f"foretoken.kernel.{part}.") for name in kernel_model.score._reached)


# Short convolutions.


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_trees_and_batches_equal_plain_forwards(name: str) -> None:
    model = made(name)
    pack(model)
    rows = check_random_steps(model, seed=1, steps=6)
    assert isinstance(rows.cache, KernelRows)
    check_random_steps(model, seed=3, steps=8, batch=4)


def test_bfloat16_is_nearer_to_float64_than_torch_is() -> None:
    model, tokens = made(dtype=torch.bfloat16), torch.tensor([TEXT])
    with torch.inference_mode():
        torchs = model(tokens).logits[0].double()
        exact = nn.Module.to(made(dtype=torch.bfloat16), torch.float64)(tokens).logits[0]
    ours = scores(packed_lm("bfloat16"), 64)
    assert float((ours - exact).square().mean()) < 0.8 * float((torchs - exact).square().mean())


def test_a_tree_takes_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = packed_lm().open(1, 40)
    rows.extend(rows.join(), TEXT[:9])
    forwards = calls_of(monkeypatch, KernelRows, "score_tree")
    rows.score([TEXT[:10]], [TREE])
    assert [len(tokens) for _, tokens, *_ in forwards] == [10]


@pytest.mark.parametrize("form", ["whole", "bfloat16", "q8_0"])
def test_a_node_of_a_tree_has_the_bits_of_its_path(form: str) -> None:
    """Also in a batch with longer and shorter rows, some of which leave."""
    lm = packed_lm(form)
    rows = lm.open(3, 90)
    for prompt in (TEXT[:9], TEXT[3:60], TEXT[:1]):
        rows.extend(rows.join(), prompt)
    tree = TEXT[20:30]
    logits = rows.score([tree, [1, 2], [3]], [TREE, [-1, 0], [-1]])[0]
    for node in range(len(tree)):
        alone = lm.open(1, 40)
        alone.extend(alone.join(), TEXT[:9])
        for token in (tree[i] for i in path_to(TREE, node)):
            ((last,),) = alone.score([[token]], [[-1]])
            alone.keep([[0]])
        assert torch.equal(logits[node], last), node  # pyright: ignore[reportPossiblyUnboundVariable]
    rows.keep([path_to(TREE, 9), [], [0]])
    rows.leave(1)
    kept = lm.open(1, 40)
    kept.extend(kept.join(), TEXT[:9] + [tree[i] for i in path_to(TREE, 9)])
    assert torch.equal(next_scores(rows), next_scores(kept))
    rows.leave(0)
    kept = lm.open(1, 40)
    kept.extend(kept.join(), [TEXT[0], 3])
    assert torch.equal(next_scores(rows), next_scores(kept))


def test_a_prompt_in_pieces_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, found, prompt = packed_lm(), [], TEXT * 4
    for most in (192, 7, 1):
        monkeypatch.setattr("foretoken.models.rows.KERNEL_CHUNK", most)
        rows = lm.open(1, 300)
        rows.extend(rows.join(), prompt)
        found.append(next_scores(rows))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_saved_cut_and_restored_prompts_give_the_same_bits() -> None:
    """The saved pieces begin and end anywhere; what lies behind a cut is forgotten; hidden states come along."""
    lm, ids = packed_lm("bfloat16"), TEXT * 3
    rows = lm.open(2, 250, (1, FINAL))
    rows.extend(rows.join(), ids)
    want = next_scores(rows)
    other = lm.open(2, 250, (1, FINAL))
    row = other.join()
    for start, end in ((0, 1), (1, 64), (64, 129), (129, 130)):  # the next token reads what is kept of two
        piece = rows.save(0, start, end)
        assert piece is not None
        other.restore(row, piece)
    other.extend(row, ids[130:])
    assert torch.equal(next_scores(other), want)
    assert torch.equal(other.features(0), rows.features(0))
    rows.score([[3, 4, 5]], [[-1, 0, 1]])
    rows.keep([[0, 1, 2]])
    rows.cut(0, len(ids))
    assert torch.equal(next_scores(rows), want)


@pytest.mark.parametrize("name", ["as published", "attention first"])
def test_hidden_states_are_those_of_transformers(name: str) -> None:
    model, layers = made(name), (0, 1, 2, FINAL)
    with torch.inference_mode():
        out = model(torch.tensor([TEXT]), output_hidden_states=True)
    want = torch.cat([out.hidden_states[layer] for layer in layers], -1)[0]
    pack(model)
    rows = CausalLM(model).open(1, 64, layers)
    rows.extend(rows.join(), TEXT)
    torch.testing.assert_close(rows.features(0), want, rtol=0, atol=TOLERANCE[torch.float32])


def test_forgotten_inputs_are_seen() -> None:
    """The comparisons above fail where a convolution begins at the prompt's end."""
    rows = packed_lm().open(1, 40)
    rows.extend(rows.join(), TEXT[:20])
    want = next_scores(rows)
    assert isinstance(rows.cache, KernelRows)
    rows.cache.inputs[:, :, :18] = 0
    assert torch.equal(next_scores(rows), want)  # a window of 3 does not reach them
    rows.cache.inputs[:, :, 18] = 0
    assert float((next_scores(rows) - want).abs().max()) > 50 * TOLERANCE[torch.float32]


def test_a_guest_reads_what_its_host_has_kept() -> None:
    """As drafter `self` does: here the guest has the weights of the host, and so the same scores."""
    lm = packed_lm()
    host = lm.open(2, 40)
    guest = GuestRows(lm, host)
    for prompt in (TEXT[:9], TEXT[30:33]):
        host.extend(host.join(), prompt)
        guest.join()
    nodes = [TEXT[:10], [1, 2]], [TREE, [-1, 0]]
    drafted = [logits.clone() for logits in guest.score(*nodes)]
    assert all(map(torch.equal, drafted, host.score(*nodes)))


def test_drafter_self_drafts_well(tmp_path: Path) -> None:
    model = made(dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)  # less of the text is in what the layers add, and in their errors
    model.save_pretrained(tmp_path)
    engine = foretoken.load(tmp_path, tokenizer=tokenizer(), drafter="self", tree="chain:4")
    assert isinstance(engine.drafter, OwnDrafter)
    result = engine.generate(TEXTS[1], max_new_tokens=40, temperature=0.0)
    assert result.stats.num_accepted > result.stats.num_drafted / 2


@pytest.mark.usefixtures("home")
def test_a_quantised_model_is_that_of_the_weights_rounded(tmp_path: Path) -> None:
    """At the first start, and from what it kept at the next, when transformers' code is not needed any more."""
    model = made()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        want = model(torch.tensor([TEXT])).logits[0]
    for _ in range(2):
        lm = load_model(str(tmp_path), CPU, quantise="q8_0")
        assert lm.execution == "kernel"
        assert lm.num_layers == 3
        assert sum(isinstance(module, PackedLinear) for module in lm.weights.modules()) == 2 * 2 + 4 + 3 * 3 + 1
        got = scores(lm, 64)
        assert (got - want).square().mean() < 0.05**2 * want.var()
    with torch.inference_mode():
        panels = lm.model(torch.tensor([TEXT])).logits[0]  # pyright: ignore[reportPossiblyUnboundVariable]
    assert (got - panels).square().mean() < 0.02**2 * want.var()  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_gguf_files(tmp_path: Path, kind: str) -> None:
    """They run in the kernel at the first start and at the next; the filters are in float32 in any file."""
    path = gguf_zoo.save_wide(tmp_path / "model.gguf", "lfm2", gguf.GGMLQuantizationType[kind])
    exact = load_model(path, CPU, torch.float32, compile="off")
    with torch.inference_mode():
        want = exact.model(torch.tensor([TEXT])).logits[0]
    for _ in range(2):
        lm = load_model(path, CPU)
        assert (lm.execution, lm.recurrent) == ("kernel", False)
        assert lm.dtype == (torch.bfloat16 if kind == "BF16" else torch.float32)
        assert (scores(lm, 64) - want).square().mean() < 0.05**2 * want.var()


# Experts.


def test_drafter_self_has_the_experts_in_4_bits_and_drafts_well(folders: dict[str, Path]) -> None:
    engine = foretoken.load(folders["normed shares"], tokenizer=tokenizer(), drafter="self", tree="chain:4")
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


def test_bytes_say_nothing_of_the_time_of_experts_in_panels() -> None:
    model = made("normed shares")
    pack(model)
    lm = CausalLM(model)
    assert share_read(lm, lm) == 0
