"""What `benchmarks rules` and `benchmarks reproduce` are made of, against direct computation."""

import pytest
import torch
from torch import Tensor

import tiny
from benchmarks import pairs as rows
from benchmarks.exactly import enumerated, standard_error
from foretoken.audit.models import last_logits
from foretoken.build import load
from foretoken.core.laws import IID, WithoutReplacement
from foretoken.measure.child_acceptance import sampled
from foretoken.verify import VERIFIERS
from foretoken.verify.acceptance import acceptance

P = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def test_paper_000_figure_4b() -> None:
    """RRSw on p = (.1, .6, .3), q = (.5, .3, .2): accepted masses and a cost of 0.06, as printed."""
    outcome = enumerated(VERIFIERS["rrsw"], WithoutReplacement(2), P, Q)
    torch.testing.assert_close(outcome.accepted, torch.tensor([0.1, 0.54, 0.3], dtype=torch.float64))
    assert outcome.acceptance == pytest.approx(0.94, abs=1e-12)
    assert float(outcome.by_draw[0]) == pytest.approx(float(torch.minimum(P, Q).sum()), abs=1e-12)


def test_sampling_agrees_with_enumeration() -> None:
    """Four standard errors: a false alarm in 16,000 runs, and the seed is fixed."""
    rule, law = VERIFIERS["rrsw"], WithoutReplacement(2)
    mass = sampled(rule, law, P[None], Q[None], 400, seed=0)
    error = standard_error(mass)
    assert 0 < error < 0.03
    assert float(mass.sum(2).mean()) == pytest.approx(enumerated(rule, law, P, Q).acceptance, abs=4 * error)


def random_rows(n: int, v: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(2 * torch.randn(n, v, generator=rng, dtype=torch.float64), 1) for _ in range(2))
    return p, q


def test_truncation_keeps_acceptance() -> None:
    p, q = random_rows(4, 12)
    small_p, small_q = rows.truncate(p, q, 5)
    assert small_p.shape == small_q.shape == (4, 6)
    torch.testing.assert_close(small_p.sum(1), torch.ones(4, dtype=torch.float64))
    keep = q.topk(5, dim=1).indices
    cut = torch.zeros_like(q).scatter_(1, keep, q.gather(1, keep))
    cut /= cut.sum(1, keepdim=True)
    for k in (1, 3):
        torch.testing.assert_close(
            acceptance("rrs", IID(k), small_p, small_q), acceptance("rrs", IID(k), p, cut), rtol=0, atol=1e-12
        )
    assert rows.truncate(p, q, 12)[0] is p


def test_toy_rows_follow_the_formula() -> None:
    p, q = rows.toy_rows(3, 7, temperature=0.5, similarity=1.0, seed=1)
    torch.testing.assert_close(p, q)
    p, q = rows.toy_rows(2000, 2, temperature=1.0, similarity=0.0, seed=1, normal=False)
    logits = (p[:, 0] / p[:, 1]).log()  # difference of two uniform numbers
    assert float(logits.abs().max()) < 1
    assert float(logits.var()) == pytest.approx(1 / 6, abs=0.02)


def test_teacher_forcing_scores_each_position_with_its_own_prefix() -> None:
    target = tiny.llama(0)
    engine = load(target, drafter=tiny.perturbed(target, 0.15, 1), tree="chain:1", tokenizer=tiny.tokenizer())
    text = "def add(a, b): return a + b # and so on"
    scored = rows.score_text(engine, [text, text[:20]], 7)
    assert scored.target.shape == scored.drafter.shape == (7, engine.target.vocab_size)
    ids = tiny.tokenizer()(text)["input_ids"]
    plain = last_logits(engine.target, [ids[: rows.LEAST_CONTEXT]])[0]
    torch.testing.assert_close(scored.target[0], plain, rtol=1e-4, atol=1e-4)
    p, q = scored.rows(0.5, draft_temperature=2.0)
    torch.testing.assert_close(p, torch.softmax(scored.target.double() / 0.5, 1))
    torch.testing.assert_close(q, torch.softmax(scored.drafter.double() / 2.0, 1))
