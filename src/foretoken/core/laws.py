"""Draft laws: how the children of one tree node are drawn from the drafter's distribution q.

A law is a value with a number `k`, the largest number of draws at one node. `draw` is a deterministic function of
uniforms, so that all randomness comes from the caller. `prob` is the exact probability of a tuple of draws, by which
small vocabularies are enumerated.

| law                | draws                                                      |
|--------------------|------------------------------------------------------------|
| IID                | k independent draws from q, duplicates possible; or N of   |
|                    | them, N random and independent of what is drawn            |
| Paths              | as IID, each draw the beginning of a path of its own       |
| WithoutReplacement | successive sampling; min(k, support of q) distinct tokens  |
| Hub                | the k - 1 likeliest tokens, and one draw from q on the rest |
| Opaque             | deterministic, or of unknown probability: verified without q |
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from foretoken.core.draws import draw_distinct, draw_hub, draw_iid, draw_likeliest
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_probability
from foretoken.core.random import Uniforms
from foretoken.core.shapes import Float, Int
from foretoken.kernel.sizes import NONE


@runtime_checkable
class Law(Protocol):
    """A draft law; name: as users write it."""

    name: ClassVar[str]

    @property
    def k(self) -> int:
        """The number of draws at one node, the largest one where it is random."""
        ...

    @property
    def num_uniforms(self) -> int:
        """The number of uniforms that `draw` takes for one node."""
        ...

    def draw(self, q: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m _"]:
        """Draw the children of m nodes at once.

        q: the drafter's weights of the next token after each node, of any positive sum [m, v]; scores for opaque
            children.
        u: uniforms in [0, 1) [m, num_uniforms].

        Returns token ids in draw order [m, k], NONE where the law has nothing left to draw.
        """
        ...

    def prob(self, q: Float[Tensor, " v"], draws: tuple[int, ...]) -> float:
        """Return the exact probability of a tuple of draws.

        q: the drafter's weights, of any positive sum [v].
        draws: token ids in draw order, without NONE.
        """
        ...


@dataclass(frozen=True)
class IID:
    """N independent draws from q.

    k: the largest N.
    counts: counts[n] = P(N = n) for n = 0..k, where N is random and independent of the drawn tokens; None: N = k.

    Raises ForetokenError for counts that are not k + 1 probabilities that sum to 1.
    """

    k: int = 1
    counts: tuple[float, ...] | None = None
    name: ClassVar[str] = "iid"

    def __post_init__(self) -> None:
        if self.counts is None:
            return
        if len(self.counts) != self.k + 1:
            raise ForetokenError(
                f"IID with k = {self.k} needs {self.k + 1} counts, P(N = 0) to P(N = {self.k}), not {len(self.counts)}."
            )
        if not all(math.isfinite(c) and c >= 0 for c in self.counts) or abs(math.fsum(self.counts) - 1) > 1e-9:
            raise ForetokenError(f"The counts of IID must be probabilities that sum to 1, not {self.counts}.")

    @cached_property
    def chances(self) -> tuple[float, ...]:
        """P(N = n) for n = 0..k."""
        return self.counts or (0.0,) * self.k + (1.0,)

    @property
    def num_uniforms(self) -> int:
        """One uniform per draw; where N is random one more, the last, which decides N."""
        return self.k if self.counts is None else self.k + 1

    def draw(self, q: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m k"]:
        if self.counts is None:
            return draw_iid(q, u)
        draws = draw_iid(q, u[:, :-1])
        weights = torch.tensor(self.counts, dtype=torch.float64, device=q.device).expand(len(q), -1)
        n = draw_iid(weights, u[:, -1:])
        return draws.masked_fill(torch.arange(self.k, device=draws.device) >= n, NONE)

    def prob(self, q: Float[Tensor, " v"], draws: tuple[int, ...]) -> float:
        prob = self.chances[len(draws)] if len(draws) <= self.k else 0.0
        total = float(q.double().sum())
        for x in draws:
            prob *= float(q[x]) / total
        return prob

    @cached_property
    def tails(self) -> tuple[float, ...]:
        """P(N > n) for n = 0..k-1; their sum is E[N]."""
        return tuple(math.fsum(self.chances[n + 1 :]) for n in range(self.k))

    def hit(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return g(x) = 1 - E[(1 - x)^N], the probability that some draw is in a token set of probability x under q.

        x: probabilities of sets, of any shape, which the result has too; float64, accurate near 0.
        """
        x = x.double()
        if self.counts is None:
            return -torch.expm1(self.k * torch.log1p(-x)) if self.k > 0 else torch.zeros_like(x)
        total = torch.zeros_like(x)  # g(x) = x * sum of P(N > n) (1 - x)^n: no term is negative
        for tail in reversed(self.tails):
            total = total * (1 - x) + tail
        return x * total


