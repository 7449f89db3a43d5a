"""Priority orders: a rule for draws without replacement, within TOLERANCE of the best that any rule can do.

    orders   a few orders of the vocabulary and a weight for each, from p and q alone; the weights sum to 1
    pick     an order is drawn by its weight; the pick is the drawn token that stands first in it
    s_x      P(x is the pick) = sum over the orders of  weight P(x is drawn, and no token before it is)
    row      the pick is accepted with probability min(1, p_x / s_x), else the token comes from norm(p - min(p, s))

Whatever the orders are, the row is exact: x comes out as an accepted pick with probability min(p_x, s_x), and what is
missing comes from the residual. Which orders: no rule accepts more than

    alpha* = 1 + min over sets A of tokens  P(some draw is in A) - p(A)

and the least is a prefix A of the order of falling p/q (Hu et al. 2025). Over all mixtures of orders s ranges over the
base polytope of the submodular function A -> P(some draw is in A) (Edmonds 1970), where sum min(p, s) comes up to
alpha*. The first order is that of falling p/q. Each further one favours the tokens with s < p, and its weight is the
best on the line between s and its own law (Frank and Wolfe 1956). It has in turn those tokens before the others, each
part as it stood, and all tokens by falling p / s. No more are added when sum min(p, s) is within TOLERANCE of alpha*.

docs/theory.md, Theorem 22, has the proof.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from foretoken.core.laws import Law, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily
from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import total_of
from foretoken.verify.exact_transport import as_numpy
from foretoken.verify.ratio_groups import put_in_order
from foretoken.verify.rejection import TINY, is_single, recursive_row, rrs_acceptance
from foretoken.verify.successive import fill_first, first_times, num_drawn

TOLERANCE = 0.002  # of acceptance
MOST_ORDERS = 16
HALVINGS = 12  # of the interval in which the best weight of an order is looked for


@dataclass(frozen=True)
class Priority:
    """Within TOLERANCE of the optimum for draws without replacement, or as near as MOST_ORDERS orders come to it.

    Two draws: O(v log v). More: O(k v) for each of about 100 nodes of an integral, and for each order. On the CPU:
    rows on an accelerator are copied there and back. One draw: the standard rule.
    """

    name: str = "priority"
    laws: tuple[LawFamily, ...] = (WithoutReplacement,)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, WithoutReplacement) or is_single(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        p_row, q_row = distribution(p), distribution(siblings.q)
        drawn = num_drawn(q_row, len(siblings.draws))
        draws = siblings.draws[:drawn]  # a draw from almost nothing is passed over: without it the rule is exact too
        if drawn <= 1:
            return recursive_row(p, siblings.q, draws, without_replacement=True)
        s, picked = selection(p_row, q_row, np.array(draws, np.int64), drawn)
        row = np.empty_like(p_row)
        fill_row(p_row, s, np.array(draws, np.int64), picked, row)
        return torch.from_numpy(row).to(p)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Return sum min(p, s), the picks that are accepted.

        The token after a rejected pick may by chance be a draw too, which is not counted.
        """
        if is_single(law):
            return rrs_acceptance(p, q, law)
        accepted = torch.zeros_like(p[:, 0])
        for i, (p_row, q_row) in enumerate(zip(p.cpu().numpy(), q.cpu().numpy(), strict=True)):
            s, _ = selection(p_row, q_row, np.empty(0, np.int64), num_drawn(q_row, law.k))
            accepted[i] = float(np.minimum(p_row, s).sum())
        return accepted


def distribution(row: Float[Tensor, " v"]) -> np.ndarray:
    """Return the row normalised [v], float64, in CPU memory."""
    found = as_numpy(row).astype(np.float64)
    return found / total_of(found)


