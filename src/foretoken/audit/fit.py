"""A goodness-of-fit test for the joint law of several next tokens, with a false-alarm rate that is exact.

The token tuples are sorted into cells that are fixed before anything is sampled: each likely tuple is a cell of its
own, and unlikely ones share cells. Pearson's statistic over the cells is compared with its law under the hypothesis,
which is simulated (multinomial counts), so that no chi-square approximation is needed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foretoken.core.shapes import Float

Tokens = tuple[int, ...]
Next = Callable[[list[Tokens]], Float[Tensor, "m v"]]  # p after the prompt and each of m tuples, all of one length
REST = -1  # the last of a cell's ids: stands for all tokens in this place that have no cell of their own
LEAST = 10  # the expected number of samples from which a tuple gets a cell of its own
WIDEST = 24  # the most tuples of one length whose next tokens get cells of their own
SIMULATED = 4  # the expected number of simulated statistics beyond the point from which the test rejects
CHUNK = 5_000  # statistics that are simulated at once
REPEATS = 400  # simulated tests by which the power is estimated


@dataclass
class Cells:
    """A partition of all token tuples of one length into cells.

    opened: opened[n] are the tuples of n ids whose next tokens have cells of their own.
    index: {key: number of the cell}. A key is a whole tuple, or a shorter one that stands for all its continuations, or
        one that ends in REST.
    """

    opened: list[list[Tokens]] = field(default_factory=list)
    index: dict[Tokens, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.index)

    def cell(self, ids: Tokens) -> int:
        """Return the number of the cell of the tuple `ids`."""
        known = 0
        while known < len(ids) and ids[:known] in self.opened[known]:
            known += 1
        return self.index.get(ids[:known], self.index[(*ids[: known - 1], REST)])

    def count(self, samples: Iterable[Tokens]) -> np.ndarray:
        """Return the number of `samples`, which are tuples of ids, in each cell [cells]."""
        counts = Counter(self.cell(ids) for ids in samples)
        return np.array([counts[i] for i in range(len(self))])

    def probabilities(self, p: Next) -> np.ndarray:
        """Return the exact probability of every cell, float64 [cells]; p: the law of the next token, see Next."""
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
        """Return the tuples one id longer than `ids` that are cells, or opened themselves."""
        below = self.opened[len(ids) + 1] if len(ids) + 1 < len(self.opened) else []
        known = [key for key in self.index if len(key) == len(ids) + 1 and key[:-1] == ids and key[-1] != REST]
        return known + [key for key in below if key[:-1] == ids]


def choose_cells(p: Next, num_tokens: int, num_samples: int) -> Cells:
    """Choose cells of at least LEAST expected samples each (those that end in REST may have fewer), by p alone.

    p: the law of the next token, see Next.
    num_tokens: the length of the tuples, in ids.
    num_samples: the number of samples that will be drawn.
    """
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
    """Return Pearson's sum of (observed - expected)^2 / expected, infinite where an impossible cell was seen.

    counts: the samples in each cell [..., cells]; the sum is over the last axis.
    probs: the probabilities of the cells [cells].
    """
    possible = probs > 0
    expected = counts.sum(-1, keepdims=True) * probs[possible]
    value = ((counts[..., possible] - expected) ** 2 / expected).sum(-1)
    return np.where(counts[..., ~possible].any(-1), np.inf, value)


class FitTest:
    """A test that rejects when the p-value is at most alpha, with probability <= alpha if the law is right."""

    def __init__(self, probs: np.ndarray, num_samples: int, alpha: float, seed: int) -> None:
        """Make a test and simulate its statistics under the hypothesis.

        probs: the probabilities of the cells under the hypothesis [cells], normalised here.
        num_samples: the number of samples of one test.
        alpha: the largest probability of a false alarm.
        seed: of the simulation.
        """
        self.probs, self.num_samples, self.alpha = probs / probs.sum(), num_samples, alpha
        rng = np.random.default_rng(seed)
        chunks = [
            statistic(rng.multinomial(num_samples, self.probs, size=CHUNK), self.probs)
            for _ in range(math.ceil(math.ceil(SIMULATED / alpha) / CHUNK))
        ]
        self.null = np.sort(np.concatenate(chunks))

    def p_value(self, counts: np.ndarray) -> float:
        """Return the p-value of `counts` [cells]: (1 + simulated statistics at least as large) / (1 + simulations)."""
        above = len(self.null) - np.searchsorted(self.null, statistic(counts, self.probs) * (1 - 1e-9))
        return float((1 + above) / (1 + len(self.null)))

    def rejects(self, counts: np.ndarray) -> bool:
        """Whether the test rejects the hypothesis for `counts`, the samples in each cell [cells]."""
        return self.p_value(counts) <= self.alpha

    def power(self, other: np.ndarray, seed: int) -> float:
        """Return the share of simulated samples that the test rejects if the law is another one.

        other: the true probabilities of the cells [cells].
        seed: of the simulation.
        """
        draws = np.random.default_rng(seed).multinomial(self.num_samples, other / other.sum(), size=REPEATS)
        return float(np.mean([self.rejects(counts) for counts in draws]))
