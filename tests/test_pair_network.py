"""The optimum for two drafts by a network of V + 2 nodes, and for different drafters at one node.

Sources: Sun et al. 2024, SpecHub, appendix F; Thomas and Pal 2025, Global Resolution, Theorem 3.1 and appendices C and
D: for two independent drafters their minimal cut is that of SpecHub's network with Q(x, y) = q_1(x) q_2(y).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow
from torch import Tensor

from foretoken.core.draws import draw_iid
from foretoken.core.laws import IID, Hub, Law, WithoutReplacement
from foretoken.verify.acceptance import alpha_star

UNITS = 2**30


@dataclass(frozen=True)
class Different:
    """One draw from each of several distributions: drafters of their own at one node."""

    drafters: tuple[tuple[float, ...], ...]
    name: ClassVar[str] = "different"

    @property
    def k(self) -> int:
        return len(self.drafters)

    @property
    def num_uniforms(self) -> int:
        return self.k

    def draw(self, q: Tensor, u: Tensor) -> Tensor:
        rows = torch.tensor(self.drafters, dtype=torch.float64)
        return torch.cat([draw_iid(row.expand(len(q), -1), u[:, i : i + 1]) for i, row in enumerate(rows)], 1)

    def prob(self, q: Tensor, draws: tuple[int, ...]) -> float:
        return float(len(draws) == self.k and np.prod([row[x] for row, x in zip(self.drafters, draws, strict=True)]))


def distribution(rng: np.random.Generator, v: int) -> np.ndarray:
    return rng.dirichlet(np.full(v, 0.7))


def by_network(p: np.ndarray, pairs: np.ndarray) -> float:
    """The largest flow s -> x, capacity P(first draft x); x -> y, capacity pairs[x, y]; y -> t, capacity p(y)."""
    v = len(p)
    capacity = np.zeros((v + 2, v + 2))
    capacity[v, :v], capacity[:v, v + 1] = pairs.sum(1), p
    capacity[:v, :v] = pairs * (1 - np.eye(v))
    return maximum_flow(csr_array((capacity * UNITS).astype(np.int32)), v, v + 1).flow_value / UNITS


LAWS: dict[str, Callable[[np.random.Generator, int], Law]] = {
    "iid": lambda rng, v: IID(2),
    "without replacement": lambda rng, v: WithoutReplacement(2),
    "hub": lambda rng, v: Hub(2),
    "different": lambda rng, v: Different(tuple(tuple(distribution(rng, v)) for _ in range(2))),
}


@pytest.mark.parametrize("name", LAWS)
def test_two_drafts_need_a_network_of_v_plus_2_nodes(name: str) -> None:
    rng = np.random.default_rng(0)
    for v in (2, 3, 4, 5, 12):
        for _ in range(4):
            law, p, q = LAWS[name](rng, v), *(torch.from_numpy(distribution(rng, v)) for _ in range(2))
            pairs = np.array([[law.prob(q, (x, y)) for y in range(v)] for x in range(v)])
            assert by_network(p.numpy(), pairs) == pytest.approx(float(alpha_star(law, p, q)), abs=v * v / UNITS + 1e-7)


@pytest.mark.parametrize("k", [2, 3])
def test_with_different_drafters_the_optimum_is_the_minimum_of_a_submodular_function(k: int) -> None:
    """f(S) = p(S) - the product of q_i(S): the optimum is 1 + min f, and f(S) + f(T) >= f(S and T) + f(S or T)."""
    rng, v = np.random.default_rng(1), 4
    masks = np.array(list(itertools.product((0.0, 1.0), repeat=v)))
    for _ in range(5):
        p, drafters = distribution(rng, v), np.array([distribution(rng, v) for _ in range(k)])
        f = masks @ p - (masks @ drafters.T).prod(1)
        value = {tuple(mask): found for mask, found in zip(masks, f, strict=True)}
        law = Different(tuple(map(tuple, drafters)))
        optimum = alpha_star(law, torch.from_numpy(p), torch.full((v,), 1 / v).double())
        assert float(optimum) == pytest.approx(1 + f.min(), abs=1e-7)
        for s, t in itertools.combinations(masks, 2):
            both, either = tuple(np.minimum(s, t)), tuple(np.maximum(s, t))
            assert value[tuple(s)] + value[tuple(t)] >= value[both] + value[either] - 1e-12
