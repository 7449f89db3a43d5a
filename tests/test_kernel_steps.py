"""The steps of the compiled forward equal torch: products, rounding, attention, softmax and gates."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from foretoken.kernel import attention, processor
from foretoken.kernel.compile import compiled, use_threads
from foretoken.kernel.memory import Arena
from foretoken.kernel.product import times
from foretoken.kernel.rounding import nearest
from foretoken.kernel.simd import gate_row, softmax_row
from foretoken.kernel.sizes import DOTTED, GELU, HALVED, SILU, WHOLE
from foretoken.models.panels import PanelLinear


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
    use_threads(2)  # starts numba's threads, as a forward does
    assert torch.equal(product(x, w), product(x, w, threads=2))


def test_softmax_rows() -> None:
    run = compiled(_softmax_rows, fuse=True)
    torch.manual_seed(0)
    x = torch.randn(2, 48) * 30
    x[1, 5:] = -math.inf
    y = x.clone()
    run(y.numpy())
    # x less the largest is rounded: 90 * 2**-24 = 5e-6, which is the relative error of its exponential.
    torch.testing.assert_close(y, x.double().softmax(-1).float(), rtol=8e-6, atol=1e-37)
    for bad in (math.nan, math.inf):
        x[0, 17] = bad
        y = x.clone()
        run(y.numpy())
        assert y[0].isnan().all()
        assert y[1].isfinite().all()


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


def _softmax_rows(x):
    for row in x:
        softmax_row(row, np.float32(1), row)


def _gate(y, bias, width, curve, out):
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


def products_work(pytestconfig: pytest.Config, name: str, before: str, expected: str, **settings: str) -> None:
    """In a process of its own, after the code `before`; what it compiles is kept from run to run, under a name."""
    code = (
        f"{before}\nfrom foretoken.kernel import processor as p\nfrom foretoken.models import panels\n"
        f"assert {expected}\nassert panels._works()"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(pytestconfig.cache.mkdir(name)), **settings}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "without", "wide", "dots"),
    [("generic", None, False, False), ("sapphirerapids", "amx", True, False), ("znver4", "amx", True, True)],
)
def test_the_product_on_another_processor(
    pytestconfig: pytest.Config, name: str, without: str | None, wide: bool, dots: bool
) -> None:
    """numba is told to compile for no more than every processor can do, or for the features of this one but those of
    the matrix unit, by either maker's name. What it compiles is kept apart from this machine's own, which it would
    replace."""
    if (wide, dots, False) == (processor.WIDE, processor.DOTS, processor.MATRIX):
        pytest.skip("what this processor runs is tested by all other tests")
    if (wide and not processor.WIDE) or (dots and "+avx512bf16" not in processor.FEATURES):
        pytest.skip("this processor has no such registers or no such instruction")
    features = ",".join(feature for feature in processor.FEATURES if without and without not in feature)
    expected = f"(p.WIDE, p.DOTS, p.MATRIX) == ({wide}, {dots}, False)"
    products_work(pytestconfig, name, "", expected, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)


@pytest.mark.long
def test_the_product_where_linux_refuses_the_matrix_unit(pytestconfig: pytest.Config) -> None:
    if not processor.MATRIX:
        pytest.skip("this processor has no matrix unit")
    refuse = "import ctypes, numba; from unittest.mock import Mock; ctypes.CDLL = Mock()"
    refuse += "\nctypes.CDLL.return_value.syscall.return_value = -1"
    products_work(pytestconfig, "refused", refuse, "not p.MATRIX and '+amx-bf16' in p.FEATURES")
