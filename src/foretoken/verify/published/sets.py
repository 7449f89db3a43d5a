"""The sets of distinct tokens that a law can draw, and their probabilities: the input of the published solvers.

A rule may treat two draw tuples with the same tokens alike (average its rows over them), so the relaxed optimal
transport problem has one group of variables S(., A) per SET A of distinct tokens, of probability Q(A):

    maximise sum S(i, A)   over S >= 0, i in A,   with  sum_i S(i, A) <= Q(A)  and  sum_A S(i, A) <= p(i).

Any such S gives a lossless rule: emit i in A with S(i, A) / Q(A), else a token of p - sum_A S, normalised.

Source: Thomas and Pal 2025, Global Resolution, arXiv:2511.15898, equation 2.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law, WithoutReplacement, outcomes

MOST_SETS = 300_000
DENSE = 20_000_000  # the most numbers in a table of sets by tokens


@dataclass(frozen=True, eq=False)
class DrawSets:
    """The sets of positive probability at one q. Entry e says that token[e] belongs to the set with number owner[e].

    prob: the probability Q(A) of each set [sets].
    owner, token: the number of the set and the token id of each entry [entries]; by set in order, ids ascending in it.
    v: the number of tokens in the vocabulary.
    """

    prob: np.ndarray
    owner: np.ndarray
    token: np.ndarray
    v: int

    @cached_property
    def index(self) -> dict[tuple[int, ...], int]:
        """The number of each set, by its token ids in ascending order."""
        ends = np.cumsum(np.bincount(self.owner, minlength=len(self.prob)))[:-1]
        return {tuple(tokens.tolist()): i for i, tokens in enumerate(np.split(self.token, ends))}

    def number(self, draws: tuple[int, ...]) -> int | None:
        """Return the number of the set of these draws, None where they have no probability that a float can hold."""
        found = self.index.get(tuple(sorted(set(draws))))
        return found if found is not None and self.prob[found] > 0 else None

    def per_set(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of `values` over the entries of each set [sets]; values: one number per entry [entries]."""
        return np.bincount(self.owner, values, len(self.prob))

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of `values` over the entries of each token [v]; values: one number per entry [entries]."""
        return np.bincount(self.token, values, self.v)


def draw_sets(law: Law, q: np.ndarray) -> DrawSets:
    """Return every set of distinct tokens that a law can draw, with its probability.

    law: how the children are drawn.
    q: the drafter's distribution, float64, normalised [v].

    Raises ForetokenError where there are more than MOST_SETS of them, or the law has no probabilities (opaque).
    """
    if not isinstance(law, IID | WithoutReplacement | Hub):
        return enumerated_sets(law, q)
    support = np.flatnonzero(q > 0)
    sizes = _sizes(law, len(support))
    if isinstance(law, Hub):
        count = max(len(support) - law.k + 1, 1)
    else:
        count = sum(math.comb(len(support), size) for size in sizes)
    if count > MOST_SETS:
        raise ForetokenError(
            f"Law {law.name} with {law.k} draws over {len(support)} tokens is too large to enumerate: it makes {count} "
            f"sets of tokens, and the limit is {MOST_SETS}; draw from fewer tokens (top-k), or choose another verifier."
        )
    blocks = []  # one per size: members [sets, size], prob [sets]
    for size in sizes:
        members = _hub_members(q, support, size) if isinstance(law, Hub) else subsets(support, size)
        blocks.append((members, _probability(law, q, members)))
    prob = np.concatenate([prob for _, prob in blocks])
    widths = np.concatenate([np.full(len(members), members.shape[1]) for members, _ in blocks])
    return DrawSets(
        prob, np.repeat(np.arange(len(prob)), widths), np.concatenate([m.ravel() for m, _ in blocks]), len(q)
    )


def enumerated_sets(law: Law, q: np.ndarray) -> DrawSets:
    """Return the draw sets of a law of any kind, by going through all tuples of draws.

    law: one with probabilities, that is any but the opaque one.
    q: the drafter's distribution, float64, normalised [v].

    Raises ForetokenError where there are more tuples than `core.laws.outcomes` visits.
    """
    chances: dict[tuple[int, ...], float] = {}
    for draws, chance in outcomes(law, torch.from_numpy(q)):
        key = tuple(sorted(set(draws)))
        chances[key] = chances.get(key, 0.0) + chance
    owner = np.repeat(np.arange(len(chances)), [len(key) for key in chances])
    token = np.array([x for key in chances for x in key], dtype=np.int64)
    return DrawSets(np.array([*chances.values()]), owner, token, len(q))


def _sizes(law: IID | WithoutReplacement | Hub, support: int) -> list[int]:
    if isinstance(law, WithoutReplacement | Hub):
        return [min(law.k, support)]
    return list(range(0 if law.chances[0] > 0 else 1, min(law.k, support) + 1))


def subsets(tokens: np.ndarray, size: int) -> np.ndarray:
    """Return all sets of `size` of these `tokens`, as rows [sets, size]."""
    chosen = list(itertools.combinations(tokens.tolist(), size))
    return np.array(chosen, dtype=np.int64).reshape(len(chosen), size)


def _hub_members(q: np.ndarray, support: np.ndarray, size: int) -> np.ndarray:
    ranked = support[np.argsort(-q[support], kind="stable")]
    hubs, rest = ranked[: size - 1], ranked[size - 1 :]
    return np.sort(np.concatenate([np.tile(hubs, (len(rest), 1)), rest[:, None]], axis=1), axis=1)


def _probability(law: Law, q: np.ndarray, members: np.ndarray) -> np.ndarray:
    if isinstance(law, IID):
        return iid_probability(q, members, law)
    if isinstance(law, Hub):
        marginal = law.marginals(torch.from_numpy(q)[None])[0].numpy()
        return marginal[members].prod(axis=1)
    others = _outside(q, members)[:, None]
    prob = np.zeros(len(members))
    for order in itertools.permutations(range(members.shape[1])):
        weights = q[members[:, order]]
        # What is left before each draw is summed, not subtracted from 1: nothing cancels in a peaked q.
        left = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1] + others
        prob += (weights / left).prod(axis=1)
    return prob


def _outside(q: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Return the q-mass outside each set [sets]."""
    q_support = q[q > 0]
    if len(members) * len(q_support) > DENSE:
        return np.maximum(1 - q[members].sum(axis=1), 0)
    rest = np.tile(q_support, (len(members), 1))
    np.put_along_axis(rest, np.cumsum(q > 0)[members] - 1, 0.0, axis=1)
    return rest.sum(axis=1)


