"""Quantised weights: what a GGUF file stores is what the kernel reads and multiplies with."""

from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_int64

import gguf
import numpy as np
import pytest
import torch
from llvmlite import binding, ir
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

import foretoken
from foretoken.audit.bits import bit_exact
from foretoken.audit.report import OK
from foretoken.core.errors import ForetokenError
from foretoken.kernel import dots
from foretoken.kernel.compile import compiled
from foretoken.kernel.packing import to_panels
from foretoken.kernel.quantised import KINDS, packed_bytes, read_row, unpack
from foretoken.models import panels
from foretoken.models.causal_lm import CausalLM
from foretoken.models.panels import PackedEmbedding, PackedLinear, check_quantised
from models_zoo import tiny


@compiled
def quantise(x, lines):
    """Fill the lines [k / 32, m, 16] of rows x [m, k]."""
    m, k = x.shape
    dots.quantise_rows(x.ctypes.data, k, m, k, lines.ctypes.data)


def random_rows(kind: str, out: int, k: int, seed: int = 0) -> NDArray[np.uint8]:
    """A matrix of any codes [out, bytes per row], with scales of either sign as a file stores them."""
    rng, known = np.random.default_rng(seed), KINDS[kind]
    raw = rng.integers(0, 256, (out, k // known.weights, known.block_bytes), np.uint8)

    size = 0.3 / 2**known.bits / (1 if known.weights == 32 else 128)  # a sub-scale goes up to 127

    def scales() -> NDArray[np.uint8]:
        return rng.uniform(-size, size, raw.shape[:2]).astype(np.float16)[..., None].view(np.uint8)

    at = 208 if kind == "q6_k" else 0
    raw[..., at : at + 2] = scales()
    if known.least:
        raw[..., 2:4] = scales()
    return raw.reshape(out, -1)


def true_weights(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[out, k] as the gguf library has them."""
    return gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_file(kind: str) -> None:
    raw = random_rows(kind, 70, 512)
    weights, row = true_weights(kind, raw), np.empty(512, np.float32)
    for i in (0, 3, 69):
        read_row(raw[i], KINDS[kind].form, row)
        assert np.array_equal(row, weights[i])
    assert np.array_equal(unpack(kind, raw), weights)
    embedding = PackedEmbedding(kind, raw)
    assert embedding.embedding_dim == 512
    got = embedding(torch.tensor([[3, 69], [0, 3]]))
    assert np.array_equal(got.numpy(), weights[[[3, 69], [0, 3]]])
    packed = to_panels(kind, raw)
    assert len(packed) == packed_bytes(kind, 70, 512)
    assert len(packed) <= 1.03 * 128 / 70 * raw.nbytes  # two panels of 64 columns


def rounded_rows(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rows [m, k], each block of 32 rounded to whole multiples of its largest size / 127."""
    blocks = x.reshape(len(x), -1, 32)
    scales = np.abs(blocks).max(2, keepdims=True) / np.float32(127)
    steps = np.float32(127) / np.abs(blocks).max(2, keepdims=True)
    return (np.rint(blocks * steps).astype(np.float64) * scales).reshape(x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out", "k"), [(70, 512), (256, 1536)])
def test_product(kind: str, out: int, k: int) -> None:
    """Rows of any number, as the plain definition has them, and each with the bits that it has alone."""
    raw = random_rows(kind, out, k)
    linear = PackedLinear(kind, to_panels(kind, raw), k, out)
    x = torch.randn(70, k, generator=torch.Generator().manual_seed(0))
    want = rounded_rows(x.numpy()) @ true_weights(kind, raw).astype(np.float64).T
    alone = torch.cat([linear(row[None]) for row in x])
    np.testing.assert_allclose(alone.numpy(), want, rtol=0, atol=2e-6 * np.abs(want).max() * 2)
    for rows in (*range(2, 10), 70):
        assert torch.equal(linear(x[:rows]), alone[:rows])


def test_rows_that_are_not_finite_or_zero() -> None:
    raw = random_rows("q4_k", 64, 512)
    linear = PackedLinear("q4_k", to_panels("q4_k", raw), 512, 64)
    x = torch.zeros(4, 512)
    x[1, 300], x[2, 3], x[3, 40] = torch.nan, torch.inf, 1.0
    y = linear(x)
    assert torch.equal(y[0], torch.zeros(64))
    assert torch.isnan(y[1]).all()
    assert not torch.isfinite(y[2]).any()
    assert torch.isfinite(y[3]).all()


def test_wrong_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = panels.product
    for name in KINDS:
        check_quantised.__wrapped__(name)
    monkeypatch.setattr(panels, "product", lambda *given: right(*given) * 1.03)
    for name in KINDS:
        with pytest.raises(ForetokenError, match=f"Products with {name} weights are wrong on this processor"):
            check_quantised.__wrapped__(name)


def test_a_layer_tries_the_products_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(panels, "check_quantised", tried.append)
    PackedLinear("q5_0", to_panels("q5_0", random_rows("q5_0", 64, 256)), 256, 64)
    assert tried == ["q5_0"]


def module_of(name: str, half: bool, strips: int) -> ir.Module:
    """A function for each kind of weights that multiplies rows with one panel by such instructions."""
    module = ir.Module()
    number = ir.IntType(64)
    for key, kind in KINDS.items():
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [number] * 6), f"{name}_{key}")
        builder = ir.IRBuilder(function.append_basic_block())
        dots.emit(dots.Dots(builder, name, half), kind, strips, *function.args)
        builder.ret_void()
    return module


@pytest.mark.parametrize(
    ("name", "triple", "cpu", "instructions"),
    [
        (dots.VNNI, "x86_64-unknown-linux-gnu", "icelake-server", ("vpdpbusd", "%zmm", "vcvtph2ps")),
        (dots.VNNI_256, "x86_64-unknown-linux-gnu", "alderlake", ("vpdpbusd", "%ymm", "vcvtph2ps")),
        (dots.PAIRS, "x86_64-unknown-linux-gnu", "haswell", ("vpmaddubsw", "vpmaddwd", "vpsignb", "vcvtph2ps")),
        (dots.NEON, "aarch64-unknown-linux-gnu", "neoverse-n1", ("sdot", "fcvtl")),
    ],
)
def test_instructions(name: str, triple: str, cpu: str, instructions: tuple[str, ...]) -> None:
    """What cannot run here is compiled, and has the instructions that it is meant for."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    for strips in (1, 2) if name == dots.VNNI else (1,):
        module = binding.parse_assembly(str(module_of(name, True, strips)))
        module.verify()
        machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=2)
        text = machine.emit_assembly(module)
        assert all(instruction in text for instruction in instructions)


@pytest.mark.parametrize(
    ("name", "half", "features", "strips"),
    [
        pytest.param(dots.PLAIN, False, "+fma", 1, id="plain"),
        pytest.param(dots.PLAIN, False, "+fma", 2, id="plain-two-strips"),
        pytest.param(
            dots.PAIRS,
            True,
            "+fma,+avx2,+f16c",
            1,
            id="pairs",
            marks=pytest.mark.skipif("+avx2" not in dots.FEATURES, reason="this processor has no AVX2"),
        ),
    ],
)
def test_other_instructions(name: str, half: bool, features: str, strips: int) -> None:
    """Other instructions that can run here compute the same bits as those that are used here."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(features=features, opt=2)
    module = binding.parse_assembly(str(module_of(name, half, strips)))
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).numpy()
    for key, kind in KINDS.items():
        packed = to_panels(key, random_rows(key, 64, 512))
        want = PackedLinear(key, packed, 512, 64)(torch.from_numpy(x)).numpy()
        lines, got = np.empty((16, 3, 16), np.int32), np.zeros((3, 64), np.float32)
        quantise(x, lines)
        call = CFUNCTYPE(None, *[c_int64] * 6)(engine.get_function_address(f"{name}_{key}"))
        call(packed.ctypes.data, 512 // kind.weights, lines.ctypes.data, 3, 3, got.ctypes.data)
        assert np.array_equal(got, want)


def packed_llama(kinds: Sequence[str]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A small Llama whose matrices are quantised, of these kinds in turn, and the same in float32."""
    packed, plain = (
        tiny("llama", random_weights=True, head_dim=64, hidden_size=256, intermediate_size=512) for _ in range(2)
    )
    names = [name for name, module in plain.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    for i, name in enumerate(names):
        kind, module = kinds[i % len(kinds)], plain.get_submodule(name)
        out, k = module.weight.shape
        raw = random_rows(kind, out, k, seed=i)
        module.weight = nn.Parameter(torch.from_numpy(unpack(kind, raw)), requires_grad=False)
        new = (
            PackedEmbedding(kind, raw)
            if isinstance(module, nn.Embedding)
            else PackedLinear(kind, to_panels(kind, raw), k, out)
        )
        packed.set_submodule(name, new)
    return packed, plain


@pytest.mark.parametrize("kinds", [("q8_0",), ("q4_1", "q5_0", "q4_0", "q5_1"), ("q4_k", "q6_k", "q5_k")], ids=str)
def test_models(kinds: tuple[str, ...]) -> None:
    """The kernel's forward is that of the dequantised model up to its rows of 8 bits; greedy text does not change."""
    packed, plain = packed_llama(kinds)
    lm = CausalLM(packed)
    assert lm.execution == "kernel"
    text = torch.randint(0, lm.vocab_size, (1, 30), generator=torch.Generator().manual_seed(0))
    rows = lm.open(1, 40)
    rows.extend(rows.join(), text[0, :-1].tolist())
    (got,) = rows.score([[int(text[0, -1])]], [[-1]])
    with torch.inference_mode():
        want = plain(text).logits[0, -1]
    distance = (got[0].softmax(-1) - want.softmax(-1)).abs().sum() / 2
    assert distance < 0.02  # rows are rounded to a 254th of their largest number
    texts = [[17, 4, 90], [25, 3, 77, 12, 8, 41], [5] * 30, [1, 2]]
    assert [check.outcome for check in bit_exact(lm, texts, 0).checks] == [OK, OK]
    found = set[str]()
    for drafter, tree in [("none", "chain:3"), (packed, "chain:3"), (packed, "kary:2x3"), ("ngram", "chain:4")]:
        engine = foretoken.load(packed, drafter=drafter, tree=tree, max_batch=len(texts))
        results = engine.generate(texts, max_new_tokens=16, temperature=0.0)
        found.add(str([result.token_ids for result in results]))
    assert len(found) == 1
