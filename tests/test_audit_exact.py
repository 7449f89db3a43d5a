"""Whole decodings of table models, enumerated through the real decoder: their law is the target's own at 1e-12."""

import pytest
import torch

from foretoken import audit
from foretoken.audit import decoding, fit
from foretoken.audit import enumerate as exact
from foretoken.audit.branching import outcomes
from foretoken.audit.decoding import Shape
from foretoken.audit.enumerate import TOLERANCE
from foretoken.audit.report import FAILED, OK, WEAK
from foretoken.audit.table import TableLM, random_table
from foretoken.audit.wrong import EachAlone, PeekingDrafter
from foretoken.core.draws import inverse_cdf
from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.core.random import Random
from foretoken.core.sampling import Sampling
from foretoken.core.tree import Siblings, TokenTree
from foretoken.core.verifier import Approximate, LawFamily, Verifier
from foretoken.core.walk import Probabilities, draw
from foretoken.draft.lm import LMDraftSession
from foretoken.models.causal_lm import CausalLM
from foretoken.trees import static
from foretoken.verify import VERIFIERS, strings
from foretoken.verify.published.plan import Solver
from foretoken.verify.rejection import Standard
from models_zoo import tiny
from raising import raising
from tables import off_target, table_decoding
from thinning import one_in

CASES = [
    (rule, family, shape)
    for rule in VERIFIERS.values()
    if not isinstance(rule, Approximate)
    for family, shape in decoding.cases(rule)
    if not isinstance(rule, Solver) or shape.name in ("kary:2x1", "uneven")  # each of its nodes takes milliseconds
]


def name(x: object) -> str:
    return getattr(x, "name", str(x))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("rule", "family", "shape"), one_in(5, CASES), ids=name)
def test_whole_decodings_have_the_targets_law(rule: Verifier, family: LawFamily, shape: Shape) -> None:
    measured = decoding.measure(rule, family, shape, seed=7)
    assert measured.exact, measured
    assert measured.accepted > 0.1, "the drafts were not even used"
    assert measured.num_outcomes > 1, "a single text has positive probability"


def test_every_rule_is_enumerated_as_it_drafts() -> None:
    """With coins where it takes a random number of draws, and with prices where it takes draws without a q."""
    for rule in VERIFIERS.values():
        shapes, random = [shape for _, shape in decoding.cases(rule)], rule.accepts(exact.COINS(1))
        assert any(shape.families == (exact.COINS,) for shape in shapes) == random
        assert any(isinstance(law, IID) and law.counts is not None for law in exact.laws_of(rule)) == random
        assert any(shape.priced for shape in shapes) == rule.accepts(Opaque(1))


def checks_of(rule: Verifier) -> list[str]:
    """The outcomes of both enumerations of a rule."""
    sections = [part([rule], 7, lambda line: None) for part in (audit.one_node, audit.whole_decodings)]
    return [section.checks[0].outcome for section in sections]


def test_a_coin_that_is_ignored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`randomised` with a = 1 whatever the law's a is, lossless where every node has its draw."""
    rule = VERIFIERS["randomised"]
    row = type(rule).__call__
    monkeypatch.setattr(
        type(rule), "__call__", lambda self, p, siblings: row(self, p, Siblings(siblings.draws, siblings.q, IID(1)))
    )
    assert checks_of(rule) == [FAILED, FAILED]


def test_a_priced_draw_that_is_always_accepted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(p: torch.Tensor, siblings: Siblings, rng: Random) -> int:
        return siblings.draws[0] if siblings.draws else draw(p, rng)

    monkeypatch.setattr(strings, "emit", emit)
    assert checks_of(VERIFIERS["string-rejection"]) == [OK, FAILED]


class NeverAccepts(Standard):
    """A rule that draws from p and takes no draft token even where it is the one."""

    def __call__(self, p: torch.Tensor, siblings: Siblings) -> torch.Tensor:
        return p

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: Random) -> tuple[tuple[int, ...], int]:
        return (0,), draw(probabilities(range(1))[0], rng)


