"""Logits to probabilities: transformers' own processors, float64 and whole sorted rows are the references."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from foretoken.core.errors import ForetokenError, NotFiniteError
from foretoken.core.sampling import Sampling, Truncation, best, likeliest, plain_softmax, softmax, truncated
from foretoken.kernel.sizes import ALL

V = 9
# Temperature, top-k, top-p, min-p and repetition penalty.
NUMBERS = (st.floats(0.05, 4), st.integers(0, V + 1), st.floats(0.01, 1), st.floats(0, 1), st.floats(0.3, 3))
logits_rows = st.lists(st.lists(st.floats(-20, 20, width=32), min_size=V, max_size=V), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(
    rows=logits_rows,
    numbers=st.tuples(*NUMBERS),
    ids=st.lists(st.integers(0, V - 1), min_size=1, max_size=6),
)
def test_equals_transformers(rows: list[list[float]], numbers: tuple, ids: list[int]) -> None:
    """float64, so that both sides cut at the same token: the subtraction of the largest score only rounds."""
    logits, sampling = torch.tensor(rows, dtype=torch.float64), Sampling(*numbers)
    reference = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    reference.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        reference.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        reference.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        reference.append(MinPLogitsWarper(sampling.min_p))
    want = reference(torch.tensor([ids] * len(rows)), logits.clone()).softmax(-1)
    got = sampling(logits, [ids] * len(rows))
    near_a_cut = _near_a_cut(reference, ids, logits, sampling.top_p, sampling.min_p)
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


def test_processors_that_keep_state_are_refused() -> None:
    """With a drafter they would be asked about other texts in between, and the text would be another."""
    guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)
    watermark = SynthIDTextWatermarkLogitsProcessor(2, [1, 2], 16, 0, 8, torch.device("cpu"))
    for processors in ((guidance,), (watermark,), (LogitsProcessorList([watermark]),)):
        with pytest.raises(ForetokenError, match=r"LogitsProcessor keeps state between calls"):
            Sampling(processors=processors)


def test_a_processor_may_have_weights() -> None:
    weight = torch.nn.Parameter(torch.tensor(2.0))
    rows = Sampling(processors=(lambda _, scores: scores * weight,)).scores(torch.ones(2, 3), [[0], [1]])
    assert rows.tolist() == [[2.0] * 3] * 2
    assert not rows.requires_grad


def test_temperature_zero_is_one_hot_at_the_first_of_equals() -> None:
    p = Sampling(temperature=0.0, top_k=2, top_p=0.5)(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]]))
    assert p.tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    p = Sampling(temperature=temperature)(torch.tensor([[100.0, 120.0, -80.0]]))
    assert p.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_probabilities_are_float32_or_better(dtype: torch.dtype) -> None:
    assert Sampling()(torch.zeros(1, 3, dtype=dtype)).dtype == torch.float32
    assert Sampling()(torch.zeros(1, 3, dtype=torch.float64)).dtype == torch.float64


BAD = {
    "temperature": (-1.0, math.nan, math.inf),
    "top_k": (-1,),
    "top_p": (0.0, 1.5),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (0.0, 1e308, 1e-320),
    "frequency_penalty": (math.nan, -1e39),
    "presence_penalty": (math.inf, 1e308),  # float32 ends at 3e38, and what is counted multiplies it
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named(name: str) -> None:
    for value in BAD[name]:
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


TOP_P, TOP_K = [(0, p, 0.0) for p in (0.9, 0.37, 0.999)], [(k, 1.0, 0.0) for k in (5, 900)]
SETTINGS = [*TOP_P, *TOP_K, (0, 1.0, 0.1), (7, 0.8, 0.1)]
SIZES = [1, 2, 15, 16, 17, 4096, 50257]


def scores(v: int, spread: float = 5.0) -> Tensor:
    x = spread * torch.randn(3, v, generator=torch.Generator().manual_seed(v))
    if v > 1:
        x[0, 0] = -math.inf  # a token that a processor has forbidden
    return x


@pytest.mark.parametrize("temperature", [1e-35, 1e-25, 1e-3, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("v", SIZES)
def test_compiled_softmax_is_that_of_float64(v: int, temperature: float) -> None:
    x = scores(v)
    p = softmax(x, temperature)
    # Rounding of the exponent: |x| / T of up to 30 / T in float32, where the row is not one-hot anyway.
    assert torch.allclose(
        p.double(), plain_softmax(x.double(), temperature), rtol=1e-5 / min(temperature, 1), atol=1e-7
    )
    assert (p.double().sum(-1) - 1).abs().max() < 2e-7
    assert v == 1 or p[0, 0] == 0


@pytest.mark.parametrize("v", SIZES)
def test_the_best_is_that_of_float64(v: int) -> None:
    assert torch.equal(likeliest(scores(v)), likeliest(scores(v).double()))
    assert torch.equal(best(scores(v)).double(), best(scores(v).double()))
    assert best(scores(v)).sum(-1).tolist() == [1, 1, 1]


def test_rows_that_are_views_are_read_rightly() -> None:
    x = scores(64)
    assert torch.equal(softmax(x[1:2], 1.0), softmax(x[1:2].clone(), 1.0))
    assert torch.equal(softmax(x[:, 3:40], 1.0), softmax(x[:, 3:40].clone(), 1.0))
    assert torch.equal(best(x[:, 3:40]), best(x[:, 3:40].contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("setting", [None, ALL, *SETTINGS], ids=str)
def test_what_is_not_finite_is_refused(setting: Truncation | None, dtype: torch.dtype) -> None:
    """By the compiled rows and by torch's. None: at temperature 0."""

    def p(x: Tensor) -> Tensor:
        return best(x.to(dtype)) if setting is None else softmax(x.to(dtype), 0.7, setting)

    for bad, v, place in itertools.product((math.nan, math.inf), (20, 4096), (0, 13, 4095)):
        x = scores(v)
        x[1, place % v] = bad
        with pytest.raises(NotFiniteError):
            p(x)
    with pytest.raises(NotFiniteError):
        p(torch.full((2, 40), -math.inf))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("size", [1, 37, 64, 3001])
