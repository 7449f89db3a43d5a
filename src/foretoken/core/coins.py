"""Random numbers of draws: a coin before each draw of a node (paper 002, Randomised Drafting, for one draw)."""

import math
from dataclasses import dataclass

from foretoken.core.laws import IID
from foretoken.core.limits import check_probability


@dataclass(frozen=True)
class Coins:
    """k -> the law of N i.i.d. draws with N ~ Binomial(k, probability), which is decided before q is known.

    A chain: one coin a position, so the chain ends before its full length where a coin says so. Probability 1: IID(k).
    """

    probability: float
    name: str = "iid"

    def __post_init__(self) -> None:
        check_probability(self.probability)

    def __call__(self, k: int) -> IID:
        a = self.probability
        if a == 1:
            return IID(k)
        counts = [math.comb(k, n) * a**n * (1 - a) ** (k - n) for n in range(k + 1)]
        total = math.fsum(counts)
        return IID(k, tuple(c / total for c in counts))
