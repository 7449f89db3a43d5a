"""Models in the compiled forward equal the generic path, and it knows when to stand back."""

from contextlib import nullcontext
from copy import deepcopy
from itertools import product as pairs
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from foretoken.kernel import tile
from foretoken.kernel.compile import use_threads
from foretoken.kernel.sizes import DOTTED, HALVED, WHOLE
from foretoken.kernel.threads import Run, ThreadChoice
from foretoken.models import panels
from foretoken.models.causal_lm import CausalLM
from foretoken.models.llama_kernel import LlamaKernel, llama_kernel
from foretoken.models.modules import Modules
from foretoken.models.panels import PanelLinear, pack
from foretoken.models.rows import Rows
from models_zoo import FAMILIES, TOLERANCE, assert_close, check_random_steps, plain, tiny
from thinning import one_in

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rms_norm_eps": 0.1}),
    ("qwen2", {}),
    ("qwen2_sliding", {}),
    ("qwen3", {}),
    ("mistral", {}),
    ("phi3", {}),
    ("gemma", {}),
    ("gemma3", {}),
    ("smollm3", {}),
    ("seed_oss", {}),
    ("ministral", {}),
    ("granite", {}),
    ("granite_hybrid", {}),
]
EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "decoder_sparse_step": 2}),
    ("mixtral", {"hidden_size": 64, "intermediate_size": 64}),
    ("granite_moe", {"hidden_size": 64, "intermediate_size": 64}),
]
CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma3", {"attention_bias": True, "num_key_value_heads": 1}),
]


def random_model(family: str, changes: dict[str, Any]) -> PreTrainedModel:
    """As tiny, for changes that alter the shapes; biases and norms are random too."""
    model = tiny(family, random_weights=True, **changes)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            about_0 = "bias" in name or family.startswith("gemma")  # whose norms multiply by 1 more
            nn.init.normal_(parameter, mean=0.0 if about_0 else 1.0, std=0.2)
        if parameter.ndim == 3:  # of all experts
            nn.init.normal_(parameter, std=0.15)
    return model


def compiled_rows(model: PreTrainedModel, batch: int, slots: int) -> tuple[Rows, Rows]:
    """The compiled path and the generic one, over the same packed model."""
    pack(model)
    lm = CausalLM(model)
    assert isinstance(lm.backend, LlamaKernel)
    fast = lm.open(batch, slots)
    lm.backend = Modules(model, lm._layout)
    slow = lm.open(batch, slots)
    return fast, slow


# Two ways that round to bfloat16 differ by what both are from float64, up to 0.03 here and 0.04 in torch's operators;
# `test_bfloat16_is_nearer_to_float64_than_torch_is` holds the kernel to that.
BETWEEN = {torch.float32: TOLERANCE[torch.float32], torch.bfloat16: 0.07}


