"""What a rule does on one pair (p, q), enumerated over every draw."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.audit.enumerate import remembering
from foretoken.core.laws import Law, Opaque, outcomes
from foretoken.core.shapes import Float
from foretoken.core.verifier import Verifier
from foretoken.measure.child_acceptance import draw, first_places, siblings


@dataclass(frozen=True, eq=False)
class Outcome:
    """The exact law of one verification.

    by_draw[j]: P(emitted token is draw j and none before it). accepted[x]: P(x is emitted and was drafted).
    emitted[x]: P(x is emitted); p for a lossless rule.
    """

    by_draw: Float[Tensor, " k"]
    accepted: Float[Tensor, " v"]
    emitted: Float[Tensor, " v"]

    @property
    def acceptance(self) -> float:
        return float(self.by_draw.sum())

    def total_variation(self, p: Float[Tensor, " v"]) -> float:
        """Distance in [0, 1] of what is emitted from p."""
        return float((self.emitted - p).abs().sum() / 2)


def enumerated(rule: Verifier, law: Law, p: Float[Tensor, " v"], q: Float[Tensor, " v"]) -> Outcome:
    """Every draw of `law` with its probability and its row, so for small vocabularies only."""
    by_draw = torch.zeros(law.k, dtype=torch.float64)
    accepted, emitted = torch.zeros_like(p), torch.zeros_like(p)
    rule = remembering(rule)
    for draws, prob in _outcomes(law, q):
        row = rule(p, siblings(draws, q, law))
        emitted += prob * row
        for place, x in first_places(draws):
            by_draw[place] += prob * row[x]
            accepted[x] += prob * row[x]
    return Outcome(by_draw, accepted, emitted)


def _outcomes(law: Law, q: Float[Tensor, " v"]) -> Iterable[tuple[tuple[int, ...], float]]:
    if isinstance(law, Opaque):
        return [(draw(law, q, 1, torch.Generator())[0], 1.0)]
    return outcomes(law, q)


def standard_error(mass: Float[Tensor, "n m k"]) -> float:
    """Of the mean acceptance over the n pairs, from sampling the draws; the pairs are given."""
    acceptance = mass.sum(2)
    n, m = acceptance.shape
    return float((acceptance.var(1).mean() / (m * n)).sqrt()) if m > 1 else float("nan")
