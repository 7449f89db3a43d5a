"""Panels and the compiled Llama forward equal torch and the generic path, and know when to stand back."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from foretoken.kernel import attention, processor, tile
from foretoken.kernel.compile import compiled
from foretoken.kernel.memory import Arena
from foretoken.kernel.product import times
from foretoken.kernel.rounding import nearest
from foretoken.kernel.simd import gate_row, softmax_row
from foretoken.kernel.sizes import DOTTED, GELU, HALVED, LANES, SILU, WHOLE
from foretoken.kernel.threads import Run, ThreadChoice
from foretoken.models import panels
from foretoken.models.causal_lm import CausalLM
from foretoken.models.llama_kernel import LlamaKernel, llama_kernel
from foretoken.models.modules import Modules
from foretoken.models.panels import PanelLinear, pack
from foretoken.models.rows import Rows
from models_zoo import FAMILIES, TOLERANCE, assert_close, check_random_steps, plain, tiny

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
    ("gemma3", {}),
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
            about_0 = "bias" in name or family == "gemma3"  # whose norms multiply by 1 more
            nn.init.normal_(parameter, mean=0.0 if about_0 else 1.0, std=0.2)
    return model


def product(x: torch.Tensor, linear: PanelLinear, threads: bool | None = None) -> torch.Tensor:
    y = np.full((len(x), linear.out_features), np.nan, np.float32)
    times(x.numpy(), linear.address, linear.form, y.shape[1], y, threads)
    return torch.from_numpy(y)


def linear(out: int, k: int, form: int) -> PanelLinear:
    plain = nn.Linear(k, out, bias=False)
    if form != WHOLE:
        plain.weight = nn.Parameter(plain.weight.detach().bfloat16().float())
    if form == DOTTED:
        plain = nn.Module.to(plain, torch.bfloat16)
    made = PanelLinear(plain, Arena())
    assert made.form == (WHOLE if form == HALVED and k % 2 else form)
    made.dense = plain.weight.detach().double()
    return made


@pytest.mark.parametrize("form", [WHOLE, HALVED, DOTTED])
@pytest.mark.parametrize(("out", "k"), [(64, 1), (1, 7), (130, 33), (70, 38), (320, 192), (330, 1100), (70, 4200)])
def test_product(out: int, k: int, form: int) -> None:
    torch.manual_seed(0)
    w = linear(out, k, form)
    x = torch.randn(70, k)
    want = ((x.bfloat16() if form == DOTTED else x).double() @ w.dense.T).float()
    for m in [*range(1, 15), 29, 40, 70]:  # every height of a block, and several blocks
        got = product(x[:m].contiguous(), w)
        torch.testing.assert_close(got, want[:m], rtol=0, atol=1e-5)
        # A row does not depend on the rows beside it: trees and plain decoding see the same bits.
        assert torch.equal(got[-1:], product(x[m - 1 : m].contiguous(), w))


def test_rows_are_rounded_to_the_nearest_bfloat16() -> None:
    some = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e-40, 3.3895e38, 3.4e38, 1.00390625, 1.01171875]
    x = torch.cat((torch.tensor(some), torch.randn(1000) * 10.0 ** torch.randint(-30, 30, (1000,))))
    want = x.bfloat16().float().view(torch.int32).long() & 0xFFFFFFFF
    got = torch.tensor([nearest(int(bits) & 0xFFFFFFFF) for bits in x.view(torch.int32)])
    numbers = ~x.isnan()
    assert torch.equal(got[numbers], want[numbers])
    assert all(bits & 0x7FFFFFFF > 0x7F800000 for bits in got[~numbers].tolist())


LOW = np.finfo(np.float32).min


class OneHead:
    """Attention with one key head, three query heads and a cache in bfloat16, for nodes after a prefix."""

    def __init__(self, dim: int, prefix: int) -> None:
        self.dim, self.prefix, self.rows = dim, prefix, 3
        self.keys = np.zeros((1, 1, 4, dim // 2, 64), np.float32)
        self.values = np.zeros((1, 1, 128, dim), np.float32)
        for stale in (self.keys, self.values):  # what other sequences left may be no numbers
            stale.view(np.uint32)[:] = 0x7FC07FC0
        self.step(range(prefix), [-1, *range(prefix - 1)], 0)

    def step(self, names: Sequence[int], parents: Sequence[int], first: int, broken: Sequence[int] = ()) -> np.ndarray:
        """Results of nodes after `first` slots that all see. names: seeds of their numbers. broken: values are NaN."""
        n, width = len(names), 5 * self.dim
        qkv = np.stack([np.random.default_rng(name).standard_normal(width, dtype=np.float32) for name in names])
        qkv[list(broken), 4 * self.dim :] = np.nan
        mask, positions = np.full((1, 1, n, first + n), LOW), np.empty(n, np.int64)
        for i, parent in enumerate(parents):
            mask[0, 0, i] = mask[0, 0, parent] if parent >= 0 else LOW
            mask[0, 0, i, :first], mask[0, 0, i, first + i] = 0, 0
            positions[i] = positions[parent] + 1 if parent >= 0 else first
        asked = attention.Attention(
            qkv, self.keys, self.values, np.arange(first, first + n)[None], positions, mask, first + n, self.rows,
            np.float32(self.dim**-0.5), LOW, True,
        )  # fmt: skip
        out = np.zeros((n, self.rows * self.dim), np.float32)
        attention.store(asked, 0, 0)
        attention.attend(asked, 0, 0, self.rows, out)
        return out


@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.parametrize("prefix", [1, 31, 64, 70])
def test_a_node_of_a_tree_has_the_bits_of_its_path_whatever_its_siblings_hold(dim: int, prefix: int) -> None:
    parents = [-1, 0, 1, 2, -1, 4, 5, 4]
    broken = [2, 3]  # their values; no node of the last path sees them
    tree = OneHead(dim, prefix).step(range(1000, 1008), parents, prefix, broken)
    alone, path = OneHead(dim, prefix), [4, 5, 6]
    for depth, node in enumerate(path):
        (one,) = alone.step([1000 + node], [-1], prefix + depth)
        assert np.array_equal(one, tree[node])


def test_not_a_number_stays_one() -> None:
    x = torch.ones(3, 50)
    x[1, 7] = math.nan
    for form in (WHOLE, HALVED, DOTTED):
        finite = product(x, linear(70, 50, form)).isfinite()
        assert finite.all(-1).tolist() == finite.any(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("form", [HALVED, DOTTED])
def test_threads_give_the_same_bits(form: int) -> None:
    torch.manual_seed(0)
    w, x = linear(1500, 300, form), torch.randn(4, 300)
    assert torch.equal(product(x, w), product(x, w, threads=2))


def test_softmax_rows() -> None:
    run = compiled(_softmax_two, fuse=True)
    torch.manual_seed(0)
    x = torch.randn(2, 48) * 30
    x[1, 5:] = -math.inf
    y = x.clone().numpy().reshape(-1)
    run(y, 3)
    # x less the largest is rounded: 90 * 2**-24 = 5e-6, which is the relative error of its exponential.
    torch.testing.assert_close(torch.from_numpy(y).view(2, 48), x.double().softmax(-1).float(), rtol=8e-6, atol=1e-37)
    for bad in (math.nan, math.inf):
        x[0, 17] = bad
        y = x.clone().numpy().reshape(-1)
        run(y, 3)
        assert np.isnan(y[:48]).all()
        assert np.isfinite(y[48:]).all()


@pytest.mark.parametrize("at", [0, 17, 47])
@pytest.mark.parametrize("value", [0.0, -math.inf, float(np.finfo(np.float32).min), math.nan, math.inf])
def test_weights_of_attention(at: int, value: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 48) * 10
    x[0, at] = value
    scores, shares = x.clone().numpy(), np.zeros(2, np.float32)
    attention.weigh(scores, 2, 48, np.finfo(np.float32).min, shares)
    got, want = torch.from_numpy(scores * shares[:, None]), x.double().softmax(-1).float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-37, equal_nan=True)
    attention.weigh(np.full((1, 16), -np.inf, np.float32), 1, 16, np.finfo(np.float32).min, shares[:1])
    assert np.isnan(shares[0])


def _softmax_two(x, chunks):  # type: ignore[no-untyped-def]
    for row in x.reshape(2, chunks * LANES):
        softmax_row(row, np.float32(1), row)


def _gate(y, bias, width, curve, out):  # type: ignore[no-untyped-def]
    gate_row(y[:width], y[width:], bias[:width], bias[width:], curve, out)


@pytest.mark.parametrize(("curve", "act"), [(SILU, nn.SiLU()), (GELU, nn.GELU(approximate="tanh"))])
def test_gate(curve: tuple[float, float], act: nn.Module) -> None:
    torch.manual_seed(0)
    y, bias = torch.randn(96) * 20, torch.randn(96)
    y[:3] = torch.tensor([-1000.0, 1000.0, 0.0])
    out = np.empty(48, np.float32)
    compiled(_gate, fuse=True)(y.numpy(), bias.numpy(), 48, tuple(np.float32(c) for c in curve), out)
    a, b = (y + bias).double().split(48)
    # 1 + tanh is 0 in float64 where act(a) < 1e-16; what is left of it here is nearer to the truth.
    atol = 1e-30 if curve == SILU else 1e-13
    torch.testing.assert_close(torch.from_numpy(out), (act(a) * b).float(), rtol=3e-6, atol=atol)


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


@pytest.mark.parametrize("form", [WHOLE, HALVED, DOTTED])
@pytest.mark.parametrize(("family", "changes"), VARIANTS + CHANGED)
def test_equals_the_generic_path(family: str, changes: dict[str, Any], form: int) -> None:
    model = random_model(family, {"head_dim": 16, **changes})
    assert_equal_paths(model, in_form(model, form))


@pytest.mark.parametrize(("family", "changes"), VARIANTS + CHANGED)
def test_bfloat16_is_nearer_to_float64_than_torch_is(family: str, changes: dict[str, Any]) -> None:
    model = nn.Module.to(random_model(family, {"head_dim": 16, **changes}), torch.bfloat16)
    tokens = [[i * 31 % 99 + 1 for i in range(40)]]
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


@pytest.mark.parametrize("form", [WHOLE, DOTTED])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, family: str, form: int) -> None:
    model = random_model(family, {"head_dim": 16, "hidden_size": 512, "intermediate_size": 700})
    in_form(model, form)
    pack(model)
    lm = CausalLM(model)
    scores = []
    for threads in (None, 2, 3, 5):  # 5 do not divide what there is
        monkeypatch.setattr(ThreadChoice, "forward", lambda *_, threads=threads: nullcontext(Run(threads, 1)))
        rows = lm.open(2, 1200)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_works_when_packed(family: str) -> None:
    model = tiny(family)
    before = plain(model, [1, 2, 3])
    pack(model)
    assert any(isinstance(m, PanelLinear) for m in model.modules())
    assert not any(type(m) is nn.Linear for m in model.modules())
    assert_close(plain(model, [1, 2, 3]), before, torch.float32)
    check_random_steps(model, seed=7, steps=3)


def test_a_wrong_product_is_seen() -> None:
    """The comparison fails where the rotation goes the wrong way."""
    model = tiny("llama", random_weights=True, head_dim=16)
    want = plain(model, [1, 2, 3, 4, 5])
    pack(model)
    rows = CausalLM(model).open(1, 40)
    rows.cache.model.cache.sin[:] *= -1
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "without", "wide", "dots"),
    [("generic", None, False, False), ("sapphirerapids", "amx", True, False), ("znver4", "amx", True, True)],
)
def test_the_product_on_another_processor(
    pytestconfig: pytest.Config, name: str, without: str | None, wide: bool, dots: bool
) -> None:
    """numba is told to compile for no more than every processor can do, or for the features of this one but those of
    the matrix unit, by either maker's name. What it compiles is kept from run to run, apart from this machine's own,
    which it would replace."""
    if (wide, dots, False) == (processor.WIDE, processor.DOTS, processor.MATRIX):
        pytest.skip("what this processor runs is tested by all other tests")
    if (wide and not processor.WIDE) or (dots and "+avx512bf16" not in processor.FEATURES):
        pytest.skip("this processor has no such registers or no such instruction")
    code = (
        "from foretoken.kernel import processor as p; from foretoken.models import panels; "
        f"assert (p.WIDE, p.DOTS, p.MATRIX) == ({wide}, {dots}, False); assert panels._works()"
    )
    folder = str(pytestconfig.cache.mkdir(name))
    features = [feature for feature in processor.FEATURES if without and without not in feature]
    settings = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CACHE_DIR": folder}
    settings["NUMBA_CPU_FEATURES"] = ",".join(features)
    subprocess.run([sys.executable, "-c", code], env=settings, check=True)


@pytest.mark.long
def test_the_product_where_linux_refuses_the_matrix_unit(pytestconfig: pytest.Config) -> None:
    if not processor.MATRIX:
        pytest.skip("this processor has no matrix unit")
    code = (
        "import ctypes, numba; from unittest.mock import Mock; ctypes.CDLL = Mock(); "
        "ctypes.CDLL.return_value.syscall.return_value = -1; "
        "from foretoken.kernel import processor as p; from foretoken.models import panels; "
        "assert not p.MATRIX and '+amx-bf16' in p.FEATURES; assert panels._works()"
    )
    settings = {**os.environ, "NUMBA_CACHE_DIR": str(pytestconfig.cache.mkdir("refused"))}
    subprocess.run([sys.executable, "-c", code], env=settings, check=True)


def test_pack_keeps_a_tied_embedding() -> None:
    model: Any = tiny("llama", random_weights=True, tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight
    pack(model)
    assert isinstance(model.lm_head, PanelLinear)
    assert model.model.embed_tokens.weight is embedding