def test_where_nothing_is_accepted_the_check_is_weak() -> None:
    assert checks_of(NeverAccepts()) == [OK, WEAK]


@pytest.mark.parametrize("family", [IID, WithoutReplacement])
def test_the_known_wrong_rule_and_the_peeking_drafter_fail_the_same_check(family: LawFamily) -> None:
    assert decoding.measure(EachAlone(), family, decoding.SHAPES[1], seed=7).worst > 0.01
    assert decoding.measure(VERIFIERS["rrsw"], family, decoding.SHAPES[0], seed=7, around=PeekingDrafter).worst > 0.01


SAMPLINGS = {
    "temperature": Sampling(temperature=0.6),
    "truncated": Sampling(top_k=2),
    "penalised": Sampling(repetition_penalty=1.5, presence_penalty=0.3),
    "greedy": Sampling(temperature=0.0),
    "forbidding": Sampling(processors=(lambda ids, scores: scores.index_fill(1, ids[0, -1:], float("-inf")),)),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("end", [frozenset(), frozenset({2})], ids=["", "end of text"])
def test_settings_and_end_of_text(sampling: Sampling, end: frozenset[int]) -> None:
    """What reads the prefix must read each node's own; an end of text may lie anywhere in a path."""
    case = table_decoding(
        VERIFIERS["rrsw"], WithoutReplacement, static.StaticTree((-1, 0, 0, 1)), 3, sampling=sampling, eos_ids=end
    )
    assert off_target(case)[0] <= TOLERANCE


@pytest.mark.usefixtures("unchecked")
def test_four_tokens_and_a_longer_prompt() -> None:
    case = table_decoding(VERIFIERS["rrsw"], WithoutReplacement, static.kary(2, 1), 3, prompt=(2, 0, 1), num_tokens=4)
    assert off_target(case)[0] <= TOLERANCE


def test_a_probability_that_is_no_number_is_seen() -> None:
    own = {(x,): 0.25 for x in range(4)}
    assert decoding.deviation(own, own) == 0
    assert all(decoding.deviation(own | {(x,): float("nan")}, own) == float("inf") for x in range(4))


def test_a_path_kept_wrongly_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is not blind to the caches: forget the last kept node once in a while."""
    from foretoken.models.target import LMTargetSession

    def keep(self: LMTargetSession, paths: list[tuple[int, ...]]) -> None:
        self.rows.keep([path[:1] * (len(path) > 1) or path for path in paths])

    monkeypatch.setattr(LMTargetSession, "catch_up", lambda *_: None)  # which would mend it
    monkeypatch.setattr(LMTargetSession, "keep", keep)
    case = table_decoding(VERIFIERS["rrsw"], WithoutReplacement, static.chain(2), 3)
    assert off_target(case)[0] > 0.01


def test_a_drafter_with_a_stale_cache_is_slow_but_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correctness rests on the record of each draw, whatever the drafter's context was."""

    def observe(self: LMDraftSession, sequences: list, trees: list, paths: list) -> None:
        self.rows.keep([range(g.num_pending - 1) for g in self.growths])
        self.rows.extend(0, [2] * (len(sequences[0].ids) - self.rows.lengths[0] - 1))

    monkeypatch.setattr(LMDraftSession, "observe", observe)
    case = table_decoding(VERIFIERS["rrs"], IID, static.kary(2, 1), 3)
    assert off_target(case)[0] <= TOLERANCE


def test_a_failing_drafter_does_not_pass_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LMDraftSession, "propose", raising(RuntimeError("broken")))
    case = table_decoding(VERIFIERS["rrs"], IID, static.kary(2, 1), 3)
    with pytest.raises(RuntimeWarning, match="broken"):
        decoding.enumerate_law(case)


