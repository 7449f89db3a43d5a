"""Random numbers of draws: a coin before each draw of a node (paper 002, Randomised Drafting, for one draw)."""

import math
from dataclasses import dataclass

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID


@dataclass(frozen=True)
class Coins:
    """k -> the law of N i.i.d. draws with N ~ Binomial(k, probability), which is decided before q is known.

    A chain: one coin a position, so the chain ends before its full length where a coin says so. Probability 1: IID(k).
    """

    probability: float
    name: str = "iid"

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ForetokenError(f"The draft probability is {self.probability}: it must be in [0, 1].")

    def __call__(self, k: int) -> IID:
        a = self.probability
        if a == 1:
            return IID(k)
        counts = [math.comb(k, n) * a**n * (1 - a) ** (k - n) for n in range(k + 1)]
        total = math.fsum(counts)
        return IID(k, tuple(c / total for c in counts))
