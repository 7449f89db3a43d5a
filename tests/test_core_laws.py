"""Laws: what `draw` draws is what `prob` says."""

import math

import pytest
import torch
from torch import Tensor

from foretoken.core.draws import (
    draw_distinct,
    draw_hub,
    draw_iid,
    draw_likeliest,
    hub_inverse_cdf,
    inverse_cdf,
    largest_scores,
    successive_inverse_cdf,
)
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, NONE, Hub, Law, Opaque, WithoutReplacement, outcomes
from rates import summed
from thinning import one_in

RANDOM_Q = [0.15, 0.35, 0.3, 0.2]


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("law", "n"), [*((family(2), 400) for family in (IID, WithoutReplacement, Hub)),
                                       (IID(2, (0.2, 0.5, 0.3)), 60)], ids=str)  # fmt: skip
@pytest.mark.parametrize("q", one_in(3, [RANDOM_Q, [0.0, 0.6, 0.0, 0.4], [0.3, 0.6, 0.2]]), ids=str)
def test_draw_integrates_to_prob(law: Law, n: int, q: list[float]) -> None:
    """Midpoints of a grid of n uniforms a dimension: no interval of the inverse misses more than one cell at an end."""
    grid = [(torch.arange(n, dtype=torch.float64) + 0.5) / n] * law.num_uniforms
    u = torch.stack(torch.meshgrid(*grid, indexing="ij"), -1).reshape(-1, law.num_uniforms)
    seen, times = law.draw(f64(q).expand(len(u), -1), u).unique(dim=0, return_counts=True)
    got = {tuple(x for x in row if x != NONE): c / len(u) for row, c in zip(seen.tolist(), times.tolist(), strict=True)}
    wanted = dict(outcomes(law, f64(q)))
    assert got.keys() == wanted.keys()
    assert all(abs(got[x] - wanted[x]) <= 2 * law.num_uniforms / n for x in got)


def test_successive_sampling_by_hand() -> None:
    q = f64([0.5, 0.3, 0.2])
    law = WithoutReplacement(2)
    assert law.prob(q, (0, 2)) == pytest.approx(0.5 * 0.2 / 0.5)
    assert law.prob(q, (2, 0)) == pytest.approx(0.2 * 0.5 / 0.8)
    assert law.prob(q, (0, 0)) == 0
    assert law.prob(q, (0,)) == 0
    # The second uniform falls among what the first left: 0.3 and 0.2 of 0.5.
    u = f64([0.1, 0.59]), f64([0.1, 0.61])
    assert law.draw(q[None].expand(2, -1), torch.stack(u)).tolist() == [[0, 1], [0, 2]]


def test_exhausted_support() -> None:
    q = f64([0.0, 0.7, 0.0, 0.3])
    law = WithoutReplacement(3)
    drawn = law.draw(q[None], torch.zeros(1, 3, dtype=torch.float64))
    assert drawn.tolist() == [[1, 3, NONE]]
    assert law.prob(q, (1, 3)) == pytest.approx(0.7)
    assert dict(outcomes(law, q)) == pytest.approx({(1, 3): 0.7, (3, 1): 0.3})
    last = law.draw(f64([0.0, 1.0])[None], torch.full((1, 3), 0.999, dtype=torch.float64))
    assert last.tolist() == [[1, NONE, NONE]]


def test_a_prefix_of_the_draws_has_the_law_of_fewer() -> None:
    """The drafter draws as many for all nodes of a level, and keeps the first ones where a node wants fewer."""
    q = f64(RANDOM_Q)
    for family in (IID, WithoutReplacement, Hub):
        fewer = summed((draws[:2], prob) for draws, prob in outcomes(family(3), q))
        assert fewer == pytest.approx(dict(outcomes(family(2), q)))


