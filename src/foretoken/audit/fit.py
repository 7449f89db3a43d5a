"""A goodness-of-fit test for the joint law of several next tokens, with a false-alarm rate that is exact.

The token tuples are sorted into cells that are fixed before anything is sampled: the likely tuples one by one, the
unlikely ones together. Pearson's statistic over the cells is compared with its law under the hypothesis, which is
simulated (multinomial counts), so that no chi-square approximation enters.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foretoken.core.shapes import Float

Tokens = tuple[int, ...]
Next = Callable[[list[Tokens]], Float[Tensor, "m v"]]  # p after the prompt and each of m tuples, all of one length
REST = -1  # as the last of a cell's ids: every token there that has no cell of its own
LEAST = 10  # expected samples for which a tuple gets a cell of its own
WIDEST = 24  # tuples of one length that are looked into further
SIMULATED = 4  # simulated statistics beyond the critical value
CHUNK = 5_000


@dataclass
class Cells:
    """A partition of all tuples of so many ids. keys[i] is a tuple, or a shorter one whose continuations are one
    cell, or one that ends in REST; opened: the tuples whose next tokens have cells of their own, by length."""

    opened: list[list[Tokens]] = field(default_factory=list)
    index: dict[Tokens, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.index)

    def cell(self, ids: Tokens) -> int:
        known = 0
        while known < len(ids) and ids[:known] in self.opened[known]:
            known += 1
        return self.index.get(ids[:known], self.index[(*ids[: known - 1], REST)])

    def count(self, samples: Iterable[Tokens]) -> np.ndarray:
        counts = Counter(self.cell(ids) for ids in samples)
        return np.array([counts[i] for i in range(len(self))])

    def probabilities(self, p: Next) -> np.ndarray:
        """The probability of every cell, exactly, in float64."""
        probs = np.zeros(len(self))
        reach: dict[Tokens, float] = {(): 1.0}
        for opened in self.opened:
            if not opened:
                break
            for ids, row in zip(opened, p(opened).double(), strict=True):
                row = row / row.sum()
                rest = row.clone()
                for key in self._children(ids):
                    token = key[-1]
                    reach[key] = reach[ids] * float(row[token])
                    rest[token] = 0.0
                    if key in self.index:
                        probs[self.index[key]] = reach[key]
                probs[self.index[(*ids, REST)]] = reach[ids] * float(rest.sum())
        return probs

    def _children(self, ids: Tokens) -> list[Tokens]:
        below = self.opened[len(ids) + 1] if len(ids) + 1 < len(self.opened) else []
        known = [key for key in self.index if len(key) == len(ids) + 1 and key[:-1] == ids and key[-1] != REST]
        return known + [key for key in below if key[:-1] == ids]


def choose_cells(p: Next, num_tokens: int, num_samples: int) -> Cells:
    """Cells of at least LEAST expected samples each (the rests may have fewer), chosen by p only."""
    cells = Cells([[()]])
    reach: dict[Tokens, float] = {(): 1.0}
    for length in range(1, num_tokens + 1):
        found: list[tuple[float, Tokens]] = []
        for ids, row in zip(cells.opened[-1], p(cells.opened[-1]).double(), strict=True):
            enough = torch.nonzero(reach[ids] * row / row.sum() * num_samples >= LEAST)[:, 0].tolist()
            found += [(reach[ids] * float(row[x] / row.sum()), (*ids, x)) for x in enough]
            cells.index[(*ids, REST)] = len(cells.index)
        found.sort(reverse=True)
        opened = (
            [] if length == num_tokens else [key for prob, key in found if prob * num_samples >= 3 * LEAST][:WIDEST]
        )
        reach = {key: prob for prob, key in found}
        for _, key in found:
            if key not in opened:
                cells.index[key] = len(cells.index)
        cells.opened.append(opened)
        if not opened:
            break
    return cells


def statistic(counts: np.ndarray, probs: np.ndarray) -> np.ndarray:
    """Pearson's sum (observed - expected)^2 / expected over the last axis; infinite where the impossible was seen."""
    possible = probs > 0
    expected = counts.sum(-1, keepdims=True) * probs[possible]
    value = ((counts[..., possible] - expected) ** 2 / expected).sum(-1)
    return np.where(counts[..., ~possible].any(-1), np.inf, value)


@dataclass(frozen=True)
class FitTest:
    """Rejects when the statistic reaches `critical`, which happens with probability <= alpha if the law is right."""

    probs: np.ndarray
    num_samples: int
    alpha: float
    null: np.ndarray  # simulated statistics, ascending

    @classmethod
    def prepare(cls, probs: np.ndarray, num_samples: int, alpha: float, seed: int) -> "FitTest":
        rng = np.random.default_rng(seed)
        probs = probs / probs.sum()
        draws = -(-SIMULATED // alpha)
        chunks = [
            statistic(rng.multinomial(num_samples, probs, size=CHUNK), probs) for _ in range(int(-(-draws // CHUNK)))
        ]
        return cls(probs, num_samples, alpha, np.sort(np.concatenate(chunks)))

    def p_value(self, counts: np.ndarray) -> float:
        """Monte Carlo: (1 + simulated statistics at least as large) / (1 + simulations)."""
        above = len(self.null) - np.searchsorted(self.null, statistic(counts, self.probs) * (1 - 1e-9))
        return float((1 + above) / (1 + len(self.null)))

    def rejects(self, counts: np.ndarray) -> bool:
        return self.p_value(counts) <= self.alpha

    def power(self, other: np.ndarray, seed: int, repeats: int = 400) -> float:
        """How often it would reject if the cells' true probabilities were `other`."""
        draws = np.random.default_rng(seed).multinomial(self.num_samples, other / other.sum(), size=repeats)
        return float(np.mean([self.rejects(counts) for counts in draws]))
