"""SpecTr-GBV (Lin et al. 2026, arXiv:2604.25925) at depth 1: its bound is below the optimum, its code is lossy."""

from itertools import product

import pytest
import torch
from torch import Tensor

from foretoken.core.laws import IID
from foretoken.verify.acceptance import acceptance, alpha_star
from rates import f64


def bound(p: Tensor, q: Tensor, k: int) -> float:
    """Theorem 5.3, the largest expected acceptance length, for one draft token: p is the target, q the drafter."""
    return float((p * (1 - (1 - (q / p).clamp(max=1)) ** k)).sum())


def emitted(p: Tensor, q: Tensor, k: int) -> Tensor:
    """The law of the token that the released code emits, whose gamma is 1."""
    accept = p * (1 - (1 - (q / p).clamp(max=1)) ** k) / (1 - (1 - q) ** k)
    residual = p * (1 - (q / p).clamp(max=1) ** k)
    law = torch.zeros_like(p)
    for draws in product(range(len(p)), repeat=k):
        reached = float(q[list(draws)].prod())
        for x in draws:
            law[x] += reached * float(accept[x])
            reached *= 1 - float(accept[x])
        law += reached * residual / residual.sum()
    return law


def test_its_bound_is_no_bound() -> None:
    """Two tokens, two drafts: `transport` accepts .9375, and the theorem says that .875 is the most."""
    p, q = f64(0.5, 0.5), f64(0.25, 0.75)
    assert bound(p, q, 2) == pytest.approx(0.875)
    assert float(acceptance("transport", IID(2), p, q)) == pytest.approx(0.9375)
    assert float(alpha_star(IID(2), p, q)) == pytest.approx(0.9375)


@pytest.mark.parametrize(("v", "k"), [(2, 2), (3, 2), (3, 3)])
def test_its_code_is_lossy(v: int, k: int) -> None:
    rng = torch.Generator().manual_seed(v)
    pairs = torch.softmax(1.5 * torch.randn(8, 2, v, generator=rng, dtype=torch.float64), -1)
    assert max(float((emitted(p, q, 1) - p).abs().max()) for p, q in pairs) < 1e-12, "one draft is the standard rule"
    assert max(float((emitted(p, q, k) - p).abs().sum() / 2) for p, q in pairs) > 0.05
