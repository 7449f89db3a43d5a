"""Hierarchical speculative decoding (HSD; Zhou et al. 2026, arXiv:2601.05724) beside `block`, on every chain of draws.

Its Algorithm 2 is block verification, and what accepts more is its code, which is lossy. docs/theory.md has the proof.
"""

from collections.abc import Callable

import pytest
import torch

from foretoken.audit.decoding import deviation
from foretoken.verify import VERIFIERS
from rates import summed
from thinning import one_in
from whole_texts import Outcomes, Path, Table, add_text, backwards, chance, pair, paths, steps

SIZES = [(2, 2), (3, 2), (2, 3), (3, 3)]


def ratios(p: Table, q: Table, path: Path) -> list[float]:
    """r(X_1:t) for t = 0 .. the length."""
    return [chance(p, path[:t]) / chance(q, path[:t]) for t in range(len(path) + 1)]


def algorithm_2(p: Table, q: Table, path: Path) -> Outcomes:
    """Definitions 4 to 6, equations 16 to 20: ratios capped by the largest one before, one resampled token."""
    r, length = ratios(p, q, path), len(path)

    def capped(t: int) -> float:
        """r(X_1:m) of the maximum prefix ratio index m(X_1:t), 1 where no ratio before t exceeds 1."""
        return max([1.0, *r[1:t]])

    accept, rows = [], []
    for t in range(length):
        star = r[t] / capped(t + 1) * p[path[:t]] / q[path[:t]]  # r* of every token after X_1:t
        more = ((star - 1).clamp(min=0) * q[path[:t]]).sum()
        less = ((1 - star).clamp(min=0) * q[path[:t]]).sum()
        accept.append(float(more / less))
        rows.append(q[path[:t]] * (star - 1).clamp(min=0))
    return backwards(path, [*accept, min(1.0, r[length] / capped(length))], [*rows, p[path]])


def listing_2(p: Table, q: Table, path: Path) -> Outcomes:
    """The paper's code: as Algorithm 2, but the whole path is accepted with min(1, r), without the cap."""
    r, length = ratios(p, q, path), len(path)
    accept, rows = [], []
    for t in range(length):
        diff = r[t] / max([1.0, *r[1 : t + 1]]) * p[path[:t]] - q[path[:t]]
        rows.append(diff.clamp(min=0))
        accept.append(float(rows[-1].sum() / torch.maximum(rows[-1].sum(), (-diff).clamp(min=0).sum())))
    return backwards(path, [*accept, min(1.0, r[length])], [*rows, p[path]])


def released(p: Table, q: Table, path: Path) -> Outcomes:
    """algorithm_clean.py of the authors' repository, commit 8974510, with HSD=True: the cap is min(1, r) of the prefix
    itself, a prefix whose next ratio is 1 or more is always kept, and nothing is drawn where no residual is left."""
    r, length = ratios(p, q, path), len(path)
    accept, rows = [], []
    for t in range(length):
        diff = min(1.0, r[t]) * p[path[:t]] - q[path[:t]]
        rows.append(diff.clamp(min=0))
        share = float(rows[-1].sum() / torch.maximum(rows[-1].sum(), (-diff).clamp(min=0).sum()))
        accept.append(1.0 if r[t + 1] >= 1 else share)
    return backwards(path, [*accept, min(1.0, r[length])], [*rows, p[path]])


def block(p: Table, q: Table, path: Path) -> Outcomes:
    """The rule of this repository."""
    return summed(steps(VERIFIERS["block"], p, q, path))


def measured(rule: Callable[[Table, Table, Path], Outcomes], v: int, length: int, seed: int) -> tuple[float, float]:
    """(TV of the law of the next length + 1 tokens from the target's, tokens accepted); the text goes on with p."""
    p, q = pair(v, length, seed)
    law: dict[Path, float] = {}
    accepted = 0.0
    for path in paths(v, length):
        drawn = chance(q, path)
        for (kept, token), prob in rule(p, q, path).items():
            accepted += drawn * prob * len(kept)
            add_text(law, kept if token is None else (*kept, token), drawn * prob, p, length + 1)
    return sum(abs(law[path] - chance(p, path)) for path in law) / 2, accepted


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("v", "length"), SIZES)
def test_algorithm_2_is_block_verification(v: int, length: int) -> None:
    """Given the drafts, each accepted prefix and the token after it have the same probability."""
    for seed in range(3):
        p, q = pair(v, length, seed)
        for path in paths(v, length):
            assert deviation(algorithm_2(p, q, path), block(p, q, path)) < 1e-12


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("code", "v", "length"), one_in(3, [(code, *size) for code in (listing_2, released) for size in SIZES])
)
def test_its_code_accepts_more_and_is_lossy(code: Callable[..., Outcomes], v: int, length: int) -> None:
    theirs, ours = ([measured(rule, v, length, seed) for seed in range(6)] for rule in (code, block))
    assert max(tv for tv, _ in ours) < 1e-12
    assert max(tv for tv, _ in theirs) > 0.02
    assert sum(accepted for _, accepted in theirs) > sum(accepted for _, accepted in ours) + 0.01