def assert_equal_paths(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Prefill, ragged batches, trees, kept paths and rows that leave, step by step through both paths."""
    both = compiled_rows(model, 3, 120)
    for rows in both:
        rows.extend(rows.join(), list(range(1, 71)))  # more queries than share a block, beyond the windows
        rows.extend(rows.join(), [5, 6, 7])
        rows.join()
    tokens = [[1, 2, 3, 4], [5, 6], [7]]
    parents = [[-1, 0, 0, 2], [-1, -1], [-1]]
    steps: list[tuple[Any, Any, Any]] = [
        (tokens, parents, [[0, 2, 3], [1], [0]]),
        ([[1], [2], [3]], [[-1]] * 3, [[0]] * 3),
        ([[], [4, 5], []], [[], [-1, 0], []], [[], [0, 1], []]),
    ]
    for new, above, paths in steps:
        for x, y in zip(*(rows.score(new, above) for rows in both), strict=True):
            assert x.shape == y.shape
            torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=BETWEEN[dtype])
        for rows in both:
            rows.keep(paths)
    for rows in both:
        rows.leave(0)
    for x, y in zip(*(rows.score([[9], [8]], [[-1], [-1]]) for rows in both), strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=BETWEEN[dtype])


def in_form(model: PreTrainedModel, form: int) -> torch.dtype:
    """Change a float32 model so that its linear layers will be packed in this form; its dtype."""
    if form == HALVED:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    if form == DOTTED:
        nn.Module.to(model, torch.bfloat16)
    return model.dtype


CASES = [*pairs(VARIANTS + CHANGED, [WHOLE, HALVED, DOTTED]), *pairs(EXPERTS, [WHOLE, HALVED])]


@pytest.mark.parametrize(("variant", "form"), one_in(2, CASES))  # with bfloat16 states other experts are chosen
def test_equals_the_generic_path(variant: tuple[str, dict[str, Any]], form: int) -> None:
    family, changes = variant
    model = random_model(family, {"head_dim": 16, **changes})
    assert_equal_paths(model, in_form(model, form))


@pytest.mark.parametrize(("family", "changes"), VARIANTS + EXPERTS + CHANGED)
def test_bfloat16_is_nearer_to_float64_than_torch_is(family: str, changes: dict[str, Any]) -> None:
    model = nn.Module.to(random_model(family, {"head_dim": 16, **changes}), torch.bfloat16)
    tokens = [[i * 31 % 99 + 1 for i in range(40)]]
    model.config._experts_implementation = "eager"  # the others are not made for float64
    with torch.inference_mode():
        torchs = model(torch.tensor(tokens)).logits[0].double()
        exact = nn.Module.to(deepcopy(model), torch.float64)(torch.tensor(tokens)).logits[0]
    pack(model)
    rows = CausalLM(model).open(1, 40)
    rows.join()
    (ours,) = rows.score(tokens, [range(-1, 39)])
    assert float((ours - exact).square().mean()) < 0.8 * float((torchs - exact).square().mean())


@pytest.mark.parametrize("form", [HALVED, DOTTED])
@pytest.mark.parametrize("path", [[0, 2, 3, 7], [1, 4], [0]])
def test_kept_slots_are_those_of_a_cache_that_never_moved(path: list[int], form: int) -> None:
    """Also where two slots share a word, and after a row took another's place."""
    model = random_model("llama", {"head_dim": 16})
    in_form(model, form)
    pack(model)
    lm, prompt, tokens = CausalLM(model), [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 7]
    moved, straight = lm.open(2, 40), lm.open(1, 40)
    moved.extend(moved.join(), [2, 7])
    moved.extend(moved.join(), prompt)
    moved.score([[], tokens], [[], [-1, -1, 0, 2, 1, 0, 3, 3]])
    moved.keep([[], path])
    moved.leave(0)
    straight.extend(straight.join(), prompt)
    chain = [tokens[node] for node in path]
    straight.score([chain], [range(-1, len(chain) - 1)])
    straight.keep([range(len(chain))])
    for _ in range(2):
        (a,), (b,) = (rows.score([[11, 12, 13]], [[-1, 0, 0]]) for rows in (moved, straight))
        # A node of a tree stands elsewhere in the sums of its softmax; a wrong slot moves scores by tenths.
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 if form == HALVED else 0.02)
        for rows in (moved, straight):
            rows.keep([[0, 2]])


@pytest.mark.parametrize(("family", "form"), one_in(3, pairs(["llama", "gemma3"], [WHOLE, DOTTED])))
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, family: str, form: int) -> None:
    model = random_model(family, {"head_dim": 16, "hidden_size": 512, "intermediate_size": 700})
    in_form(model, form)
    pack(model)
    lm = CausalLM(model)
    scores = []
    use_threads(2)  # starts numba's threads, as `ThreadChoice.forward` does
    for threads in (None, 2, 3, 5):  # 5 do not divide what there is
        monkeypatch.setattr(ThreadChoice, "forward", lambda *_, threads=threads: nullcontext(Run(threads, 1)))
        rows = lm.open(2, 1200)
        monkeypatch.setattr("foretoken.models.rows.KERNEL_CHUNK", 512)
        rows.extend(rows.join(), [1 + i % 99 for i in range(1100)])  # long enough to spread the heads as well
        rows.extend(rows.join(), [5, 6, 7])
        scores.append(torch.cat(rows.score([[1, 2, 3, 4], [5, 6]], [[-1, 0, 0, 2], [-1, -1]])))
    assert all(torch.equal(scores[0], other) for other in scores[1:])


