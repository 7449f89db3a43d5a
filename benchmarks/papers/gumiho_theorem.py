"""Li et al. 2025, Gumiho, section 3.2: earlier positions count more. Its example, Theorem 3.1 on random instances."""

import numpy as np

from benchmarks.papers.run import Run

EVEN, EARLY = (0.8, 0.8, 0.8), (0.85, 0.8, 0.75)
PAPER = {EVEN: 1.95, EARLY: 2.04}  # citations: section 3.2
INSTANCES, QUICK_INSTANCES = 100_000, 2_000
ROUNDING = 1e-12


def expected_length(p: np.ndarray) -> np.ndarray:
    """E[L] = sum over i of p_1 ... p_i, for acceptance probabilities [..., depth], each given those before."""
    return np.asarray(np.cumprod(p, axis=-1).sum(-1))


def instance(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """(p, p~, d) under the theorem's premises: p falls, the first d gain what the others lose, and p~ stays in [0, 1].

    The premise zeta_i < p_i binds the gains too (equation 6).
    """
    depth = int(rng.integers(3, 9))
    p = np.sort(rng.random(depth))[::-1] * rng.choice([0.3, 1.0])
    if rng.random() < 0.2:
        p[:] = p[0]  # equal positions: the boundary of the premise
    d = int(rng.integers(2, depth))
    room = np.minimum(1 - p[:d], p[:d])
    total = rng.random() * min(room.sum(), p[d:].sum())
    gains, losses = _shares(rng, room, total), _shares(rng, p[d:], total)
    return p, p + np.concatenate([gains, -losses]), d


def _shares(rng: np.random.Generator, room: np.ndarray, total: float) -> np.ndarray:
    """Random numbers >= 0 below `room` that sum to `total`."""
    shares = np.zeros_like(room)
    left = total
    for i in rng.permutation(len(room)):
        rest = room.sum() - shares.sum() - room[i]
        for j in np.flatnonzero(shares):
            rest -= room[j] - shares[j]
        low = max(0.0, left - max(rest, 0.0))
        shares[i] = min(room[i], low + rng.random() * (min(room[i], left) - low))
        left -= shares[i]
    return shares


def gumiho_theorem(run: Run) -> None:
    table = run.report.table("Section 3.2: expected accepted length", ["acceptance by position", "paper", "ours"])
    for p, cited in PAPER.items():
        table.add(" ".join(map(str, p)), cited, float(expected_length(np.array(p))))
    rng, count = np.random.default_rng(run.seed), run.count(INSTANCES, QUICK_INSTANCES)
    gains = np.zeros(count)
    for i in range(count):
        p, moved, _ = instance(rng)
        gains[i] = expected_length(moved) - expected_length(p)
    other = run.report.table("Theorem 3.1: gain in expected length", ["instances", "least", "mean", "below 0"])
    other.add(count, float(gains.min()), float(gains.mean()), int((gains < -ROUNDING).sum()))
    other.notes.append("Random p falling, depth 3 to 8; the first d positions gain what the others lose.")
    rising, moved = np.array([0.9, 0.9, 0.1, 1.0]), np.array([0.9, 0.95, 0.05, 1.0])
    change = float(expected_length(moved) - expected_length(rising))
    other.notes.append(
        f"The premise that p falls is needed: (0.9 0.9 0.1 1) -> (0.9 0.95 0.05 1) changes E[L] by {change:+.4f}."
    )
