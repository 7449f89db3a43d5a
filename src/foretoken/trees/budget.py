"""Budget trees: sampled children, as many at each node as are worth their cost; decided from q before they are drawn.

The tree grows level by level. The children of a node cost the expected number of DISTINCT tokens among the draws. All
nodes of a level pay the same price lam per child, and a node that the walk reaches with probability r gets the number b
of distinct children that maximises

    r * (value of b children, and of what grows below them)  -  lam * b,

so that the marginal expected value per expected node is lam everywhere, except for the first child of a node, to which
more than tokens of this step is credited. gain.py has the values. lam is also the same for all trees of a text, as
nearly as the account allows: easy stretches get more nodes than hard ones (docs/trees-and-rules.md has the reasons).

The budget. Let e_l be the expected number of distinct draws of level l, given all before it, and e = e_1 + e_2 + .. for
a tree. A text has an account, to which N - e is added for every tree. It may be overdrawn by ADVANCE * N, never by
more: after t trees e summed over them is at most (t + ADVANCE) N, and the nodes drawn minus that sum is a martingale.
So E[nodes of the first t trees] <= (t + ADVANCE) N exactly. lam is chosen before a tree grows, from the earlier trees
alone: it is the price at which a typical tree should cost N and a share of the account, if trees go on to cost more or
less than the forecast in the proportion seen so far in this text. On levels where the rest of the tree would cost more
than the account has, a higher price is taken.

The cap. The number of DRAWS of a tree, which its number of nodes never exceeds, is at most CAP * N. A node may take
what is left of it, except for one draw for each node after it on its level that is to get children. Nothing is ever
dropped after it was drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from foretoken.core.budgeted import law_with, number, sums
from foretoken.core.laws import IID, Hub, Law, Opaque
from foretoken.core.policy import Plan, TreePolicy
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import total_of
from foretoken.trees.dynamic import DynamicTree
from foretoken.trees.gain import (
    CHOICES,
    HARDNESS,
    PRICES,
    Gain,
    Shares,
    best_choice,
    forecast,
    gain_at,
    shares,
    typical_certainties,
)

MISMATCH = 0.32  # the default `mismatch` of gain.py, fitted as its constants are
CAP = 3  # the most draws of a tree, in multiples of the budget
MOST_DRAWS = 16  # the most draws at one node
DEPTH = 40  # chains of 32 nodes pay at low temperatures: docs/LOG.md, "N over a text"
HUB_SHARE = 0.9  # the q-mass of the hubs above which hub draws win on average: docs/LOG.md, on verification rules
# How the account is evened out, as in docs/LOG.md, "N over a text": an advance of 1, 2 and 4 budgets brought 2.0, 2.9
# and 3.2% over the chain of equal mean, a price evened over 2 trees less than over 4, over 8 as much as over 4.
ADVANCE = 2.0  # multiples of the budget by which the account may be overdrawn, and that earlier trees leave at most
EVENED = 4.0  # the number of trees over which the account is evened out
SURE, OLDER = 2.0, 0.9  # the number of trees that the forecast counts for; the weight of a tree beside the one after it
OFF = 2.0  # the largest factor by which trees are taken to cost more or less than the forecast


@dataclass(frozen=True)
class Account:
    """A text's account before its next tree.

    saved: the balance, in expected nodes: the sum of N - e over its trees, cut at ADVANCE budgets.
    spent, foreseen: the expected nodes that its trees cost, and those that they should have cost by the forecast at the
        lowest price of each; older trees count less.
    """

    saved: float
    spent: float
    foreseen: float


@dataclass(frozen=True)
class Ledger:
    """The account while a tree grows, before one of its levels.

    account: the text's account when the tree was begun.
    least: the lowest price of this tree, as an index in PRICES.
    saved: the balance with this tree's N added and its levels so far paid, in expected nodes.
    drawn: the largest number of draws that its laws so far allow.
    level: the number of its levels so far.
    price: the price of a node on the level above.
    """

    account: Account
    least: int
    saved: float
    drawn: int = 0
    level: int = 0
    price: float = 0.0


class Node(NamedTuple):
    """The state of a node.

    reach: an estimate of the probability that the walk comes to the node.
    hardness: h of gain.py.
    ledger: the ledger before the level of its children.
    """

    reach: float
    hardness: float
    ledger: Ledger


class Born(NamedTuple):
    """The states that the children of a node will have, computed before they are drawn.

    first, other: the state of the first child, and of each other one.
    reach: the reach of the node itself.
    """

    first: Node
    other: Node
    reach: float


@dataclass(frozen=True)
class BudgetTree(TreePolicy):
    """The policy `budget:N`. The state of a node is a Node, a sequence's past its Account.

    budget: the expected number N of nodes per tree besides the root, on average over a text.
    depth: the largest depth of a tree.
    most_draws: the largest number of draws at one node.
    mismatch: the number of this name in the model of gains, gain.py.
    hub: whether the verifier accepts hub draws beside i.i.d. ones.
    joint: whether the verifier decides over whole paths.
    temperature: the sampling temperature that the policy is made for; `at` sets it.
    """

    budget: int
    depth: int = DEPTH
    most_draws: int = MOST_DRAWS
    mismatch: float = MISMATCH
    hub: bool = False
    joint: bool = False
    temperature: float = 1.0

    @property
    def weighs(self) -> bool:
        return True

    def root(self, past: Account | None) -> Node:
        account = past or Account(0.0, SURE * self.budget, SURE * self.budget)
        dearer = min(max(account.spent / account.foreseen, 1 / OFF), OFF)
        wanted = max((self.budget + account.saved / EVENED) / dearer, 1.0)
        least = int(np.abs(self._sizes - wanted).argmin())
        return Node(1.0, 1.0, Ledger(account, least, self.budget + account.saved))

    def past(self, states: Sequence[Node]) -> Account:
        ledger = states[-1].ledger
        before, foreseen = ledger.account, float(self._sizes[ledger.least])
        spent = self.budget + before.saved - ledger.saved
        saved = min(ledger.saved, ADVANCE * self.budget)
        kept = (1 - OLDER) * SURE * self.budget  # the forecast's own share: without evidence it is believed again
        return Account(saved, OLDER * before.spent + spent + kept, OLDER * before.foreseen + foreseen + kept)

    @cached_property
    def _gain(self) -> Gain:
        return gain_at(self.temperature, self.mismatch, self.joint)

    @cached_property
    def _forecast(self) -> np.ndarray:
        """The table of `forecast` for this temperature, up to `depth` levels to go."""
        return forecast(self._gain, self.depth, typical_certainties(self.temperature))

    @cached_property
    def _sizes(self) -> np.ndarray:
        """The expected number of nodes of a typical tree besides the root, at each of PRICES."""
        return self._forecast[self.depth, 1, int(np.abs(HARDNESS - 1.0).argmin())]

    @property
    def max_nodes(self) -> int:
        return max(1 + CAP * self.budget, DynamicTree(self.budget).max_nodes)

    @property
    def max_draws(self) -> int:
        return min(self.most_draws, CAP * self.budget)

    def sizes(self) -> tuple[int, ...]:
        """Return a guess: a tree that is cut at depth d has about two nodes per level."""
        return tuple(min(self.budget, 2 * d) for d in range(self.depth + 1))

    def laws(self, family: LawFamily) -> tuple[Law, ...]:
        """Return for i.i.d. draws a fixed and a random number of them, so that rules of fixed numbers are refused."""
        k = self.max_draws
        if family is not IID:
            return (family(k),)
        return (IID(k), IID(k, (*[0.0] * (k - 1), 0.5, 0.5)), *([Hub(k)] if self.hub else []))

    def at(self, family: LawFamily, temperature: float) -> TreePolicy:
        """Return the dynamic tree of the same budget where children are not sampled, as at temperature 0."""
        return DynamicTree(self.budget) if family is Opaque else _at(self, temperature)

    def select(self, states: Sequence[Node], first: int) -> list[int]:
        """Leave out nodes for which no child would pay at the price of the level above."""
        ledger = states[-1].ledger
        if ledger.level >= self.depth or self._left(ledger) < 1:
            return []
        return [i for i in range(first, len(states)) if states[i].reach > ledger.price]

    def plan(self, states: Sequence[Node], q: Float[Tensor, "m v"] | None, family: LawFamily) -> list[Plan | None]:
        assert q is not None
        ledger, independent = states[0].ledger, family is IID
        reach, hardness = np.array([state.reach for state in states]), np.array([state.hardness for state in states])
        hub_share = HUB_SHARE if self.hub else np.inf
        draws = CAP * self.budget - ledger.drawn
        limits = Limits(self._left(ledger), ledger.least, draws, self.max_draws, independent, hub_share)
        below = self._forecast[self.depth - ledger.level - 1]
        found = decide(np.ascontiguousarray(q.detach().cpu().numpy()), reach, hardness, self._gain, below, limits)
        saved, drawn, price = ledger.saved - found.expected, ledger.drawn + found.drawn, float(PRICES[found.price])
        after = Ledger(ledger.account, ledger.least, saved, drawn, ledger.level + 1, price)
        plans: list[Plan | None] = []
        for i, state in enumerate(states):
            k, one_more = int(found.draws[i]), float(found.one_more[i])
            if k == 0:
                plans.append(None)
                continue
            law = Hub(k) if found.on_hubs[i] else law_with(k, one_more) if independent else family(k)
            first, other = (Node(float(found.reach[c, i]), float(found.hardness[c, i]), after) for c in (0, 1))
            plans.append(Plan(law, Born(first, other, state.reach)))
        return plans

    def _left(self, ledger: Ledger) -> float:
        """Return the expected nodes that may still be spent on this tree; a draw adds one node at most."""
        return min(ledger.saved + ADVANCE * self.budget, float(CAP * self.budget - ledger.drawn))

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
    return [born.first._replace(reach=born.reach * weight) for weight in weights]


@lru_cache(maxsize=64)
def _at(policy: BudgetTree, temperature: float) -> BudgetTree:
    return replace(policy, temperature=temperature)


class Limits(NamedTuple):
    """What may be spent on a level.

    left: the largest number of expected nodes.
    least: the lowest price, as an index in PRICES.
    draws: the largest number of draws on the level.
    most_draws: the largest number of draws at one node.
    independent: whether draws are i.i.d., so that their number may be random.
    hub_share: the q-mass of the hubs above which a node gets hub draws; infinite where it may not.
    """

    left: float
    least: int
    draws: int
    most_draws: int
    independent: bool
    hub_share: float


class Decision(NamedTuple):
    """How the children of m nodes of one level are drawn.

    price: the price of a node, as an index in PRICES.
    draws: the number of draws at each node, 0 where it gets no children [m].
    one_more: the probability of one more draw [m].
    on_hubs: whether they are hub draws [m].
    drawn: the largest number of draws on the level that this allows.
    expected: the expected number of distinct draws on the level.
    reach, hardness: the reach and h at the first child of each node, and at each other child of it [2, m].
    """

    price: int
    draws: np.ndarray
    one_more: np.ndarray
    on_hubs: np.ndarray
    drawn: int
    expected: float
    reach: np.ndarray
    hardness: np.ndarray


@compiled
def decide(
    q: np.ndarray, reach: np.ndarray, hardness: np.ndarray, gain: Gain, below: np.ndarray, limits: Limits
) -> Decision:
    """Decide about the children of m nodes of one level.

    q: draft probabilities after each node, of any sum [m, v].
    reach, hardness: the reach and h of each node [m].
    gain: the model of gains.
    below: its forecast for the children, as `forecast` returns it for their levels to go [2, hardness, price].
    limits: what may be spent on the level.
    """
    m = q.shape[0]
    certainty, chosen = np.empty(m), np.empty(m, np.int64)
    for i in range(m):
        total, square = sums(q[i])
        certainty[i] = square / (total * total)
    of = shares(certainty, hardness, reach, gain)
    price = spend(reach, of, below, limits.left, limits.least, chosen)
    draws, one_more, on_hubs = np.zeros(m, np.int64), np.zeros(m), np.zeros(m, np.bool_)
    below_reach = np.zeros((2, m))
    left, to_come, expected = limits.draws, np.sum(chosen >= 0), 0.0
    for i in range(m):
        j = chosen[i]
        if j < 0:
            continue
        to_come -= 1
        most = min(limits.most_draws, left - to_come)  # one draw is left for each chosen node after it
        draws[i], one_more[i], on_hubs[i], distinct = law_for(q[i], certainty[i], CHOICES[j], most, limits)
        left -= draws[i] + (one_more[i] > 0)
        expected += distinct
        for k in range(2):
            below_reach[k, i] = reach[i] * of.share[k, i, j]
    return Decision(price, draws, one_more, on_hubs, limits.draws - left, expected, below_reach, of.hardness)


@compiled
def law_for(
    row: np.ndarray, certainty: float, wanted: float, most: int, limits: Limits
) -> tuple[int, float, bool, float]:
    """Choose the law by which `wanted` distinct tokens are expected, rounded down if draws are not i.i.d.

    row: draft probabilities, of any positive sum [v].
    certainty: the sum of the squares of the normalised row.
    wanted: the expected number of distinct tokens, at least 1.
    most: the largest number of draws.
    limits: what may be spent on the level.

    Returns the number of draws, the probability of one more, whether they are hub draws, and the expected number of
    distinct tokens.
    """
    whole = min(int(wanted), most)
    if not limits.independent:
        return whole, 0.0, False, float(whole)
    if wanted <= 1 or most == 1:
        return 1, 0.0, False, 1.0  # one draw is one token
    if wanted < 2 - certainty:  # a second draw is a new token with 1 - certainty: this is `number` without its loops
        return 1, min((wanted - 1) / (1 - certainty), 1.0), False, wanted
    # The k likeliest tokens have at most sqrt(k certainty) of q: their share is computed only where that is enough.
    if whole > 1 and (whole - 1) * certainty > limits.hub_share**2 and on_likeliest(row, whole - 1) > limits.hub_share:
        return whole, 0.0, True, float(whole)
    n, one_more, expected = number(row, wanted, most)
    return n, one_more, False, expected


@compiled
def on_likeliest(row: np.ndarray, k: int) -> float:
    """Return the share of the k largest numbers of `row` in its sum; row: numbers >= 0 of positive sum [v]."""
    rest, largest = row.copy(), 0.0
    for _ in range(k):
        at = np.argmax(rest)
        largest += np.float64(rest[at])
        rest[at] = 0
    return largest / total_of(row)


@compiled
def spend(reach: np.ndarray, of: Shares, below: np.ndarray, left: float, least: int, chosen: np.ndarray) -> int:
    """Find the price at which the best numbers of children, and what is expected below them, cost `left` nodes in all.

    Of the prices tried by bisection it is the one at which this cost is nearest to `left`, or `least` if the cost is
    lower even there. The children alone never cost more than `left`.

    reach: the reach of each node [m].
    of: what becomes of the children of each node, by their number.
    below: the forecast for the children [2, hardness, price].
    left: the expected nodes that may be spent.
    least: the lowest price, as an index in PRICES.
    chosen: receives the number of children of each node, as an index in CHOICES, -1 for none [m].

    Returns the price as an index in PRICES.
    """
    m = reach.shape[0]
    trial = np.empty(m, np.int64)
    chosen[:] = -1
    low, high = least - 1, PRICES.shape[0] - 1  # the highest price buys nothing
    found, nearest = high, left
    while high - low > 1:
        middle = (low + high) // 2
        total = own = 0.0
        for i in range(m):
            _, nodes, trial[i] = best_choice(i, reach[i], of, below, PRICES[middle])
            total += nodes
            own += CHOICES[trial[i]] if trial[i] >= 0 else 0.0
        if own <= left and abs(total - left) <= nearest:
            nearest, found = abs(total - left), middle
            for i in range(m):  # an assignment of arrays takes two seconds to compile
                chosen[i] = trial[i]
        if total <= left:
            high = middle
        else:
            low = middle
    return found