def test_hub_of_two_is_spechubs_law() -> None:
    """Sun et al. 2024, SpecHub, Algorithm 3: Q(x, a) = q(x), Q(a, x) = q(a) q(x) / (1 - q(a))."""
    q = f64([0.3, 0.5, 0.2])
    wanted = {(0, 1): 0.3, (2, 1): 0.2, (1, 0): 0.5 * 0.3 / 0.5, (1, 2): 0.5 * 0.2 / 0.5}
    assert dict(outcomes(Hub(2), q)) == pytest.approx(wanted)
    u = f64([0.1, 0.9]), f64([0.31, 0.59]), f64([0.31, 0.61])
    assert Hub(2).draw(q[None].expand(3, -1), torch.stack(u)).tolist() == [[0, 1], [1, 0], [1, 2]]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_hubs_are_always_drawn_and_the_rest_in_proportion(k: int) -> None:
    q = f64([0.15, 0.35, 0.3, 0.15, 0.05])
    hubs = [1, 2, 0, 3][: k - 1]  # tokens 0 and 3 tie: the lower id comes first
    found = dict.fromkeys(range(5), 0.0)
    first = dict.fromkeys(range(5), 0.0)
    for draws, prob in outcomes(Hub(k), q):
        assert set(hubs) < set(draws)
        assert len(set(draws)) == k
        found[(set(draws) - set(hubs)).pop()] += prob
        first[draws[0]] += prob
    rest = 1 - float(q[hubs].sum())
    assert found == pytest.approx({x: 0.0 if x in hubs else float(q[x]) / rest for x in range(5)})
    assert first == pytest.approx(dict(enumerate(q.tolist())))  # the first draw is an honest draw from q


def test_hub_with_less_support_than_draws() -> None:
    q = f64([0.0, 0.7, 0.0, 0.3])
    u = f64([[0.1, 0.5, 0.5], [0.9, 0.5, 0.5]])
    assert Hub(3).draw(q[None].expand(2, -1), u).tolist() == [[1, 3, NONE], [3, 1, NONE]]
    assert dict(outcomes(Hub(3), q)) == pytest.approx({(1, 3): 0.7, (3, 1): 0.3})
    certain = Hub(2).draw(f64([[0.0, 1.0]]), f64([[0.999, 0.999]]))
    assert certain.tolist() == [[1, NONE]]
    assert dict(outcomes(Hub(2), f64([0.0, 1.0]))) == {(1,): 1.0}
    assert list(outcomes(Hub(0), q)) == [((), 1.0)]


@pytest.mark.parametrize("law", [WithoutReplacement(3), Hub(3)], ids=str)
def test_draw_leaves_q_alone(law: Law) -> None:
    q = f64(RANDOM_Q)[None]
    before = q.clone()
    law.draw(q, torch.full((1, 3), 0.5, dtype=torch.float64))
    assert torch.equal(q, before)


def test_inverse_cdf_edges() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    below_one = 1 - 2.0**-53
    u = torch.tensor([[0.0, 0.2499, 0.25, 0.5, below_one]], dtype=torch.float64)
    assert inverse_cdf(weights, u).tolist() == [[1, 1, 3, 3, 3]]
    assert inverse_cdf(7 * weights, u).tolist() == [[1, 1, 3, 3, 3]]
    assert inverse_cdf(torch.ones(1, 1), u).tolist() == [[0, 0, 0, 0, 0]]