def selection(p: np.ndarray, q: np.ndarray, draws: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return s [v], and for each of the draws the probability that it is the pick [d], which need not be asked.

    p, q: probabilities [v], float64, normalised
    draws: the tokens drawn, all of them or none [d], int64
    k: draws that the law makes, `num_drawn` at most
    """
    s, picked = np.zeros_like(q), np.zeros(len(draws))
    if k == 0:
        return s, picked
    tokens = np.flatnonzero(q > 0)
    falling = np.empty(len(tokens), np.int64)
    put_in_order(-p[tokens] / q[tokens], falling)
    tokens = tokens[falling]
    places = np.empty(len(q), np.int64)
    places[tokens] = np.arange(len(tokens))
    mixed = np.empty(len(tokens))
    mix(p[tokens], q[tokens], k, first_times(q, k), places[draws], mixed, picked)
    s[tokens] = mixed
    return s, picked


@partial(compiled, reorder_sums=True)
def mix(
    p: np.ndarray, q: np.ndarray, k: int, times: np.ndarray, draws: np.ndarray, s: np.ndarray, picked: np.ndarray
) -> None:
    """Fill s and the chances of the draws by the mixture of orders above.

    p, q: probabilities of the tokens with q > 0, in the order of falling p/q [n], float64
    k: draws, `num_drawn` at most
    times: as in `fill_first`
    draws: places of the draws in that order [d], int64
    s: the result [n], float64
    picked: the result, P(each draw is the pick) [d], float64, zeros at first
    """
    n = p.shape[0]
    order, ratio = np.arange(n), np.empty(n)
    law, places = np.empty(n), np.empty(n, np.int64)
    fill_first(q, order, k, times, s)
    add_pick(draws, order, places, 1.0, picked)
    least, spare = 0.0, 0.0
    for x in range(n):
        spare += s[x] - p[x]
        least = min(least, spare)
    wanted = total_of(p) + least - TOLERANCE  # 1 + least is alpha*, where tokens with q = 0 come first
    idle = 0
    for turn in range(1, MOST_ORDERS):
        accepted = 0.0
        for x in range(n):
            accepted += min(p[x], s[x])
        if accepted >= wanted or idle == 2:
            break
        if turn % 2 == 1:
            i = 0
            for x in range(n):
                if p[x] > s[x]:
                    order[i] = x
                    i += 1
            for x in range(n):
                if not p[x] > s[x]:
                    order[i] = x
                    i += 1
        else:
            for x in range(n):
                ratio[x] = -p[x] / s[x] if p[x] > 0.0 else 0.0
            put_in_order(ratio, order)
        fill_first(q, order, k, times, law)
        weight = best_weight(p, s, law)
        idle = 0 if weight > 0.0 else idle + 1
        for x in range(n):
            s[x] += weight * (law[x] - s[x])
        add_pick(draws, order, places, weight, picked)


@partial(compiled, reorder_sums=True)
def best_weight(p: np.ndarray, s: np.ndarray, law: np.ndarray) -> float:
    """Return the w in [0, 1) for which sum min(p, (1 - w) s + w law), which is concave, is largest; arguments [n]."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        w, slope = (low + high) / 2, 0.0
        for x in range(p.shape[0]):
            step = law[x] - s[x]
            slope += step if s[x] + w * step < p[x] else 0.0
        if slope > 0.0:
            low = w
        else:
            high = w
    return low


@compiled
def add_pick(draws: np.ndarray, order: np.ndarray, places: np.ndarray, weight: float, picked: np.ndarray) -> None:
    """Give an order its weight: the draw that stands first in it is the pick with that probability, else as before.

    draws: as in `mix` [d]
    order: tokens [n], int64
    places: room for the place of each token [n], int64
    weight: of the order, in [0, 1]
    picked: P(each draw is the pick) [d], float64
    """
    if draws.shape[0] == 0:
        return
    for i in range(order.shape[0]):
        places[order[i]] = i
    first = 0
    for j in range(draws.shape[0]):
        picked[j] *= 1.0 - weight
        if places[draws[j]] < places[draws[first]]:
            first = j
    picked[first] += weight


@partial(compiled, reorder_sums=True)
def fill_row(p: np.ndarray, s: np.ndarray, draws: np.ndarray, picked: np.ndarray, row: np.ndarray) -> None:
    """Fill the row.

    p, s: probabilities [v], float64, normalised
    draws: tokens [d], int64
    picked: P(each draw is the pick) [d], float64
    row: the result [v], float64
    """
    residual = 0.0
    for x in range(p.shape[0]):
        row[x] = p[x] - min(p[x], s[x])
        residual += row[x]
    if residual <= TINY:  # p = s: reached with probability 0 up to rounding, and p serves
        residual = 1.0
        row[:] = p
    rejected = 1.0
    for j in range(draws.shape[0]):
        x = draws[j]
        rejected -= picked[j] * (1.0 if p[x] >= s[x] else p[x] / s[x])
    scale = max(rejected, 0.0) / residual
    for x in range(p.shape[0]):
        row[x] *= scale
    for j in range(draws.shape[0]):
        x = draws[j]
        row[x] += picked[j] * (1.0 if p[x] >= s[x] else p[x] / s[x])
