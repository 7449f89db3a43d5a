"""Logits to probabilities: transformers' own processors are the reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken.core.errors import ForetokenError, NotFiniteError
from foretoken.core.sampling import Sampling

V = 9
logits_rows = st.lists(st.lists(st.floats(-20, 20, width=32), min_size=V, max_size=V), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(
    rows=logits_rows,
    temperature=st.floats(0.05, 4),
    top_k=st.integers(0, V + 1),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.3, 3),
    ids=st.lists(st.integers(0, V - 1), min_size=1, max_size=6),
)
def test_equals_transformers(
    rows: list[list[float]],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    ids: list[int],
) -> None:
    """float64, so that both sides cut at the same token: the subtraction of the largest score only rounds."""
    logits = torch.tensor(rows, dtype=torch.float64)
    reference = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(repetition_penalty)])
    reference.append(TemperatureLogitsWarper(temperature))
    if top_k:
        reference.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        reference.append(TopPLogitsWarper(top_p))
    if min_p:
        reference.append(MinPLogitsWarper(min_p))
    want = reference(torch.tensor([ids] * len(rows)), logits.clone()).softmax(-1)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    got = sampling(logits, [ids] * len(rows))
    near_a_cut = _near_a_cut(reference, ids, logits, top_p, min_p)
    for one, other, unsure in zip(got, want, near_a_cut, strict=True):
        assert unsure or torch.allclose(one, other, atol=1e-9)


def _near_a_cut(
    reference: LogitsProcessorList, ids: list[int], logits: Tensor, top_p: float, min_p: float
) -> list[bool]:
    """Whether a threshold lies within rounding of some token's value: then either side of it is right."""
    scores = LogitsProcessorList(reference[:2])(torch.tensor([ids] * len(logits)), logits.clone())
    p, _ = scores.softmax(-1).sort(-1)
    gaps = (p.cumsum(-1) - (1 - top_p)).abs().amin(-1)
    ties = (scores.sort(-1).values.diff(dim=-1).abs() < 1e-9).any(-1)
    floor = (p / p[:, -1:] - min_p).abs().amin(-1)
    return [bool(x) for x in ((gaps < 1e-9) | (floor < 1e-9) | ties)]


@pytest.mark.parametrize(
    "setting",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.5}, {"repetition_penalty": 1.7}, {}],
    ids=str,
)
def test_each_setting_alone_in_float32(setting: dict[str, float]) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, V, generator=rng)
    warpers = {
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
        "temperature": TemperatureLogitsWarper,
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    }
    reference = LogitsProcessorList([warpers[name](value) for name, value in setting.items()])
    ids = torch.tensor([[1, 2, 2]] * 50)
    want = reference(ids, logits.clone()).softmax(-1)
    torch.testing.assert_close(Sampling(**setting)(logits, ids.tolist()), want, rtol=1e-5, atol=1e-7)


def test_penalties_by_openais_formula() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, with counts over the output alone."""
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    prefix = [0, 0, 1, 2, 2, 3]  # three prompt ids, three of the output
    scores = Sampling(frequency_penalty=0.5, presence_penalty=0.25).scores(logits, [prefix], num_prompt=3)
    assert scores.tolist() == [[1.0, 1.0, 1.0 - 1.0 - 0.25, 1.0 - 0.5 - 0.25]]


def test_repetition_penalty_sees_the_prompt() -> None:
    scores = Sampling(repetition_penalty=2.0).scores(torch.tensor([[2.0, -2.0, 2.0]]), [[0, 1]], num_prompt=2)
    assert scores.tolist() == [[1.0, -4.0, 2.0]]


def test_logit_bias() -> None:
    logits = torch.zeros(2, 3)
    scores = Sampling(logit_bias={1: 5.0, 2: float("-inf")})(logits)
    want = torch.tensor([0.0, 5.0, float("-inf")]).softmax(-1)
    assert torch.allclose(scores, want.expand(2, -1))
    assert not logits.any()


def test_ids_beyond_the_logits_are_passed_over() -> None:
    """A tokenizer's extra ids in the prefix, which the model's head does not score."""
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0)
    assert torch.isfinite(sampling.scores(torch.ones(1, 3), [[7, 1]], num_prompt=0)).all()


def test_a_processor_gets_each_nodes_own_prefix() -> None:
    seen = []

    def forbid_last(ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.ndim == 2
        assert scores.shape == (1, 4)
        seen.append(ids[0].tolist())
        scores[0, ids[0, -1]] = float("-inf")
        return scores

    logits = torch.zeros(2, 4)
    p = Sampling(processors=(forbid_last,))(logits, [[3, 1], [3, 1, 2]])
    assert seen == [[3, 1], [3, 1, 2]]
    assert (p == 0).tolist() == [[False, True, False, False], [False, False, True, False]]
    assert not logits.any()


def test_prefixes_are_not_read_without_need() -> None:
    def prefixes() -> object:
        raise AssertionError
        yield

    assert Sampling(temperature=0.5, top_k=2, logit_bias={0: 1.0})(torch.zeros(1, 3), prefixes()).shape == (1, 3)


def test_temperature_zero_is_one_hot_and_ties_go_to_one() -> None:
    p = Sampling(temperature=0.0, top_k=2, top_p=0.5)(torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]]))
    assert p.sum(-1).tolist() == [1, 1]
    assert p.max(-1).values.tolist() == [1, 1]
    assert p[1].tolist() == [1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    p = Sampling(temperature=temperature)(torch.tensor([[100.0, 120.0, -80.0]]))
    assert p.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_logits_that_are_not_finite(temperature: float, bad: float, cut: dict[str, float]) -> None:
    with pytest.raises(NotFiniteError):
        Sampling(temperature=temperature, **cut)(torch.tensor([[0.0, bad, 1.0]]))
    with pytest.raises(NotFiniteError):
        Sampling(temperature=temperature, **cut)(torch.full((1, 3), -math.inf))


def test_minus_infinity_is_probability_zero() -> None:
    assert Sampling(temperature=0.5)(torch.tensor([[0.0, -math.inf]])).tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_probabilities_are_float32_or_better(dtype: torch.dtype) -> None:
    assert Sampling()(torch.zeros(1, 3, dtype=dtype)).dtype == torch.float32
    assert Sampling()(torch.zeros(1, 3, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("presence_penalty", 1e308),  # float32 ends at 3e38, and what is counted multiplies it
        ("frequency_penalty", -1e39),
        ("repetition_penalty", 1e308),
        ("repetition_penalty", 1e-320),
    ],
)
def test_bad_settings_are_named(name: str, value: float) -> None:
    with pytest.raises(ForetokenError, match=f"{name} is"):
        Sampling(**{name: value})


@pytest.mark.parametrize("bias", [1e308, -1e39, math.inf, math.nan])
def test_a_bias_that_float32_cannot_hold_is_named_with_its_token(bias: float) -> None:
    with pytest.raises(ForetokenError, match="logit_bias of token 5 is "):
        Sampling(logit_bias={3: -math.inf, 5: bias})


def test_the_largest_settings_leave_a_distribution() -> None:
    largest = Sampling(frequency_penalty=1e30, presence_penalty=-1e30, repetition_penalty=1e30, logit_bias={0: -1e30})
    p = largest(torch.tensor([[5.0, 1000.0, -1000.0]]), [[0, 1, 1, 2]], 1)
    assert bool(p.isfinite().all())
    assert float(p.sum()) == pytest.approx(1)
