"""Quantised weights: what a GGUF file stores is what the kernel reads and multiplies with."""

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from foretoken.kernel.quantised import KINDS, pack, packed_bytes, unpack
from foretoken.models.panels import PackedEmbedding


def random_rows(kind: str, out: int, k: int, seed: int = 0) -> NDArray[np.uint8]:
    """A matrix of any codes [out, bytes per row], with scales of either sign as a file stores them."""
    rng, known = np.random.default_rng(seed), KINDS[kind]
    raw = rng.integers(0, 256, (out, k // known.weights, known.block_bytes), np.uint8)

    size = 0.3 / 2**known.bits / (1 if known.weights == 32 else 32)  # so that weights are of the same size in all kinds

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
    weights = true_weights(kind, raw)
    assert np.array_equal(unpack(kind, raw), weights)
    embedding = PackedEmbedding(kind, raw)
    assert embedding.embedding_dim == 512
    got = embedding(torch.tensor([[3, 69], [0, 3]]))
    assert np.array_equal(got.numpy(), weights[[[3, 69], [0, 3]]])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_size(kind: str) -> None:
    raw = random_rows(kind, 70, 512)
    panels = pack(kind, raw)
    assert len(panels) == packed_bytes(kind, 70, 512)
    assert len(panels) <= 1.03 * 128 / 70 * raw.nbytes  # two panels of 64 columns