@pytest.mark.parametrize("form", [WHOLE, HALVED, DOTTED])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
def test_a_chain_gives_the_bits_of_plain_decoding(family: str, form: int) -> None:
    model = random_model(family, {"head_dim": 16})
    in_form(model, form)
    pack(model)
    lm = CausalLM(model)
    at_once, one_by_one = lm.open(1, 40), lm.open(1, 40)
    for rows in (at_once, one_by_one):
        rows.extend(rows.join(), [3, 1, 4, 1, 5])
    (chain,) = at_once.score([[9, 2, 6, 5, 3, 5, 8]], [list(range(-1, 6))])
    for i, token in enumerate([9, 2, 6, 5, 3, 5, 8]):
        ((row,),) = one_by_one.score([[token]], [[-1]])
        one_by_one.keep([[0]])
        assert torch.equal(row, chain[i])


@pytest.mark.parametrize("form", [DOTTED, HALVED, WHOLE])
def test_a_prompt_in_pieces_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, form: int) -> None:
    model = random_model("gemma3", {"head_dim": 16})
    in_form(model, form)
    pack(model)
    lm, found = CausalLM(model), []
    for most in 192, 7:
        monkeypatch.setattr("foretoken.models.rows.KERNEL_CHUNK", most)
        rows = lm.open(1, 40)
        rows.extend(rows.join(), list(range(1, 24)))
        found.append(rows.score([[24, 25]], [[-1, 0]])[0])
    assert torch.equal(*found)


def packed_alike(family: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """A packed model that scores as it did before, in trees too."""
    model = tiny(family)
    nn.Module.to(model, dtype)
    before = plain(model, [1, 2, 3])
    pack(model)
    assert_close(plain(model, [1, 2, 3]), before, dtype)
    check_random_steps(model, seed=seed, steps=3, dtype=dtype)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_works_when_packed(family: str) -> None:
    model = packed_alike(family, torch.float32, seed=7)
    assert any(isinstance(m, PanelLinear) for m in model.modules())
    assert not any(type(m) is nn.Linear for m in model.modules())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_layer_whose_weight_the_model_reads_is_not_packed(dtype: torch.dtype) -> None:
    """LongCat's router multiplies by the weight of its classifier itself."""
    model = packed_alike("longcat_flash", dtype, seed=8)
    left = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is nn.Linear}
    assert left == {"classifier"}
    assert any(isinstance(m, PanelLinear) for m in model.modules())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_layer_whose_dtype_the_model_reads_is_packed(dtype: torch.dtype) -> None:
    """Hunyuan's router asks which dtype its layer has before it calls it."""
    model = packed_alike("hunyuan_moe", dtype, seed=9)
    assert not any(type(m) is nn.Linear for m in model.modules())


def test_the_place_of_a_packed_weight_multiplies_nothing() -> None:
    """A model whose code multiplies by the weight itself must fail, and not compute with numbers from nowhere."""
    model = tiny("llama")
    pack(model)
    gate = model.model.layers[0].mlp.gate_proj
    with pytest.raises(RuntimeError, match=r"must match|size mismatch|shapes cannot be multiplied"):
        nn.functional.linear(torch.ones(2, 32), gate.weight)


def test_numbers_of_other_classes_are_not_read() -> None:
    """transformers keeps whatever a config.json has, and its Llama reads none of these."""
    stray = {"residual_multiplier": 0.2, "logits_scaling": 8.0, "embedding_multiplier": 12.0, "no_rope_layers": [0] * 3}
    assert_equal_paths(random_model("llama", {"head_dim": 16, **stray}), torch.float32)


