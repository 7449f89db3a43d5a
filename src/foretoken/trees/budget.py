"""Budget trees: sampled children, as many at each node as are worth their nodes; decided from q before they are drawn.

A level at a time. What a node's children cost is the expected number of DISTINCT tokens among the draws. One price lam
per node, the same for the whole frontier, decides: a node reached with probability r gets the b that maximises

    r * (value of b children, and of what grows below them)  -  lam * b,

so that the marginal expected gain per expected node is lam everywhere; lam is such that what is spent, and what the
levels below are expected to cost, is the budget (gain.py has the model of gains, docs/trees.md the reasons).

Budget. Let e_l be the expected number of distinct draws of level l, given all before it. The policy keeps e_1 + ..
<= N in every tree, and the nodes drawn minus that sum is a martingale: E[nodes] <= N exactly. Hard cap: the number of
DRAWS of a tree, which no tree's nodes exceed, is at most CAP * N. Nothing is ever dropped after it was drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
from torch import Tensor

from foretoken.core.budgeted import laws_within
from foretoken.core.compiled import compiled
from foretoken.core.laws import IID, Hub, Law, Opaque
from foretoken.core.policy import Plan, TreePolicy
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.trees.budget_fast import certainty_loop, spend_loop
from foretoken.trees.dynamic import DynamicTree
from foretoken.trees.gain import CHOICES, PRICE, START, STEPS, Forecast, Gain, Shares

PRICES = np.exp(PRICE)
CAP = 3  # draws of a tree, in budgets
MOST_DRAWS = 16  # at one node
DEPTH = 40
# sum q^2 of nodes not seen yet, its quantiles at .1, .3, .. by temperature
TYPICAL = {0.3: (0.41, 0.87, 0.99, 1.0, 1.0), 0.6: (0.15, 0.44, 0.78, 0.97, 1.0), 1.0: (0.02, 0.04, 0.1, 0.31, 0.9)}
HUB_SHARE = 0.9  # of q on the hubs, above which hub draws win on average: docs/results/verification.md
ENOUGH = 0.25  # of a node: what is left of a budget when a tree is done


@dataclass(frozen=True)
class Ledger:
    """Of one tree at one level. spent: expected nodes; drawn: draws; log_price: ln lam of the level above."""

    spent: float = 0.0
    drawn: int = 0
    level: int = 0
    log_price: float = -math.inf


@dataclass(frozen=True)
class Node:
    """reach: the probability, as far as q tells, that the walk comes here; hardness: that of gain.py."""

    reach: float
    hardness: float
    ledger: Ledger


@dataclass(frozen=True)
class Born:
    """reach: of the parent; first, other: its first child and each other, of the level below."""

    reach: float
    first: Node
    other: Node


@dataclass(frozen=True)
class BudgetTree:
    """At most `budget` expected nodes besides the root, on at most `depth` levels.

    mismatch, joint: of the model of gains, gain.py. hub: whether the verifier takes hub draws beside i.i.d. ones, joint
    whether it decides over whole paths. temperature: the one it is made for by `at`. most_draws: at one node.
    """

    budget: int
    depth: int = DEPTH
    most_draws: int = MOST_DRAWS
    mismatch: float = 0.31
    hub: bool = False
    joint: bool = False
    temperature: float = 1.0
    weighs: bool = field(default=True, init=False)

    @cached_property
    def root(self) -> Node:
        return Node(1.0, START[self.joint], Ledger())

    @cached_property
    def _forecast(self) -> Forecast:
        return _forecast(Gain(self.mismatch, self.temperature, self.joint), self.depth)

    @property
    def max_nodes(self) -> int:
        return max(1 + CAP * self.budget, DynamicTree(self.budget).max_nodes)

    @property
    def max_draws(self) -> int:
        return min(self.most_draws, CAP * self.budget)

    def sizes(self) -> tuple[int, ...]:
        """A guess: what is cut off at depth d had about two nodes a level."""
        return tuple(min(self.budget, 2 * d) for d in range(self.depth + 1))

    def laws(self, family: LawFamily) -> tuple[Law, ...]:
        """Of i.i.d. draws the fixed number and a random one, which rules of fixed numbers do not accept."""
        k = self.max_draws
        if family is not IID:
            return (family(k),)
        return (IID(k), IID(k, (*[0.0] * (k - 1), 0.5, 0.5)), *([Hub(k)] if self.hub else []))

    def at(self, family: LawFamily, temperature: float) -> TreePolicy:
        """Where nothing is sampled, as at temperature 0, the dynamic tree of the same budget."""
        return DynamicTree(self.budget) if family is Opaque else _at(self, temperature)

    def select(self, states: Sequence[Node], first: int) -> list[int]:
        """A node that would not pay for a child at the price of the level above is not scored."""
        ledger = states[-1].ledger
        if ledger.level >= self.depth or self.budget - ledger.spent < ENOUGH or ledger.drawn >= CAP * self.budget:
            return []
        price = math.exp(ledger.log_price)
        return [i for i in range(first, len(states)) if states[i].reach > price]

    def keep(self, states: Sequence[Node]) -> None:
        return None

    def plan(self, states: Sequence[Node], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        assert q is not None
        ledger = states[0].ledger
        left = self.budget - ledger.spent
        reach = np.array([state.reach for state in states])
        hardness = np.array([state.hardness for state in states])
        chosen, shares, log_price = self._spend(reach, hardness, q, left, self.depth - ledger.level - 1)
        wanted = np.where(chosen >= 0, CHOICES[chosen], 0.0)
        # Each node's share of the draws that the cap leaves: their sum cannot exceed it.
        most = np.minimum(np.floor(wanted * ((CAP * self.budget - ledger.drawn) / left)), self.max_draws).astype(int)
        taken = np.flatnonzero(most > 0)
        if not len(taken):
            return [None] * len(states)
        laws, expected = self._laws(family, q if len(taken) == len(states) else q[taken], wanted[taken], most[taken])
        spent, drawn = ledger.spent + sum(expected), ledger.drawn + sum(law.k for law in laws)
        below = Ledger(spent, drawn, ledger.level + 1, log_price)
        plans: list[Plan | None] = [None] * len(states)
        for i, law in zip(taken.tolist(), laws, strict=True):
            j = chosen[i]
            first = Node(float(reach[i] * shares.first[i, j]), float(shares.hardness[0, i]), below)
            other = Node(float(reach[i] * shares.other[i, j]), float(shares.hardness[1, i]), below)
            plans[i] = Plan(law, Born(states[i].reach, first, other))
        return plans

    def _laws(
        self, family: LawFamily, q: Float[Tensor, "m v"], wanted: np.ndarray, most: np.ndarray
    ) -> tuple[list[Law], list[float]]:
        """Laws with `wanted` distinct draws expected (rounded down, if not i.i.d.), and what is expected of each."""
        fixed = np.minimum(wanted.astype(np.int64), most).tolist()
        if family is not IID:
            return [family(k) for k in fixed], [float(k) for k in fixed]
        laws: list[Law] = [IID(1)] * len(q)  # one draw is one token
        expected = [1.0] * len(q)
        for i in np.flatnonzero(wanted > 1).tolist():
            k, row = fixed[i], q[i]
            if self.hub and k > 1 and float(row.topk(k - 1).values.sum() / row.sum()) > HUB_SHARE:
                laws[i], expected[i] = Hub(k), float(k)
            else:
                (laws[i],), (expected[i],) = laws_within(q[i : i + 1], [float(wanted[i])], [int(most[i])])
        return laws, expected

    def _spend(
        self, reach: np.ndarray, hardness: np.ndarray, q: Tensor, left: float, levels: int
    ) -> tuple[np.ndarray, Shares, float]:
        """(choices, what children get by choice, ln of the price)."""
        rows = np.ascontiguousarray(q.detach().cpu().numpy())
        certainty = np.empty(len(rows))
        compiled(certainty_loop, reorder_sums=True)(rows, certainty)
        shares = self._forecast.gain.shares(certainty, hardness)
        both = np.stack([shares.first, shares.other])
        worth, size = self._forecast.tables
        chosen, found = np.empty(len(reach), np.int64), np.empty(1, np.int64)
        told = reach, both, shares.hardness, CHOICES, PRICES, worth[levels], size[levels], STEPS, left
        compiled(spend_loop)(*told, chosen, found)
        return chosen, shares, float(PRICE[found[0]])

    def grow(self, plan: Plan, q: Float[Tensor, " v"] | None, draws: tuple[int, ...]) -> Sequence[Node]:
        born: Born = plan.memo
        if isinstance(plan.law, Hub) and q is not None:
            weights = (q[list(draws)] / q.sum()).tolist()
            rarest = min(range(len(draws)), key=weights.__getitem__)  # the draw that is no hub: it stands for the rest
            weights[rarest] = 1 - (sum(weights) - weights[rarest])
            first = born.first
            return [Node(born.reach * weight, first.hardness, first.ledger) for weight in weights]
        return [born.first, *[born.other] * (len(draws) - 1)] if draws else []


@cache
def _at(policy: BudgetTree, temperature: float) -> BudgetTree:
    return replace(policy, temperature=temperature)


@cache
def _forecast(gain: Gain, depth: int) -> Forecast:
    typical = [
        float(np.interp(gain.temperature, list(TYPICAL), column)) for column in zip(*TYPICAL.values(), strict=True)
    ]
    return Forecast(gain, tuple(typical), depth)
