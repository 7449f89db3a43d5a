"""Theorem 3.1 of Gumiho (Li et al. 2025) and its example."""

import numpy as np
import pytest

from benchmarks.papers.gumiho_theorem import EARLY, EVEN, expected_length, instance


def test_example() -> None:
    assert round(float(expected_length(np.array(EVEN))), 2) == 1.95
    assert round(float(expected_length(np.array(EARLY))), 2) == 2.04


def test_expected_length_is_the_sum_over_lengths() -> None:
    """E[L] = sum of l P(L = l), with L the number of accepted tokens before the first rejection."""
    p = [0.7, 0.4, 0.9]
    direct = 1 * 0.7 * 0.6 + 2 * 0.7 * 0.4 * 0.1 + 3 * 0.7 * 0.4 * 0.9
    assert float(expected_length(np.array(p))) == pytest.approx(direct)


def test_theorem_on_random_instances() -> None:
    rng = np.random.default_rng(0)
    for _ in range(3000):
        p, moved, d = instance(rng)
        zeta = moved - p
        assert (np.diff(p) <= 0).all()
        assert 1 < d < len(p)
        assert abs(zeta.sum()) < 1e-12
        assert (zeta[:d] >= 0).all()
        assert (zeta[d:] <= 0).all()
        assert moved.min() >= -1e-12
        assert moved.max() <= 1 + 1e-12
        assert expected_length(moved) >= expected_length(p) - 1e-12


def test_the_premise_is_needed() -> None:
    """Where p rises again, moving acceptance to the front can shorten what is accepted."""
    assert expected_length(np.array([0.9, 0.95, 0.05, 1])) < expected_length(np.array([0.9, 0.9, 0.1, 1])) - 0.03
