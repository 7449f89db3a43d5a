"""Budget trees: sampled children, as many at each node as are worth their nodes; decided from q before they are drawn.

A level at a time. What a node's children cost is the expected number of DISTINCT tokens among the draws. One price lam
per node, the same for the whole frontier, decides: a node reached with probability r gets the b that maximises

    r * (value of b children, and of what grows below them)  -  lam * b,

so that the marginal expected value per expected node is lam everywhere, but for a node's first child, to which more
than tokens of this step is credited. lam is also the same for all trees of a text, as nearly as the account allows:
easy stretches get more nodes than hard ones (gain.py has the model of gains, docs/trees.md the reasons).

Budget. Let e_l be the expected number of distinct draws of level l, given all before it, and e = e_1 + e_2 + .. of a
tree. An account books N - e for every tree of a text. It may be overdrawn by ADVANCE * N, never by more: after t trees
e summed over them is at most (t + ADVANCE) N, and the nodes drawn minus that sum is a martingale. So E[nodes of the
first t trees] <= (t + ADVANCE) N exactly. lam is the one at which a typical tree costs N and a share of the account, if
it costs as much of what is foreseen as the text's trees did: it depends on earlier trees alone. Where a tree would cost
more than the account gives, lam rises with its levels.
Hard cap: the number of DRAWS of a tree, which no tree's nodes exceed, is at most CAP * N: a node may take what is left
but for one draw of each chosen node after it in its level. Nothing is ever dropped after it was drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from torch import Tensor

from foretoken.core.budgeted import law_with, laws_within
from foretoken.core.laws import IID, Hub, Law, Opaque
from foretoken.core.policy import Plan, TreePolicy
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.kernel.compile import compiled
from foretoken.trees.budget_fast import certainty_loop, share_loop, spend_loop
from foretoken.trees.dynamic import DynamicTree
from foretoken.trees.gain import CHOICES, EACH, MORE, PRICE, STEPS, WIDE, Forecast, Gain, Shares

PRICES = np.exp(PRICE)
ONE = IID(1)
CAP = 3  # draws of a tree, in budgets
MOST_DRAWS = 16  # at one node
DEPTH = 40
# sum q^2 of nodes not seen yet, its quantiles at .1, .3, .. by temperature
TYPICAL = {0.3: (0.64, 0.99, 1.0, 1.0, 1.0), 0.6: (0.18, 0.54, 0.92, 0.995, 1.0), 1.0: (0.02, 0.07, 0.19, 0.53, 0.97)}
HUB_SHARE = 0.9  # of q on the hubs, above which hub draws win on average: docs/LOG.md
ENOUGH = 0.25  # of a node: what is left of a budget when a tree is done
ADVANCE = 2.0  # budgets that a text may be ahead of its account
MOST_SAVED = 2.0  # budgets: what earlier trees left unspent, as one cut short does, is kept up to here
EVENED = 4.0  # trees over which the account is evened out
SURE, OLDER = 2.0, 0.9  # trees as which the forecast counts, and what an older tree counts beside the next one
OFF = 2.0  # times by which the forecast may be off


@dataclass(frozen=True)
class Account:
    """Of a text before its next tree. saved: expected nodes that its trees left of N each; spent, foreseen: those that
    they cost and should have cost at the lowest price of each, older ones counting less."""

    saved: float
    spent: float
    foreseen: float


@dataclass(frozen=True)
class Ledger:
    """Of one tree at one level. account: as the tree was begun; saved: expected nodes that the text's trees, this one
    included, left of N each; drawn: draws; log_price: ln lam of the level above; least: the lowest price of this tree,
    its place in PRICE."""

    account: Account
    saved: float
    least: int
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
    """`budget` expected nodes a tree besides the root, over a text, on at most `depth` levels.

    mismatch, joint: of the model of gains, gain.py. hub: whether the verifier takes hub draws beside i.i.d. ones, joint
    whether it decides over whole paths. temperature: the one it is made for by `at`. most_draws: at one node.
    """

    budget: int
    depth: int = DEPTH
    most_draws: int = MOST_DRAWS
    mismatch: float = 0.32
    hub: bool = False
    joint: bool = False
    temperature: float = 1.0
    weighs: bool = field(default=True, init=False)

    def root(self, past: Account | None) -> Node:
        account = past or Account(0.0, SURE * self.budget, SURE * self.budget)
        dearer = min(max(account.spent / account.foreseen, 1 / OFF), OFF)
        wanted = max((self.budget + account.saved / EVENED) / dearer, 1.0)
        least = int(np.abs(self._sizes - wanted).argmin())
        return Node(1.0, 1.0, Ledger(account, self.budget + account.saved, least))

    def past(self, states: Sequence[Node]) -> Account:
        ledger = states[-1].ledger
        before, foreseen = ledger.account, float(self._sizes[ledger.least])
        spent = self.budget + before.saved - ledger.saved
        saved = min(ledger.saved, MOST_SAVED * self.budget)
        kept = (1 - OLDER) * SURE * self.budget  # the forecast's own share: without evidence it is believed again
        return Account(saved, OLDER * before.spent + spent + kept, OLDER * before.foreseen + foreseen + kept)

    @cached_property
    def _sizes(self) -> np.ndarray:
        """The expected nodes of a typical tree at the prices e^PRICE."""
        return self._forecast.sizes

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
        if ledger.level >= self.depth or self._left(ledger) < ENOUGH:
            return []
        price = math.exp(ledger.log_price)
        return [i for i in range(first, len(states)) if states[i].reach > price]

    def keep(self, states: Sequence[Node]) -> None:
        return None

    def plan(self, states: Sequence[Node], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        assert q is not None
        ledger = states[0].ledger
        left = self._left(ledger)
        certainty = np.empty(len(states))
        compiled(certainty_loop)(np.ascontiguousarray(q.detach().cpu().numpy()), certainty)
        shares, chosen, log_price = self._spend(states, certainty, left, ledger)
        draws, to_come = CAP * self.budget - ledger.drawn, sum(j >= 0 for j in chosen)
        taken: dict[int, Law] = {}
        expected = 0.0  # not by `sum`, which may round otherwise than the compiled tree
        for i, j in enumerate(chosen):
            if j < 0:
                continue
            to_come -= 1
            wanted = float(CHOICES[j])
            most = min(self.max_draws, draws - to_come)  # one is left for each chosen node after it
            taken[i], distinct = self._law(family, q, i, wanted, most, certainty[i])
            draws -= taken[i].k
            expected += distinct
        saved, drawn = ledger.saved - expected, CAP * self.budget - draws
        below = Ledger(ledger.account, saved, ledger.least, drawn, ledger.level + 1, log_price)
        plans: list[Plan | None] = [None] * len(states)
        for i, law in taken.items():
            reach, j = states[i].reach, chosen[i]
            first = Node(float(reach * shares.first[i, j]), float(shares.hardness[0, i]), below)
            more = law.k > 1
            other = Node(float(reach * shares.other[i, j]), float(shares.hardness[1, i]), below) if more else first
            plans[i] = Plan(law, Born(reach, first, other))
        return plans

    def _left(self, ledger: Ledger) -> float:
        """Expected nodes that may still be spent on this tree; a draw is one node at most."""
        return min(ledger.saved + ADVANCE * self.budget, float(CAP * self.budget - ledger.drawn))

    def _law(
        self, family: LawFamily, q: Float[Tensor, "m v"], i: int, wanted: float, most: int, certainty: float
    ) -> tuple[Law, float]:
        """Of row i, the law with `wanted` distinct draws expected, rounded down if not i.i.d.; and what is expected."""
        k = min(int(wanted), most)
        if family is not IID:
            return family(k), float(k)
        if wanted <= 1 or most == 1:
            return ONE, 1.0  # one draw is one token
        if wanted < 2 - certainty:  # and a second one a new token with 1 - certainty: `laws_within` without its loops
            return law_with(1, min((wanted - 1) / (1 - certainty), 1.0)), wanted
        if self.hub and k > 1 and _on_hubs(q[i], k - 1, certainty) > HUB_SHARE:
            return Hub(k), float(k)
        (law,), (expected,) = laws_within(q[i : i + 1], [wanted], [most])
        return law, expected

    def _spend(
        self, states: Sequence[Node], certainty: np.ndarray, left: float, ledger: Ledger
    ) -> tuple[Shares, list[int], float]:
        """(what children get by choice, choices, ln of the price)."""
        reach = np.array([state.reach for state in states])
        hardness = np.array([state.hardness for state in states])
        both, later = np.empty((2, len(reach), len(CHOICES))), np.empty((2, len(reach)))
        compiled(share_loop)(certainty, hardness, self._forecast.gain.constants, MORE, EACH, both, later)
        worth, size = (table[self.depth - ledger.level - 1] for table in self._forecast.tables)
        chosen = np.empty(len(reach), np.int64)
        told = reach, both, later, CHOICES, PRICES, worth, size, STEPS, WIDE, left, ledger.least
        found = compiled(spend_loop)(*told, chosen)
        return Shares(both[0], both[1], later), chosen.tolist(), float(PRICE[found])

    def grow(
        self, plans: Sequence[Plan], q: Float[Tensor, "m v"] | None, draws: Sequence[tuple[int, ...]]
    ) -> list[list[Node]]:
        assert q is not None
        return [
            _of_hubs(plan.memo, q[i], drawn) if isinstance(plan.law, Hub) else _of_independent(plan.memo, drawn)
            for i, (plan, drawn) in enumerate(zip(plans, draws, strict=True))
        ]


def _of_independent(born: Born, draws: tuple[int, ...]) -> list[Node]:
    return [born.first, *[born.other] * (len(draws) - 1)] if draws else []


def _of_hubs(born: Born, q: Float[Tensor, " v"], draws: tuple[int, ...]) -> list[Node]:
    weights = (q[list(draws)] / q.sum()).tolist()
    rarest = min(range(len(draws)), key=weights.__getitem__)  # the draw that is no hub: it stands for the rest
    weights[rarest] = 1 - (sum(weights) - weights[rarest])
    first = born.first
    return [Node(born.reach * weight, first.hardness, first.ledger) for weight in weights]


def _on_hubs(q: Float[Tensor, " v"], k: int, certainty: float) -> float:
    """The share of q on its k likeliest tokens, or a bound of it that is below HUB_SHARE: sum q^2 >= share^2 / k."""
    bound = math.sqrt(certainty * k)
    return bound if bound < 0.99 * HUB_SHARE else float(q.topk(k).values.sum() / q.sum())


@lru_cache(maxsize=64)
def _at(policy: BudgetTree, temperature: float) -> BudgetTree:
    return replace(policy, temperature=temperature)


@lru_cache(maxsize=64)  # 0.2 MB each
def _forecast(gain: Gain, depth: int) -> Forecast:
    typical = [
        float(np.interp(gain.temperature, list(TYPICAL), column)) for column in zip(*TYPICAL.values(), strict=True)
    ]
    return Forecast(gain, tuple(typical), depth)
