"""Models with short convolutions in the kernel: the logits of transformers, trees in one forward, the same bits however
many nodes share it, and the same greedy text in every way."""

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
from foretoken.models.features import FINAL
from foretoken.models.fused_rows import GuestRows
from foretoken.models.llama_kernel import KernelRows, LlamaKernel, llama_kernel
from foretoken.models.load import load_model
from foretoken.models.panels import PackedLinear, pack
from foretoken.models.quantised import pack_quantised
from foretoken.models.rows import Rows
from models_zoo import TOLERANCE, check_random_steps, tiny
from same_bits import LOADED, TEXT, TEXTS, check_bits, check_greedy_texts, scores
from thinning import one_in
from tiny import tokenizer

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "as published": {},
    "attention first": {"layer_types": ["full_attention", "conv", "conv"]},
    "a window of 2": {"conv_L_cache": 2},
    "a window of 5": {"conv_L_cache": 5},
    "an LM head of its own": {"tie_word_embeddings": False},
    "more channels than the heads have": {"head_dim": 32, "hidden_size": 192, "num_attention_heads": 2},
    "attention alone": {"layer_types": ["full_attention"] * 3},
}
TREE = [-1, 0, 0, 2, -1, 1, 3, 4, 0, 6]


def made(name: str = "as published", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights, so large that a wrong neighbour shows."""
    model = tiny("lfm2", random_weights=True, **{"hidden_size": 64, **MODELS[name]})
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.5 if parameter.ndim == 3 else 0.15)
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
    assert lm.execution == "kernel"
    assert not lm.recurrent
    for pieces in ([64], [1] * 64):
        torch.testing.assert_close(scores(lm, *pieces), want, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", MODELS)
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
    lm, forwards = packed_lm(), list[int]()
    rows = lm.open(1, 40)
    rows.extend(rows.join(), TEXT[:9])
    score = KernelRows.score_tree
    monkeypatch.setattr(
        KernelRows,
        "score_tree",
        lambda rows, tokens, *more: (forwards.append(len(tokens)), score(rows, tokens, *more))[1],
    )
    rows.score([TEXT[:10]], [TREE])
    assert forwards == [10]


@pytest.mark.parametrize("form", one_in(3, ["whole", "bfloat16", "q4_0", "q8_0"]))
def test_a_node_has_the_same_bits_alone_and_among_others(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = packed_lm(form)
    assert isinstance(lm.backend, LlamaKernel)
    check_bits(lm, monkeypatch)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("convolution")
    made(dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("options", LOADED, ids=str)
def test_greedy_text_is_that_of_plain_decoding_bit_for_bit(folder: Path, options: dict[str, Any]) -> None:
    check_greedy_texts(folder, options)


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


@pytest.mark.parametrize(
    "changes",
    [
        {"conv_bias": True},
        {"hidden_size": 96, "head_dim": 16},  # C would begin in the middle of a panel
    ],
    ids=str,
)
def test_other_sizes_and_biases_run_in_transformers_modules(changes: dict[str, Any]) -> None:
    model = tiny("lfm2", random_weights=True, **{"hidden_size": 64, **changes})
    pack(model)
    assert llama_kernel(model) is None
    lm = CausalLM(model)
    assert lm.execution == "panels"
    assert lm.recurrent


def test_models_without_convolutions_do_without_their_code() -> None:
    assert not any(name.startswith("foretoken.kernel.convolution.") for name in kernel_model.score._reached)
