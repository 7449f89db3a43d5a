"""Budget trees: sampled children, as many at each node as are worth their nodes; decided from q before they are drawn.

A level at a time. What a node's children cost is the expected number of DISTINCT tokens among the draws. One price lam
per node, the same for the whole frontier, decides: a node reached with probability r gets the b that maximises

    r * (value of b children, and of what grows below them)  -  lam * b,

so that the marginal expected value per expected node is lam everywhere, but for a node's first child, to which more
than tokens of this step is credited. lam is also the same for all trees of a text, as nearly as the account allows:
easy stretches get more nodes than hard ones (gain.py has the model of gains, docs/trees-and-rules.md the reasons).

Budget. Let e_l be the expected number of distinct draws of level l, given all before it, and e = e_1 + e_2 + .. of a
tree. An account books N - e for every tree of a text. It may be overdrawn by ADVANCE * N, never by more: after t trees
e summed over them is at most (t + ADVANCE) N, and the nodes drawn minus that sum is a martingale. So E[nodes of the
first t trees] <= (t + ADVANCE) N exactly. lam is the one at which a typical tree costs N and a share of the account, if
it costs as much of what is foreseen as the text's trees did: it depends on earlier trees alone. Where a tree would cost
more than the account gives, lam rises with its levels.
Hard cap: the number of DRAWS of a tree, which no tree's nodes exceed, is at most CAP * N: a node may take what is left
but for one draw of each chosen node after it in its level. Nothing is ever dropped after it was drawn.
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

MISMATCH = 0.32  # of gain.py, fitted as its constants are
CAP = 3  # draws of a tree, in budgets
MOST_DRAWS = 16  # at one node
DEPTH = 40  # chains of 32 nodes pay at low temperatures: docs/LOG.md, "N over a text"
HUB_SHARE = 0.9  # of q on the hubs, above which hub draws win on average: docs/LOG.md, on verification rules
# How the account is evened out, as in docs/LOG.md, "N over a text": an advance of 1, 2 and 4 budgets brought 2.0, 2.9
# and 3.2% over the chain of equal mean, a price evened over 2 trees less than over 4, over 8 as much as over 4.
ADVANCE = 2.0  # budgets that a text may be ahead of its account, or that earlier trees may leave to later ones
EVENED = 4.0  # trees over which the account is evened out
SURE, OLDER = 2.0, 0.9  # trees as which the forecast counts, and what an older tree counts beside the next one
OFF = 2.0  # the factor by which the forecast may be off


@dataclass(frozen=True)
class Account:
    """A text's account before its next tree.

    saved: expected nodes that its trees left of N each.
    spent, foreseen: expected nodes that they cost, and that they should have cost at the lowest price of each; older
        trees count less.
    """

    saved: float
    spent: float
    foreseen: float


@dataclass(frozen=True)
class Ledger:
    """The account while a tree grows, before one of its levels.

    account: as the tree was begun.
    least: the lowest price of this tree, its place in PRICES.
    saved: expected nodes that the text's trees, this one included, left of N each.
    drawn: draws so far.
    level: levels so far.
    price: of a node on the level above.
    """

    account: Account
    least: int
    saved: float
    drawn: int = 0
    level: int = 0
    price: float = 0.0


class Node(NamedTuple):
    """A node's state.

    reach: the probability, as far as q tells, that the walk comes here.
    hardness: h of gain.py.
    ledger: before its level.
    """

    reach: float
    hardness: float
    ledger: Ledger


class Born(NamedTuple):
    """The states of a node's children, the first one and each other, and the node's own reach."""

    first: Node
    other: Node
    reach: float


@dataclass(frozen=True)
class BudgetTree(TreePolicy):
    """`budget` expected nodes a tree besides the root, over a text, on at most `depth` levels.

    most_draws: at one node.
    mismatch: of the model of gains, gain.py.
    hub: whether the verifier takes hub draws beside i.i.d. ones.
    joint: whether it decides over whole paths.
    temperature: the one it is made for by `at`.
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
        """What nodes will be worth and cost, by levels to go."""
        return forecast(self._gain, self.depth, typical_certainties(self.temperature))

    @cached_property
    def _sizes(self) -> np.ndarray:
        """The expected nodes of a typical tree at PRICES."""
        return self._forecast[self.depth, 1, int(np.abs(HARDNESS - 1.0).argmin())]

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
        """Expected nodes that may still be spent on this tree; a draw is one node at most."""
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

    left: expected nodes.
    least: the lowest price, its place in PRICES.
    draws, most_draws: of the level, and of one node.
    independent: whether draws are i.i.d., so that their number may be random.
    hub_share: of q on the hubs, above which a node takes hub draws.
    """

    left: float
    least: int
    draws: int
    most_draws: int
    independent: bool
    hub_share: float


class Decision(NamedTuple):
    """How the children of m nodes of one level are drawn.

    price: of a node, its place in PRICES.
    draws: numbers of draws; 0: none [m].
    one_more: the probability of one more draw [m].
    on_hubs: whether they are hub draws [m].
    drawn, expected: draws of the level at most, and the distinct ones expected.
    reach, hardness: of the first child and of each other [2, m].
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
    reach, hardness: of each node [m].
    gain, below: the model of gains, and its forecast of the level below.
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
        most = min(limits.most_draws, left - to_come)  # one is left for each chosen node after it
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

    row: draft probabilities [v].
    certainty: their sum of squares, at a sum of 1.
    most: draws.

    Returns the number of draws, the probability of one more, whether they are hub draws, and the distinct ones that are
    expected.
    """
    whole = min(int(wanted), most)
    if not limits.independent:
        return whole, 0.0, False, float(whole)
    if wanted <= 1 or most == 1:
        return 1, 0.0, False, 1.0  # one draw is one token
    if wanted < 2 - certainty:  # and a second one a new token with 1 - certainty: `number` without its loops
        return 1, min((wanted - 1) / (1 - certainty), 1.0), False, wanted
    # The k likeliest tokens have sqrt(k certainty) of q at most.
    if whole > 1 and (whole - 1) * certainty > limits.hub_share**2 and on_likeliest(row, whole - 1) > limits.hub_share:
        return whole, 0.0, True, float(whole)
    n, one_more, expected = number(row, wanted, most)
    return n, one_more, False, expected


@compiled
def on_likeliest(row: np.ndarray, k: int) -> float:
    """Return the share of the k largest numbers of a row in its sum."""
    rest, largest = row.copy(), 0.0
    for _ in range(k):
        at = np.argmax(rest)
        largest += np.float64(rest[at])
        rest[at] = 0
    return largest / total_of(row)


@compiled
def spend(reach: np.ndarray, of: Shares, below: np.ndarray, left: float, least: int, chosen: np.ndarray) -> int:
    """Find the price at which the best choices, and what is expected below them, cost `left` nodes.

    It is the nearest one that the steps of both allow, or `least` if they cost less there. The choices alone cost
    `left` at most.

    reach: of each node [m].
    of: what becomes of the children of each node.
    below: the forecast of the level below [2, hardness, price].
    left: expected nodes.
    least: the lowest price, its place in PRICES.
    chosen: is filled with the choices, places in CHOICES, -1 for none [m].

    Returns the place of the price in PRICES.
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
            nearest = abs(total - left)
            chosen[:] = trial
            found = middle
        if total <= left:
            high = middle
        else:
            low = middle
    return found
