"""Exact enumeration of a rule at one node: the sum of its rows over every draw must be p.

    sum over draws of  law.prob(q, draws) * verify(p, draws, q)  ==  p

Nothing is sampled, and no tolerance is allowed but float64 rounding. Small vocabularies are enough, since a rule treats
a token by its p and q alone. The pairs include all cases that break formulas: zeros, one-hots, p == q, disjoint
supports, V = 1.
"""

import itertools
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.audit.report import largest
from foretoken.core.laws import IID, Coins, Hub, Law, Opaque, WithoutReplacement, outcomes
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import Approximate, LawFamily, RowFunction, Verifier
from foretoken.verify.published.plan import Solution, Solver

TOLERANCE = 1e-12
FAMILIES: tuple[LawFamily, ...] = (IID, WithoutReplacement, Hub, Opaque)
COINS = Coins(0.5)
RANDOM = (COINS(1), COINS(2), IID(2, (0.2, 0.0, 0.8)))  # the last as no coins give it
Pair = tuple[Tensor, Tensor]  # p, q


@dataclass(frozen=True)
class Deviation:
    """The deviation of a rule from the identity, over all pairs p, q.

    worst: the largest |sum - p| of any token, or the size of the most negative entry of a row if that is larger.
    tolerance: the largest deviation that is allowed.
    """

    worst: float
    tolerance: float = TOLERANCE

    @property
    def exact(self) -> bool:
        """Whether the deviation is within the tolerance: that of rounding, or one that an approximate rule declares."""
        return self.worst <= self.tolerance


def remembering(rule: Verifier) -> Verifier:
    """Return a rule that, if it solves for all draws at once, solves only once per p, q and law.

    An enumeration calls it with the same p and q for all draws in turn.

    rule: the rule, which is returned itself where it does not solve for all draws at once.
    """
    if not isinstance(rule, Solver):
        return rule
    solved: dict[tuple[bytes, bytes, Law], Solution] = {}

    def plan(p: Float[Tensor, " v"], q: Float[Tensor, " v"], law: Law) -> Solution:
        key = (p.numpy().tobytes(), q.numpy().tobytes(), law)
        if key not in solved:
            solved[key] = rule.plan(p, q, law)
        return solved[key]

    remembered = copy(rule)
    object.__setattr__(remembered, "plan", plan)  # the rules are frozen
    return remembered


def laws_of(rule: Verifier) -> list[Law]:
    """Return the laws for which `rule` declares that it is lossless: of 1 to 3 draws, then some of random number."""
    laws: list[Law] = [family(k) for family in FAMILIES for k in (1, 2, 3)]
    return [law for law in (*laws, *RANDOM) if rule.accepts(law)]


def laws_text(laws: list[Law]) -> str:
    """Return laws as the report writes them, such as "iid(1, 2, 0..2), hub(1)"; 0..2 is a random number of draws."""
    draws: dict[str, dict[str, None]] = {}
    for law in laws:
        few = "0.." if isinstance(law, IID) and law.counts is not None else ""
        draws.setdefault(law.name, {})[f"{few}{law.k}"] = None
    return ", ".join(f"{name}({', '.join(numbers)})" for name, numbers in draws.items())


def measure(rule: Verifier, law: Law, pairs: list[Pair]) -> Deviation:
    """Return the worst deviation of a rule from the identity.

    rule: the rule.
    law: how the children are drawn; with V tokens there are at most V ** law.k draws per pair.
    pairs: p and q, float64 [v] each.
    """
    remembered = remembering(rule)
    worst = max(deviation(remembered, law, p, q) for p, q in pairs)
    tolerance = rule.tolerance if isinstance(rule, Approximate) else TOLERANCE
    return Deviation(worst, tolerance)


def deviation(rule: RowFunction, law: Law, p: Float[Tensor, " v"], q: Float[Tensor, " v"]) -> float:
    """Return the deviation of a rule from the identity for one pair, 0 up to rounding if it is lossless.

    For an opaque law each single row must be p, since the probabilities of the draws are not known.

    rule: the rule.
    law: how the children are drawn.
    p, q: the distributions of the target and of the drafter, float64 [v].
    """
    if isinstance(law, Opaque):
        ordered = [draws for n in range(law.k + 1) for draws in itertools.permutations(range(len(p)), n)]
        return largest(float((rule(p, Siblings(draws, None, law)) - p).abs().max()) for draws in ordered)
    total, lowest = torch.zeros_like(p), 0.0
    for draws, prob in outcomes(law, q):
        row = rule(p, Siblings(draws, q, law))
        total += prob * row
        lowest = min(lowest, float(row.min()))
    return largest((float((total - p).abs().max()), -lowest))


def all_pairs(seed: int, most: int = 5, num_random: int = 1) -> list[Pair]:
    """Return pairs p, q in float64 for each vocabulary size from 1 to `most`: adversarial ones and random ones.

    seed: of the random numbers.
    most: the largest vocabulary, in tokens.
    num_random: how often two random pairs are added per size.
    """
    rng = torch.Generator().manual_seed(seed)
    return [pair for v in range(1, most + 1) for pair in _pairs(v, num_random, rng)]


def _pairs(v: int, num_random: int, rng: torch.Generator) -> Iterator[Pair]:
    def random(sharpness: float) -> Tensor:
        return torch.softmax(sharpness * torch.randn(v, generator=rng, dtype=torch.float64), 0)

    def some_zero(p: Tensor) -> Tensor:
        kept = torch.rand(v, generator=rng) < 0.6
        kept[int(torch.randint(v, (), generator=rng))] = True
        return p * kept / (p * kept).sum()

    one_hots = torch.eye(v, dtype=torch.float64)
    uniform = torch.full((v,), 1 / v, dtype=torch.float64)
    p, q = random(1.0), random(2.0)
    yield p, p.clone()
    yield uniform, q
    yield p, uniform
    yield one_hots[0], one_hots[0]
    yield one_hots[0], one_hots[-1]
    yield one_hots[0], q
    yield p, one_hots[-1]
    yield p, q * (1 + 1e-15 * torch.arange(v))  # equal up to rounding in no place, and not quite normalised
    yield p, p * (1 + 1e-15 * torch.randn(v, generator=rng, dtype=torch.float64))
    if v > 1:
        low = torch.arange(v) < v // 2
        yield p * low / (p * low).sum(), q * ~low / (q * ~low).sum()  # disjoint supports
        nearly = torch.where(torch.arange(v) == 0, 1.0, 1e-18).double()
        yield p, nearly / nearly.sum()
        yield nearly / nearly.sum(), q
    for i in range(num_random):
        yield random(3.0), random(3.0)
        yield some_zero(random(1.0)), some_zero(random(float(i)))
