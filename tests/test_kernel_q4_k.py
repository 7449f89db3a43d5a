"""Weights that are quantised to Q4_K, read back by the gguf library."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Types

from foretoken.kernel.q4_k import quantise_q4_k


def read(blocks: np.ndarray) -> np.ndarray:
    return gguf.dequantize(blocks, Types.Q4_K)


def loss(x: np.ndarray, kind: Types) -> float:
    """The share of the variance of x that is lost."""
    blocks = quantise_q4_k(x) if kind == Types.Q4_K else gguf.quantize(x, kind)
    return float(np.square(gguf.dequantize(blocks, kind) - x).mean() / x.var())


@pytest.mark.parametrize("law", ["normal", "laplace", "uniform"])
def test_it_loses_less_than_the_other_kinds_of_4_bits(law: str) -> None:
    """At 4.5 bits per weight less than q4_1 at 5, or hardly more of a uniform law, which fills q4_1's grid."""
    x = getattr(np.random.default_rng(0), law)(size=(40, 512)).astype(np.float32)
    assert loss(x, Types.Q4_K) < loss(x, Types.Q4_1) * (1.05 if law == "uniform" else 0.9)
    assert loss(x, Types.Q4_K) < loss(x, Types.Q4_0) * 0.9


def test_a_matrix_of_such_blocks_stays_as_it_is() -> None:
    """Of what was quantised so before nothing more is lost, and little if it was rounded to bfloat16 meanwhile."""
    blocks = quantise_q4_k(np.random.default_rng(1).normal(size=(30, 768)).astype(np.float32))
    x = read(blocks)
    assert np.square(read(quantise_q4_k(x)) - x).mean() < 1e-7 * x.var()
    rounded = (x.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)
    assert np.square(read(quantise_q4_k(rounded)) - x).mean() < 1e-3 * x.var()


@pytest.mark.parametrize("scale", [0.1, 1.0, 1e3])  # below, d is a float16 of fewer digits
def test_weights_of_one_sign_or_one_size(scale: float) -> None:
    ramp = np.linspace(0.5, 1, 256, dtype=np.float32)
    rows = scale * np.stack([np.zeros(256), np.ones(256), -np.ones(256), ramp, -ramp]).astype(np.float32)
    got = read(quantise_q4_k(rows))
    assert not got[0].any()
    np.testing.assert_allclose(got[1:3], rows[1:3], rtol=2e-3)
    np.testing.assert_allclose(got[3:], rows[3:], rtol=0.05)


@pytest.mark.parametrize("outlier", [20, 1000, -1000])
def test_one_part_of_a_block_does_not_spoil_another(outlier: float) -> None:
    """Each 32 weights have a sub-scale. Beside an outlier of any size the others lose no more than by a constant."""
    x = np.random.default_rng(2).normal(size=(1, 256)).astype(np.float32)
    x[0, 5] = outlier
    error = (read(quantise_q4_k(x)) - x)[0]
    assert abs(error[5]) < 0.05 * abs(outlier)
    assert np.square(error[32:]).mean() < (0.03 if outlier == 20 else 1.1)


def test_tiny_weights_keep_their_shape() -> None:
    """The smallest float16 is 6e-8: steps below it are no steps."""
    x = np.random.default_rng(3).normal(size=(4, 256)).astype(np.float32) * np.float32(5e-6)
    assert np.square(read(quantise_q4_k(x)) - x).mean() < 0.02 * x.var()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_broken_weight_stays_broken(wrong: float) -> None:
    x = np.ones((2, 256), np.float32)
    x[1, 7] = wrong
    got = read(quantise_q4_k(x))
    assert np.isfinite(got[0]).all()
    assert not np.isfinite(got[1, 7])