@pytest.mark.parametrize("spread", [0.0, 0.1, 30.0])
@pytest.mark.parametrize("steps", [None, 2], ids=["distinct", "ties"])
def test_the_tokens_kept_are_those_of_whole_sorted_rows(setting, size, spread, steps):
    """Ties: scores are multiples of 1/2, so that many tokens share the one at the cut."""
    generator = torch.Generator().manual_seed(size)
    scores = spread * torch.randn(20, size, generator=generator)
    if steps is not None:
        scores = (scores * steps).round() / steps
    exact = scores.double() / 0.5
    kept = truncated(exact, setting) > -torch.inf
    p = softmax(scores, 0.5, setting)
    wanted = exact.masked_fill(~kept, -torch.inf).softmax(-1)
    sure = ~_near_the_cut(exact, setting)
    torch.testing.assert_close(p.double()[sure], wanted[sure], rtol=2e-5, atol=1e-37)
    assert int(sure.sum()) > 2 or spread == 0  # equal numbers are all near every cut, or none is


def _near_the_cut(scores: Tensor, setting: Truncation) -> Tensor:
    """Whether rounding in float32 may decide."""
    top_k, top_p, min_p = setting
    if 0 < top_k < scores.shape[1]:
        scores = truncated(scores, (top_k, 1.0, 0.0))
    p = scores.softmax(-1)
    mass = (p.sort(-1).values.cumsum(-1) - (1 - top_p)).abs().amin(-1) < 1e-6
    left = truncated(scores, (0, top_p, 0.0)).softmax(-1)
    floor = (left / left.amax(-1, keepdim=True) - min_p).abs().amin(-1) < 1e-6
    return (mass & (top_p < 1)) | (floor & (min_p > 0))


@pytest.mark.parametrize("spread", [1e3, 1e6, 1e12, 1e29])
def test_a_wide_spread_of_scores_takes_no_more_memory(spread):
    """At temperatures as high as the spread; at 1e12 there would be 64 terabytes of bins of one width."""
    scores = spread * (torch.rand(20, 3001, generator=torch.Generator().manual_seed(0)) - 0.5)
    for setting in TOP_P:
        exact = scores.double() / spread
        sure = ~_near_the_cut(exact, setting)
        wanted = truncated(exact, setting).softmax(-1)
        assert int(sure.sum()) > 2
        torch.testing.assert_close(softmax(scores, spread, setting).double()[sure], wanted[sure], rtol=2e-5, atol=0)


def test_of_equal_scores_at_the_cut_the_last_stay():
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, -5.0]])
    p = torch.softmax(scores, -1)[0]
    for kept in range(1, 5):
        top_p = float(p[0] + (kept - 1.5) * p[1])
        got = softmax(scores, 1.0, (0, top_p, 0.0))[0]
        assert got.nonzero().flatten().tolist() == [0, *range(5 - (kept - 1), 5)]
        assert torch.equal(got > 0, (truncated(scores, (0, top_p, 0.0)) > -torch.inf)[0])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_that_are_ruled_out_stay_out(setting):
    scores = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    scores[:, ::2] = -torch.inf
    got = softmax(scores, 0.7, setting)
    alone = softmax(scores[:, 1::2].contiguous(), 0.7, setting)
    assert bool((got[:, ::2] == 0).all())
    torch.testing.assert_close(got[:, 1::2], alone, rtol=1e-6, atol=0)


def test_a_top_k_that_no_machine_number_holds_keeps_all():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    prefixes = [[1]] * 3
    assert torch.equal(Sampling(0.7, top_k=2**70)(logits, prefixes, 1), Sampling(0.7, top_k=50)(logits, prefixes, 1))


def test_prefixes_are_not_read_without_need() -> None:
    def prefixes() -> object:
        raise AssertionError
        yield

    assert Sampling(temperature=0.5, top_k=2, logit_bias={0: 1.0})(torch.zeros(1, 3), prefixes()).shape == (1, 3)


@pytest.mark.usefixtures("unchecked")  # which would refuse other numbers than those of Python
def test_settings_are_kept_as_pythons_own_numbers() -> None:
    bias = {np.uint8(2): 100.0}
    sampling = Sampling(top_k=torch.tensor(2), logit_bias=bias)
    bias.clear()
    assert (sampling.top_k, sampling.logit_bias) == (2, {2: 100.0})
    assert type(sampling.top_k) is int
    assert float(sampling(torch.zeros(1, 4))[0, 2]) == 1