def iid_probability(q: np.ndarray, members: np.ndarray, law: IID, free: float = 0.0) -> np.ndarray:
    """Return P(the draws are exactly a set, but for draws of free tokens, which do not count) for each set [sets].

    It is computed by exponential generating functions: N! times the coefficient of t^N in e^(free t) prod_i (e^(q_i t)
    - 1), whose terms are all positive, so that nothing cancels.

    q: the probability of each token under one draw, float64 [v].
    members: the tokens of each set, as indices into q [sets, size].
    law: the i.i.d. draws, of fixed or random number.
    free: the q-mass of the free tokens, which are in none of the sets.
    """
    n = law.k
    factorials = np.array([math.factorial(j) for j in range(n + 1)], dtype=float)
    powers = np.arange(n + 1)
    series = np.tile(free**powers / factorials, (len(members), 1))  # coefficients of t^0 .. t^n
    for column in range(members.shape[1]):
        factor = q[members[:, column], None] ** powers / factorials
        factor[:, 0] = 0.0
        series = np.stack([(series[:, : j + 1] * factor[:, j::-1]).sum(axis=1) for j in range(n + 1)], axis=1)
    return series @ (factorials * np.array(law.chances))


def hall_set(sets: DrawSets, law: Law, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return H, a minimiser of p(H) - P(all draws in H), as a mask [v]; alpha* is 1 plus that minimum (`alpha_star`).

    For i.i.d. draws and draws without replacement H is a suffix of the tokens in the order of falling p/q. For hub
    draws it is one too, if the hubs are put last: they are always drawn, so that no draws are inside H without them.

    sets: what the law can draw, from `draw_sets`.
    law: one of these three.
    p, q: probabilities of the target and of the drafter [v], float64, normalised.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0, p / q, np.inf)
    if isinstance(law, Hub):
        hits = sets.per_token(sets.prob[sets.owner])
        ratio = np.where(hits > 1 - 1e-15, -1.0, ratio)
    order = np.argsort(-ratio, kind="stable")
    rank = np.empty(sets.v, dtype=np.int64)
    rank[order] = np.arange(sets.v)
    first = np.full(len(sets.prob), sets.v)  # the lowest rank in each set: suffixes from there or before contain it
    np.minimum.at(first, sets.owner, rank[sets.token])
    caught = np.bincount(first, sets.prob, sets.v + 1)[::-1].cumsum()[::-1]
    weight = np.append(p[order][::-1].cumsum()[::-1], 0.0)
    start = int(np.argmin(weight - caught))
    return rank >= start