@dataclass(frozen=True)
class Paths(IID):
    """k independent draws from q, each the first token of an independent path: a token drawn n times begins n paths.

    At the node itself the law is IID(k), so that rules which decide from node to node treat it alike. Rules that choose
    among whole paths depend on this law: the k paths are independent of each other and have the same distribution.
    """


@dataclass(frozen=True)
class WithoutReplacement:
    """Successive sampling: each of k draws is from q restricted to the tokens that are not drawn yet."""

    k: int = 1
    name: ClassVar[str] = "without_replacement"

    @property
    def num_uniforms(self) -> int:
        return self.k

    def draw(self, q: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m k"]:
        return draw_iid(q, u) if u.shape[1] == 1 else draw_distinct(q, u)

    def prob(self, q: Float[Tensor, " v"], draws: tuple[int, ...]) -> float:
        if len(draws) != min(self.k, int((q > 0).sum())) or len(set(draws)) != len(draws):
            return 0.0
        left = q.double().clone()
        prob = 1.0
        for x in draws:
            prob *= float(left[x] / left.sum())
            left[x] = 0.0
        return prob


@dataclass(frozen=True)
class Hub:
    """The k - 1 likeliest tokens of q, always, and one draw from q restricted to the rest.

    In draw order: x_1 is drawn from q. For j = 1 .. k - 1, let t_j be the j-th likeliest token (of equals the one with
    the lower id): x_{j+1} is t_j, unless t_j is the token that was last drawn at random; then x_{j+1} is a new draw,
    from q without t_1 .. t_j. So the first draw has law q, the first i draws have law Hub(i), and Hub(2) is SpecHub's
    law: (x, a) with probability q(x), (a, x) with probability q(a) q(x) / (1 - q(a)) (Sun et al. 2024, SpecHub,
    Algorithm 3). For k > 2 the set of the draws is the greedy construction of Hu et al. 2025. Where the support has
    fewer than k tokens the draws are all of them.
    """

    k: int = 2
    name: ClassVar[str] = "hub"

    @property
    def num_uniforms(self) -> int:
        return self.k

    def draw(self, q: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m k"]:
        return draw_iid(q, u) if u.shape[1] == 1 else draw_hub(q, u)

    def prob(self, q: Float[Tensor, " v"], draws: tuple[int, ...]) -> float:
        if len(draws) != min(self.k, int((q > 0).sum())):
            return 0.0
        if not draws:
            return 1.0
        rest = q.double().clone()
        own, prob = draws[0], float(rest[draws[0]] / rest.sum())
        for x in draws[1:]:
            hub = int(rest.argmax())
            rest[hub] = 0.0
            if own == hub:
                own, prob = x, prob * float(rest[x] / rest.sum())
            elif x != hub:
                return 0.0
        return prob

    def marginals(self, q: Float[Tensor, "m v"]) -> Float[Tensor, "m v"]:
        """Return P(x is among the draws) per token x, float64 [m, v]: 1 for the hubs, q(x) / (1 - q(hubs)) else.

        q: the drafter's weights at m nodes, of any positive sum [m, v].
        """
        if self.k == 0:
            return torch.zeros_like(q, dtype=torch.float64)
        rest = q.double().clone()
        hubs = torch.zeros_like(rest)
        for _ in range(self.k - 1):
            hub = rest.argmax(1, keepdim=True)
            share = rest.gather(1, hub)
            others = (rest > 0).sum(1, keepdim=True) > 1  # the last token of the support is drawn as the rest
            hubs.scatter_(1, hub, torch.where(others, 1.0, hubs.gather(1, hub)))
            rest.scatter_(1, hub, torch.where(others, 0.0, share))
        return hubs + rest / rest.sum(1, keepdim=True)


@dataclass(frozen=True)
class Opaque:
    """Children whose probabilities are not known to the verifier: the k likeliest tokens of q, or a lookup's tokens."""

    k: int = 1
    name: ClassVar[str] = "opaque"

    @property
    def num_uniforms(self) -> int:
        return 0

    def draw(self, q: Float[Tensor, "m v"], u: Uniforms) -> Int[Tensor, "m k"]:
        return draw_likeliest(q, self.k)

    def prob(self, q: Float[Tensor, " v"], draws: tuple[int, ...]) -> float:
        raise ForetokenError("The opaque law has no density: verify its draws with exact-match.")

    def marginals(self, q: Float[Tensor, "m v"]) -> Float[Tensor, "m v"]:
        """Return 1 for the tokens that `draw` would give and 0 for the rest, float64 [m, v]; q: scores [m, v]."""
        children = draw_likeliest(q, self.k)
        chosen = torch.zeros(len(q), q.shape[1] + 1, dtype=torch.float64, device=q.device)
        return chosen.scatter_(1, torch.where(children == NONE, q.shape[1], children), 1.0)[:, :-1]


def outcomes(law: Law, q: Float[Tensor, " v"], limit: int = 1_000_000) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield every (draws, probability) of `law` with probability > 0; for small vocabularies only.

    law: any but the opaque one, which has no probabilities.
    q: the drafter's weights, of any positive sum [v].
    limit: the most tuples of k draws that are visited.

    Raises ForetokenError where there are more.
    """
    support = [int(x) for x in torch.nonzero(q > 0)]
    if len(support) ** law.k > limit:
        raise ForetokenError(
            f"Law {law.name} with {law.k} draws over {len(support)} tokens is too large to enumerate: "
            f"keep support ** draws below {limit}."
        )
    for length in range(law.k + 1):
        for draws in itertools.product(support, repeat=length):
            prob = law.prob(q, draws)
            if prob > 0:
                yield draws, prob


@dataclass(frozen=True)
class Coins:
    """The law of N i.i.d. draws as a function of k, with N ~ Binomial(k, probability), decided before q is known.

    In a chain (k = 1) this is one coin per level: the chain ends early where a coin forbids the draw.

    probability: the draft probability, in [0, 1]; at 1 the law is IID(k).
    """

    probability: float
    name: str = "iid"

    def __post_init__(self) -> None:
        check_probability(self.probability)

    def __call__(self, k: int) -> IID:
        a = self.probability
        if a == 1:
            return IID(k)
        counts = [math.comb(k, n) * a**n * (1 - a) ** (k - n) for n in range(k + 1)]
        total = math.fsum(counts)
        return IID(k, tuple(c / total for c in counts))


def draw_each(laws: Sequence[Law], q: Float[Tensor, "m v"], u: Uniforms) -> list[tuple[int, ...]]:
    """Draw the children of m nodes, each by a law of its own.

    laws: one per node [m].
    q: the drafter's weights after each node, as in `Law.draw` [m, v].
    u: uniforms in [0, 1) [m, n], n the largest `num_uniforms` of the laws.

    Returns per node its draws, without NONE.
    """
    draws: list[tuple[int, ...]] = [()] * len(laws)
    independent: dict[int, int] = {}  # node -> its number of draws
    others: dict[Law, list[int]] = {}
    for i, law in enumerate(laws):
        if isinstance(law, IID):
            independent[i] = law.k if law.counts is None else _number(law.counts, u[i : i + 1, -1:])
        elif law.k:
            others.setdefault(law, []).append(i)
    if most := max(independent.values(), default=0):  # the first n of `most` draws are n draws
        rows, uniforms = _of(list(independent), q, u)
        if most < uniforms.shape[1]:  # a slice takes as long as a draw
            uniforms = uniforms[:, :most]
        for (i, n), row in zip(independent.items(), draw_iid(rows, uniforms).tolist(), strict=True):
            draws[i] = tuple(row[:n])
    for law, places in others.items():
        rows, uniforms = _of(places, q, u)
        for i, row in zip(places, law.draw(rows, uniforms[:, : law.num_uniforms]).tolist(), strict=True):
            draws[i] = tuple(x for x in row if x != NONE) if NONE in row else tuple(row)
    return draws


def weights_of(draws: Sequence[tuple[int, ...]], q: Float[Tensor, "m v"]) -> np.ndarray:
    """Return q of every draw, float64 [m, k], k the largest number of draws; a row with fewer ends in meaningless ones.

    All are read at once, since one read of a tensor costs as much as a hundred numbers.

    draws: token ids at each of m nodes, not all of them without any.
    q: the drafter's weights after each node [m, v].
    """
    most = max(map(len, draws))
    padded = np.array([row + (0,) * (most - len(row)) for row in draws], np.int64)  # torch.tensor takes thrice as long
    return q.gather(1, torch.from_numpy(padded).to(q.device)).cpu().double().numpy()


def _of(places: list[int], q: Tensor, u: Uniforms) -> tuple[Tensor, Uniforms]:
    return (q, u) if len(places) == len(q) else (q[places], u[places])


def _number(counts: tuple[float, ...], u: Uniforms) -> int:
    """Draw the number of draws from `counts`, as in IID, by one uniform u [1, 1].

    If u is a number, Python's own lists take a twentieth of the time of `draw_iid` and give the same result.
    """
    if not isinstance(u, Tensor):
        return int(draw_iid(torch.tensor([counts], dtype=torch.float64), u))
    running = list(accumulate(counts))  # `sum` would round otherwise
    n = bisect_right(running, float(u) * running[-1])
    if n == len(counts):  # u times the sum can round up to the sum
        n = max(n for n, count in enumerate(counts) if count > 0)
    return n
