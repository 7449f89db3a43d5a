"""What a rule does on one pair (p, q): enumerated over every draw, or averaged over sampled draws.

A draw is accepted when the emitted token is that draw. Given the draws its probability is the row's mass there (a
token drawn twice counts at its first place), so no token is ever sampled: sampling is over the draws alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.laws import NONE, Law, Opaque, outcomes
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import Verifier
from foretoken.verify.published.plan import Solver


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
    row_given = rows_of(rule, law, p, q)
    for draws, prob in _outcomes(law, q):
        row = row_given(draws)
        emitted += prob * row
        for place, x in first_places(draws):
            by_draw[place] += prob * row[x]
            accepted[x] += prob * row[x]
    return Outcome(by_draw, accepted, emitted)


def _outcomes(law: Law, q: Float[Tensor, " v"]) -> Iterable[tuple[tuple[int, ...], float]]:
    if isinstance(law, Opaque):
        return [(draw(law, q, 1, torch.Generator())[0], 1.0)]
    return outcomes(law, q)


def rows_of(
    rule: Verifier, law: Law, p: Float[Tensor, " v"], q: Float[Tensor, " v"]
) -> Callable[[tuple[int, ...]], Float[Tensor, " v"]]:
    """draws -> row; a solver solves once for all of them."""
    if isinstance(rule, Solver):
        plan = rule.plan(p, q, law)
        return lambda draws: torch.from_numpy(plan.row(draws)).to(p)
    return lambda draws: rule(p, siblings(draws, q, law))


def siblings(draws: tuple[int, ...], q: Float[Tensor, " v"], law: Law) -> Siblings:
    return Siblings(draws, None if isinstance(law, Opaque) else q, law)


def draw(law: Law, q: Float[Tensor, " v"], times: int, rng: torch.Generator) -> list[tuple[int, ...]]:
    """The draws of one node, again and again."""
    u = torch.rand(times, law.num_uniforms, generator=rng, dtype=torch.float64)
    return [tuple(x for x in row if x != NONE) for row in law.draw(q.expand(times, -1), u).tolist()]


def sampled(
    rule: Verifier, law: Law, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], num_draws: int, seed: int
) -> Float[Tensor, "n m k"]:
    """P(emitted token is draw j | draws), for `num_draws` draws m at each of n pairs."""
    rng = torch.Generator().manual_seed(seed)
    mass = torch.zeros(len(p), num_draws, law.k, dtype=torch.float64)
    for i in range(len(p)):
        for j, draws in enumerate(draw(law, q[i], num_draws, rng)):
            row = rule(p[i], siblings(draws, q[i], law))
            for place, x in first_places(draws):
                mass[i, j, place] = row[x]
    return mass


def first_places(draws: Sequence[int]) -> list[tuple[int, int]]:
    """(place, token) of the distinct draws, each at its first place."""
    return [(place, x) for place, x in enumerate(draws) if x not in draws[:place]]


def standard_error(mass: Float[Tensor, "n m k"]) -> float:
    """Of the mean acceptance over the n pairs, from sampling the draws; the pairs are given."""
    acceptance = mass.sum(2)
    n, m = acceptance.shape
    return float((acceptance.var(1).mean() / (m * n)).sqrt()) if m > 1 else float("nan")