def test_a_wrong_product_is_seen() -> None:
    """The comparison fails where the rotation goes the wrong way."""
    model = tiny("llama", random_weights=True, head_dim=16)
    want = plain(model, [1, 2, 3, 4, 5])
    pack(model)
    rows = CausalLM(model).open(1, 40)
    rows.cache.sin[:] *= -1
    rows.extend(rows.join(), [1, 2, 3, 4])
    (x,) = rows.score([[5]], [[-1]])
    assert float((x[0] - want).abs().max()) > 50 * TOLERANCE[torch.float32]


class Adapter(nn.Linear):
    """Stands for LoRA and quantised layers: a linear layer with a forward of its own."""


def test_stands_back() -> None:
    def packed(family: str = "llama", **changes: Any) -> Any:
        model = tiny(family, random_weights=True, **{"head_dim": 16, **changes})
        pack(model)
        return model

    def found(model: PreTrainedModel) -> bool:
        return llama_kernel(model) is not None

    assert not found(tiny("llama", random_weights=True, head_dim=16))  # not packed: a caller's own
    model = packed()
    assert found(model)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not found(model)
    handle.remove()
    assert found(model)
    model.model.layers[0].self_attn.o_proj = Adapter(64, 32)
    assert not found(model)
    model = packed()
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward
    assert not found(model)
    assert not found(packed(hidden_act="gelu"))
    assert found(packed("phi3"))
    assert not found(packed("phi3", num_key_value_heads=2))  # keys would begin in the middle of a panel
    assert not found(packed("phi3", intermediate_size=96))
    assert found(packed("gemma3"))
    assert not found(packed("gemma3", hidden_activation="gelu"))
    assert not found(packed("gemma3", final_logit_softcapping=30.0))
    both = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}
    both["full_attention"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not found(packed("gemma3", rope_parameters=both))
    assert not found(packed(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}))
    assert not found(packed(head_dim=8))
    model = packed()
    nn.Module.to(model, torch.float16)
    assert not found(model)
    assert not found(tiny("granite"))


def test_a_subclass_of_a_callers_own_stands_back() -> None:
    """Whatever its name: it may compute something else."""
    model: Any = tiny("llama", random_weights=True, head_dim=16)
    pack(model)
    assert llama_kernel(model) is not None
    known = type(model)
    model.__class__ = type("Own", (known,), {"__module__": known.__module__})
    assert llama_kernel(model) is None
    model.__class__ = type(known.__name__, (known,), {"__module__": "somewhere"})
    assert llama_kernel(model) is None


def test_a_callers_model_is_not_changed() -> None:
    model = tiny("llama")
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    kinds = [type(m) for m in model.modules()]
    rows = CausalLM(model).open(1, 20)
    rows.extend(rows.join(), [1, 2])
    rows.score([[1, 2]], [[-1, 0]])
    assert kinds == [type(m) for m in model.modules()]
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_pack_leaves_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    nn.Module.to(model, torch.float16)
    pack(model)
    assert not any(isinstance(m, PanelLinear) for m in model.modules())
    monkeypatch.setattr(panels, "_works", lambda: False)
    model = tiny("llama")
    pack(model)
    assert not any(isinstance(m, PanelLinear) for m in model.modules())


def test_the_machine_check_sees_a_matrix_that_goes_by_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.kernel import product

    def wrong(x: Any, w: int, form: int, width: int, y: Any, threads: Any) -> None:
        right(x, w, form, width, y, threads)
        if x.shape[1] > 2 * tile.CHUNK:
            y[-1, -1] += 0.1

    right = product.times
    assert panels._works.__wrapped__()
    monkeypatch.setattr(product, "times", wrong)
    assert not panels._works.__wrapped__()


def test_pack_keeps_a_tied_embedding() -> None:
    model: Any = tiny("llama", random_weights=True, tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight
    pack(model)
    assert isinstance(model.lm_head, PanelLinear)
    assert model.model.embed_tokens.weight is embedding
