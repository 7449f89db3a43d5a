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
    """At 4.5 bits per weight less than q4_1 at 5; a uniform law loses nothing more by whole sub-scales."""
    x = getattr(np.random.default_rng(0), law)(size=(40, 512)).astype(np.float32)
    assert loss(x, Types.Q4_K) < loss(x, Types.Q4_1) * (1.05 if law == "uniform" else 0.9)
    assert loss(x, Types.Q4_K) < loss(x, Types.Q4_0) * 0.9


def test_a_matrix_of_such_blocks_stays_as_it_is() -> None:
    """Model weights that were published in Q4_K lose nothing more, also if they were rounded to bfloat16 meanwhile."""
    blocks = quantise_q4_k(np.random.default_rng(1).normal(size=(30, 768)).astype(np.float32))
    x = read(blocks)
    assert np.square(read(quantise_q4_k(x)) - x).mean() < 1e-7 * x.var()
    rounded = (x.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)
    assert np.square(read(quantise_q4_k(rounded)) - x).mean() < 1e-3 * x.var()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_weights_of_one_sign_or_one_size(scale: float) -> None:
    ramp = np.linspace(0.5, 1, 256, dtype=np.float32)
    rows = scale * np.stack([np.zeros(256), np.ones(256), -np.ones(256), ramp, -ramp]).astype(np.float32)
    got = read(quantise_q4_k(rows))
    assert not got[0].any()
    np.testing.assert_allclose(got[1:3], rows[1:3], rtol=2e-3)
    np.testing.assert_allclose(got[3:], rows[3:], rtol=0.05)


def test_one_part_of_a_block_does_not_spoil_another() -> None:
    """Each 32 weights have a sub-scale: an outlier costs its own part, and the others a step of d at most."""
    x = np.random.default_rng(2).normal(size=(1, 256)).astype(np.float32)
    x[0, 5] = 20
    error = np.abs(read(quantise_q4_k(x)) - x)[0]
    assert error[5] < 1
    assert np.square(error[32:]).mean() < 0.03