def test_branching_takes_every_way() -> None:
    """Two draws, the second of which depends on the first; and one where nothing is left."""

    def run(rng: Random) -> tuple[int, int, int]:
        u = rng.uniforms(1, 1)
        first = int(inverse_cdf(torch.tensor([[0.25, 0.0, 0.75]]), u))
        second = int(inverse_cdf(torch.tensor([[1.0, 1.0] if first else [2.0, 0.0]]), u))
        return first, second, int(inverse_cdf(torch.zeros(1, 3), u))

    assert dict(outcomes(run)) == pytest.approx({(0, 0, 2): 0.25, (2, 0, 2): 0.375, (2, 1, 2): 0.375})


def test_table_rows_behave_like_a_models_rows() -> None:
    """Same calls, same lengths; and the table's score after a path equals the table's score of the text."""
    table = TableLM("table", random_table(4, seed=0))
    rows = [table.open(3, 30), CausalLM(tiny("llama")).open(3, 30)]
    for r in rows:
        assert (r.join(), r.join(), r.join()) == (0, 1, 2)
        for row, text in enumerate(([1, 2], [], [3])):
            r.extend(row, text)
        scores = r.score([[1, 2, 3], [1], []], [[-1, 0, 0], [-1], []])
        assert [len(s) for s in scores] == [3, 1, 0]
        r.score([[2], [], []], [[1], [], []])
        r.keep([(0, 1, 3), (0,), ()])
        assert r.lengths == [5, 1, 1]
        r.leave(0)
        assert r.lengths == [1, 1]
    (one,) = _one_row(table, [1, 2]).score([[1, 2, 3]], [[-1, 0, 0]])
    (two,) = _one_row(table, [1, 2, 1]).score([[3]], [[-1]])
    assert torch.equal(one[2], two[0])


def _one_row(lm: TableLM, ids: list[int]):
    rows = lm.open(1, 30)
    rows.extend(rows.join(), ids)
    return rows


# The goodness-of-fit test by itself.


def table_law(v: int, seed: int) -> fit.Next:
    table = random_table(v, seed)
    return lambda ids: torch.stack([table[([0, *x])[-2] if len(x) else 0, ([0, *x])[-1]] for x in ids])


def all_tuples(p: fit.Next, n: int) -> dict[tuple[int, ...], float]:
    law = {(): 1.0}
    for _ in range(n):
        law = {
            (*ids, x): prob * float(row[x])
            for ids, prob in law.items()
            for row in [p([ids])[0]]
            for x in range(len(row))
        }
    return law


@pytest.mark.parametrize("samples", [30, 300, 3000, 10**6])
def test_cells_are_a_partition_with_exact_probabilities(samples: int) -> None:
    p = table_law(6, seed=1)
    cells = fit.choose_cells(p, 3, samples)
    probs = cells.probabilities(p)
    want = [0.0] * len(cells)
    for ids, prob in all_tuples(p, 3).items():
        want[cells.cell(ids)] += prob
    assert probs.tolist() == pytest.approx(want, abs=1e-12)
    assert probs.sum() == pytest.approx(1)
    own = [i for key, i in cells.index.items() if key[-1] != fit.REST]
    assert all(probs[i] * samples >= fit.LEAST - 1e-9 for i in own)


def test_the_fit_test_keeps_its_false_alarm_rate_and_has_power() -> None:
    """At alpha = 0.05: 400 true samples; more than 40 alarms have probability < 1e-4. And another law is seen."""
    p, other = table_law(6, seed=1), table_law(6, seed=2)
    cells = fit.choose_cells(p, 3, 1000)
    test = fit.FitTest(cells.probabilities(p), 1000, 0.05, seed=0)
    assert test.power(cells.probabilities(p), seed=1) <= 0.1
    assert test.power(cells.probabilities(other), seed=1) > 0.99


def test_the_impossible_is_always_rejected() -> None:
    test = fit.FitTest(torch.tensor([0.5, 0.5, 0.0]).numpy(), 1000, 0.001, seed=0)
    assert not test.rejects(torch.tensor([500, 500, 0]).numpy())
    assert test.rejects(torch.tensor([500, 499, 1]).numpy())