def test_inverse_cdf_never_gives_a_token_of_weight_zero() -> None:
    rng = torch.Generator().manual_seed(0)
    u = torch.tensor([[0.0, 2.0**-53, 0.5, 1 - 2.0**-53]], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        weights = torch.rand(300, 50, generator=rng, dtype=dtype)
        weights *= torch.rand(300, 50, generator=rng) < 0.3
        weights[:, 0] = 0
        weights[:, -1] = 0
        weights[:, 20] = 1e-3
        tokens = inverse_cdf(weights, u.expand(300, -1))
        assert bool((weights.gather(1, tokens) > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_draws_never_give_a_token_of_weight_zero_where_u_is_at_the_end_of_any_token(
    dtype: torch.dtype,
) -> None:
    """The compiled loop adds up blocks of weights, and so may round otherwise than a running sum."""
    rng = torch.Generator().manual_seed(0)
    weights = torch.rand(20, 300, generator=rng, dtype=dtype)
    weights *= torch.rand(20, 300, generator=rng) < 0.3
    weights[:, -1] = 0
    cdf = weights.cumsum(-1, dtype=torch.float64)
    ends = cdf / cdf[:, -1:]
    u = torch.cat([torch.nextafter(ends, torch.full_like(ends, to)) for to in (0, 1)] + [ends], -1)
    tokens = draw_iid(weights, u.clamp(0, 1 - 2.0**-53))
    assert bool((weights.gather(1, tokens) > 0).all())


def test_the_tail_of_a_large_vocabulary_keeps_its_probability() -> None:
    """150,000 float32 weights whose float32 running sum would stand still: half of the mass is in the tail."""
    v = 150_000
    weights = torch.full((1, v), 0.5 / v)
    weights[0, 0] += 0.5
    u = (torch.arange(1000, dtype=torch.float64)[None] + 0.5) / 1000
    tokens = inverse_cdf(weights, u)
    assert (tokens == 0).sum() == 500
    assert int(tokens.max()) >= v * 0.997


def test_opaque_takes_the_likeliest() -> None:
    scores = torch.tensor([[0.1, 3.0, -1.0, 2.0]])
    u = torch.zeros(1, 3, dtype=torch.float64)
    assert Opaque(3).draw(scores, u).tolist() == [[1, 3, 0]]
    assert Opaque(1).draw(scores, u[:, :1]).tolist() == [[1]]
    assert Opaque(3).draw(scores[:, :2], u).tolist() == [[1, 0, NONE]]
    with pytest.raises(ForetokenError, match="exact-match"):
        Opaque(1).prob(scores[0], (1,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("v", [1, 3, 4096])
def test_compiled_draws_are_the_plain_ones(dtype: torch.dtype, v: int) -> None:
    """Token for token, for the same uniforms, with zeros, ties and exhausted support."""
    rng = torch.Generator().manual_seed(v)
    q = torch.rand(64, v, generator=rng, dtype=torch.float64)
    q = (q * (torch.rand(64, v, generator=rng) < 0.5)).to(dtype)
    q[:, -1] += q.sum(1) == 0
    q[:8] = q[:8].round(decimals=1)
    q[:8, 0] += 0.5
    u = torch.rand(64, 5, generator=rng, dtype=torch.float64)
    u[0] = 0.0
    u[1] = 1 - 2**-53
    assert torch.equal(draw_iid(q, u), inverse_cdf(q, u))
    assert torch.equal(draw_distinct(q, u), successive_inverse_cdf(q, u))
    assert torch.equal(draw_hub(q, u), hub_inverse_cdf(q, u))
    wide = torch.cat([q, q], 1)[:, :v]  # rows that do not lie side by side
    assert torch.equal(draw_iid(wide, u), inverse_cdf(q, u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("v", "k"), [(1, 1), (3, 5), (4096, 10), (5, 0)])
def test_the_compiled_likeliest_are_the_plain_ones(dtype: torch.dtype, v: int, k: int) -> None:
    scores = torch.randn(64, v, generator=torch.Generator().manual_seed(v)).to(dtype)
    scores[1:, 0] = -torch.inf
    assert torch.equal(draw_likeliest(scores, k), largest_scores(scores, k))
    wide = torch.cat([scores, scores], 1)[:, :v]  # rows that do not lie side by side
    assert torch.equal(draw_likeliest(wide, k), largest_scores(scores, k))
    assert draw_likeliest(torch.tensor([[1.0, 2.0, 0.0, 2.0, 1.0, 2.0]]), 4).tolist() == [[1, 3, 5, 0]]


RANDOM = [IID(1, (0.3, 0.7)), IID(2, (0.2, 0.5, 0.3)), IID(2, (0.0, 1.0, 0.0)), IID(3, (0.1, 0.0, 0.6, 0.3)), IID(0)]


@pytest.mark.parametrize("law", [*RANDOM, IID(1), IID(3)], ids=str)
def test_hit_is_the_probability_that_a_draw_lands_in_a_set(law: IID) -> None:
    q = f64(RANDOM_Q)
    for tokens in ((), (0,), (1, 3), (0, 1, 2, 3)):
        hit = math.fsum(prob for draws, prob in outcomes(law, q) if set(draws) & set(tokens))
        assert float(law.hit(q[list(tokens)].sum())) == pytest.approx(hit, abs=1e-14)
    tiny = f64([1e-300, 1e-18])
    assert torch.allclose(law.hit(tiny), sum(law.tails) * tiny, rtol=1e-14, atol=0)
    assert math.fsum(prob for _, prob in outcomes(law, q)) == pytest.approx(1, abs=1e-12)


def test_a_random_count_is_decided_by_the_last_uniform() -> None:
    law = IID(2, (0.2, 0.5, 0.3))
    assert law.num_uniforms == 3
    u = f64([0.1, 0.9, 0.19]), f64([0.1, 0.9, 0.21]), f64([0.1, 0.9, 0.71])
    draws = law.draw(f64(RANDOM_Q).expand(3, -1), torch.stack(u))
    assert draws.tolist() == [[NONE, NONE], [0, NONE], [0, 3]]


@pytest.mark.parametrize("counts", [(1.0,), (0.5, 0.4), (1.5, -0.5), (float("nan"), 1.0), (0.5, 0.25, 0.25)])
def test_counts_that_are_no_distribution_over_0_to_k(counts: tuple[float, ...]) -> None:
    with pytest.raises(ForetokenError, match="counts"):
        IID(1, counts)
