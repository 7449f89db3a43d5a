"""Method auto never changes what comes out; drafters catch up after plain steps."""

import math
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain, product

import pytest
import torch
from transformers import AutoModelForCausalLM

import foretoken
import tiny
import tiny_tables
from engines import check_greedy
from foretoken.audit.decoding import Decoding, deviation, own_law, table_pair
from foretoken.audit.table import TableRows
from foretoken.audit.wrong import PeekingDrafter
from foretoken.cli.options import demo_folder
from foretoken.core.interfaces import Drafter, FeatureDrafter, LearningSession
from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import opaque_tree
from foretoken.decode import NoDrafter
from foretoken.draft.acceptance import Acceptance
from foretoken.draft.auto import AutoDrafter, AutoSession, _surprise, auto_drafter
from foretoken.draft.controller import TRIES, Controller, Costs, Experience, expected_extra
from foretoken.draft.lm import LMDrafter
from foretoken.draft.lookup import LookupDrafter
from foretoken.models.causal_lm import CausalLM
from foretoken.models.load import wrap_model
from foretoken.recipe import KINDS
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.vocab.source import TranslatedSource
from machines import EXTRA
from rates import summed
from tables import decodings
from thinning import one_in

# Losslessness, enumerated: a text's depths depend on what was accepted before, and its law is the target's own.

PLAIN_S, LEVEL_S = 1.0, 0.4


class Work:
    """A clock that tells what was done: a forward of the target takes PLAIN_S, one of the drafter LEVEL_S."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        score = TableRows.score

        def counted(rows: TableRows, *args):
            self.seconds += PLAIN_S if rows.table is self.target else LEVEL_S
            return score(rows, *args)

        self.target = torch.empty(0)
        monkeypatch.setattr(TableRows, "score", counted)

    def __call__(self) -> float:
        return self.seconds


def experienced() -> Experience:
    """Costs as Work has them, and an acceptance at which one step's outcome changes the next one's depth."""
    extra = (0.0, LEVEL_S, 2 * LEVEL_S)
    return Experience(extra, Acceptance(0.42, 1.0, 1.0), {1: Costs(extra, PLAIN_S)})


def enumerated(drafter, target, verifier, num_tokens: int, prompt=(0, 1)) -> tuple[dict, set]:
    """({ids: probability}, the tuples of tree sizes that occurred), whole decodings of a fresh decoder each."""
    whole = decodings(drafter, target, verifier, num_tokens, prompt)
    law = summed((ids, prob) for (ids, _), prob in whole.items())
    return law, {tuple(len(tokens) - 1 for tokens, _ in steps) for _, steps in whole}


CASES = [
    ("standard", IID, static.chain(2)),
    ("rrsw", WithoutReplacement, static.chain(2)),
    ("transport", IID, static.StaticTree((-1, 0, 0, 1))),
    ("block", IID, static.chain(2)),
    ("exact-match", Opaque, static.chain(2)),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rule", "family", "policy"),
    CASES,
    ids=lambda x: getattr(x, "name", str(x)) if not isinstance(x, static.StaticTree) else str(x.parents),
)
def test_whole_decodings_under_the_controller_have_the_targets_law(monkeypatch, rule, family, policy):
    target, inner = table_pair(policy, family, 2, seed=3)
    work = Work(monkeypatch)
    work.target = target.lm.table
    drafter = lambda: AutoDrafter(inner, experienced(), work)  # noqa: E731
    law, sizes = enumerated(drafter, target, VERIFIERS[rule], 5)
    assert math.fsum(law.values()) == pytest.approx(1, abs=1e-12)
    own = own_law(Decoding(target, inner, VERIFIERS[rule], num_tokens=5))
    assert deviation(law, own) <= 1e-12
    assert all(drafted[0] == 0 for drafted in sizes), "the first token waited for a drafter"
    third = {drafted[2] for drafted in sizes if len(drafted) > 3}
    assert 0 in third, "the controller never stopped drafting"
    assert len(third) > 1, "what was accepted never changed the next depth"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rule", "family"),
    [("standard", IID), ("rrsw", WithoutReplacement), ("block", IID), ("exact-match", IID), ("exact-match", Opaque)],
)
def test_chains_that_end_where_the_drafter_is_not_sure_have_the_targets_law(monkeypatch, rule, family):
    """The floors follow what was accepted, and how sure the drafter was of it."""
    target, inner = table_pair(static.chain(3), family, 2, seed=3)
    work, ended = Work(monkeypatch), defaultdict(set)  # floors -> whether a chain was shorter than it might have been
    work.target = target.lm.table

    class Watched(AutoSession):
        def propose(self, sequences):
            trees = super().propose(sequences)
            if self._asked:
                ended[sequences[0].floors].add(max(trees[0].depths) < sequences[0].depth_left)
            return trees

    class Watching(AutoDrafter):
        def open(self, batch, slots):
            return Watched(self.inner.open(batch, slots), Controller(self.experience), self.clock)

    def drafter() -> AutoDrafter:
        extra = tuple(depth * LEVEL_S for depth in range(4))
        sure = Acceptance(0.9, 1.0, 0.05, tells=True)
        return Watching(inner, Experience(extra, sure, {1: Costs(extra, PLAIN_S, tries=[1.0] * TRIES)}), work)

    law, _ = enumerated(drafter, target, VERIFIERS[rule], 5)
    own = own_law(Decoding(target, inner, VERIFIERS[rule], num_tokens=5))
    assert deviation(law, own) <= 1e-12
    assert len(ended) > 1, "what was accepted never changed the floors"
    assert {*chain.from_iterable(ended.values())} == {False, True}, "all or no chains ended at their floors"


@pytest.mark.usefixtures("unchecked")
def test_a_controller_that_peeks_is_caught():
    target, inner = table_pair(static.chain(2), IID, 2, seed=3)
    law, _ = enumerated(lambda: PeekingDrafter(inner), target, VERIFIERS["standard"], 3)
    own = own_law(Decoding(target, inner, VERIFIERS["standard"], num_tokens=3))
    assert deviation(law, own) > 0.01


# Real drafters: after plain steps they go on as if they had been asked all along.


def drafters() -> dict[str, tuple[Drafter, str]]:
    policy = static.chain(3)
    small = wrap_model(tiny.perturbed(tiny.llama(0), 0.1, seed=9))
    return {
        "lm": (LMDrafter(small, policy, WithoutReplacement, 257), "rrsw"),
        "ngram": (LookupDrafter(policy), "exact-match"),
    }


@pytest.fixture(scope="module")
def target():
    return tiny.llama(0)


class Schedule(AutoSession):
    """Drafts at the steps that a pattern names."""

    def __init__(self, pattern, *arguments):
        super().__init__(*arguments)
        self.pattern, self.number = pattern, -1

    def propose(self, sequences):
        number = self.number = self.number + 1
        drafts = self.pattern[number % len(self.pattern)] == "d"
        self.controller.choose = lambda *_: [(0.0,) * 3 for _ in sequences] if drafts else []
        return super().propose(sequences)


@dataclass(frozen=True)
class Scheduled(AutoDrafter):
    pattern: str = "d"

    def open(self, batch, slots):
        return Schedule(self.pattern, self.inner.open(batch, slots), Controller(self.experience), self.clock)


def generated(target, drafter, verifier, pattern, **settings):
    engine = foretoken.load(target, drafter="ngram", tokenizer=tiny.tokenizer())
    engine = replace(engine, drafter=drafter, verifier=VERIFIERS[verifier])
    if pattern:
        engine = replace(engine, drafter=Scheduled(drafter, Experience(expected_extra(range(4))), pattern=pattern))
    return engine.generate(["def f(x):", "ab ab ab"], max_new_tokens=70, seed=0, **settings)


@pytest.mark.parametrize(("kind", "pattern"), one_in(3, product(["lm", "ngram"], ["dp", "p" * 25 + "dd"])))
def test_greedy_text_is_the_plain_text_and_caches_catch_up(target, kind, pattern):
    drafter, verifier = drafters()[kind]
    plain = generated(target, NoDrafter(), verifier, "", temperature=0.0)
    got = generated(target, drafter, verifier, pattern, temperature=0.0)
    assert [r.token_ids for r in got] == [r.token_ids for r in plain]
    assert sum(r.stats.num_drafted for r in got) > 0


def test_a_text_that_joins_after_drafting_was_given_up_does_not_end_it_for_another():
    """Nothing is chosen at its first step, and what was said of the step before says nothing of it."""
    extra, now = expected_extra(range(6)), iter(range(10**6))
    costs = {1: Costs(extra, 1.0), 2: Costs(extra, 1.0, drafting=False, balance=-2.0)}
    session = AutoSession(
        NoDrafter(), Controller(Experience(extra, Acceptance(90.0, 100.0), costs)), lambda: float(next(now))
    )
    sequences = []

    def join():
        sequences.append(Sequence([1, 2, 3], Sampling(temperature=0.0), seeded(0), 10**6))
        session.join()

    def steps(count: int) -> int:
        drafted = 0
        for _ in range(count):
            trees = session.propose(sequences)
            drafted += session._asked
            session.observe(sequences, trees, [(0,)] * len(sequences))
        return drafted

    join()
    join()
    steps(20)
    assert session.controller.costs.balance < 0
    session.leave(1)
    sequences.pop()
    join()
    steps(3)
    assert not session._new
    session.leave(1)
    sequences.pop()
    assert steps(100) > 10


def proposals(drafter: Drafter, ids: list[int], start: int, shown: list[int]):
    """The greedy tree for `ids` of a session that was asked at the lengths `shown` before, in between not."""
    session = drafter.open(1, 400)
    session.join()
    seq = Sequence(ids[:start], Sampling(temperature=0.0), seeded(0), 10**6)
    for length in shown:
        seq.ids = ids[:length]
        trees = session.propose([seq])
        seq.ids = ids[: length + 1]  # the target took its own token
        child = trees[0].child(0, ids[length])
        session.observe([seq], trees, [(0,)])
        assert child is None or child == 1
    seq.ids = list(ids)
    seq.rng = seeded(1)
    (tree,) = session.propose([seq])
    return tree.tokens, tree.parents


def text_ids(n: int) -> list[int]:
    rng = torch.Generator().manual_seed(5)
    return torch.randint(1, 200, (n,), generator=rng).tolist()


@pytest.mark.parametrize("shown", [[10], [10, 11, 12, 14], [10, 40], [38]])
def test_a_language_model_catches_up_after_any_pause(shown):
    drafter = LMDrafter(CausalLM(tiny.llama(1)), static.kary(2, 2), Opaque, 257)
    ids = text_ids(60)
    assert proposals(drafter, ids, 8, shown) == proposals(drafter, ids, 8, [])


@pytest.mark.parametrize("method", ["slem", "tli", "slrs"])
@pytest.mark.parametrize("shown", [[3], [3, 4, 8], [20]])
def test_drafters_of_other_vocabularies_catch_up(method, shown):
    lm, small = tiny_tables.lms()
    source = TranslatedSource(method, lm.vocab_size, small, tiny_tables.translation())
    drafter = KINDS[method].make(source, static.chain(3), Opaque)
    ids = [1, 2, 3, 1, 1, 2, 3, 3, 2, 1, 3, 2, 2, 1, 3, 1, 2, 1, 3, 3, 1, 2, 2, 3, 1]
    assert proposals(drafter, ids, 2, shown) == proposals(drafter, ids, 2, [])


# The way in.


def test_load_takes_the_method(target):
    engine = foretoken.load(target, drafter="ngram", method="auto", tokenizer=tiny.tokenizer())
    assert isinstance(engine.drafter, AutoDrafter)
    assert engine.drafter.experience.extra == expected_extra(static.chain(24).sizes())
    check_greedy(engine, ["ab ab ab ab", "x", "def"], 40)
    assert foretoken.load(target, method="auto").drafter == NoDrafter()


def test_a_drafter_with_more_weights_than_its_target_drafts_nothing():
    folder = demo_folder()
    engine = foretoken.load(folder / "drafter", drafter=folder / "target", method="auto")
    assert engine.generate("def add(a, b):", max_new_tokens=30, temperature=0.0).stats.num_drafted == 0


def test_bytes_say_nothing_of_the_time_where_two_models_run_in_different_ways():
    folder = demo_folder()
    other = AutoModelForCausalLM.from_pretrained(folder / "target").eval()  # in transformers' modules
    engine = foretoken.load(folder / "drafter", drafter=other, method="auto")
    assert isinstance(engine.drafter, AutoDrafter)
    assert engine.drafter.experience.extra[1] == expected_extra((0, 1))[1]


def test_a_drafter_of_hidden_states_is_still_told_them():
    class Inner(LookupDrafter):
        feature_layers = (-1,)

        def open(self, batch, slots):
            session = super().open(batch, slots)
            session.learn = learnt.append
            return session

    learnt: list = []
    drafter = auto_drafter(Inner(static.chain(2)), (0, 1, 2), torch.device("cpu"))
    assert isinstance(drafter, FeatureDrafter)
    assert drafter.feature_layers == (-1,)
    session = drafter.open(1, 10)
    assert isinstance(session, LearningSession)
    session.learn([torch.zeros(1, 2)])
    assert len(learnt) == 1
    assert not isinstance(auto_drafter(LookupDrafter(static.chain(2)), (0, 1, 2), torch.device("cpu")), FeatureDrafter)


def test_the_clock_is_chosen_when_a_session_opens_and_stays(monkeypatch):
    """Another number of threads in the middle of a step must not make a difference of two clocks."""
    lm = CausalLM(tiny.llama(0))
    drafting = auto_drafter(LMDrafter(lm, static.chain(2), IID, 257), (0, 1, 2), torch.device("cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    session = drafting.open(1, 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert session.clock is time.thread_time
    other = drafting.open(1, 64)
    assert other.clock is time.perf_counter
    assert auto_drafter(drafting.inner, (0, 1, 2), torch.device("cuda")).session_clock() is time.perf_counter
    assert auto_drafter(drafting.inner, (0, 1, 2), torch.device("cpu"), Experience(EXTRA)).session_clock() is None


def test_the_surprise_of_a_draft_is_that_of_all_its_tokens_that_were_tried():
    tree = replace(opaque_tree([5, 6, 7, 8], [-1, 0, 1, 2]), sure=(1.0, 0.5, 0.25, 1e-300))
    assert _surprise(tree, 0) == pytest.approx(math.log(2))
    assert _surprise(tree, 1) == pytest.approx(math.log(4))
    assert _surprise(tree, 2) == _surprise(tree, 3) == pytest.approx(300 * math.log(10))
    assert _surprise(replace(tree, sure=None), 1) is None
    wide = replace(opaque_tree([5, 6, 7], [-1, 0, 0]), sure=(1.0, 0.2, 0.7))
    assert _surprise(wide, 0) == pytest.approx(-math.log(0.7))


DRAFTER = str(demo_folder() / "drafter-1k")


@pytest.mark.parametrize(
    ("options", "fixed"),
    one_in(
        4,
        [
            ({"drafter": "ngram"}, True),
            ({"drafter": "self"}, False),
            ({"drafter": "self", "method": "fixed"}, True),
            ({"drafter": DRAFTER, "vocab": "slem"}, True),
            ({"drafter": DRAFTER, "vocab": "slem", "law": "iid"}, False),
            ({"drafter": DRAFTER, "vocab": "union"}, False),
        ],
    ),
)
def test_where_a_seed_fixes_the_text_although_times_decide_what_is_drafted(options: dict, fixed: bool) -> None:
    """Draft tokens must be matched exactly, and be drafted without the text's random numbers."""
    engine = foretoken.load(
        demo_folder() / "target", **{"method": "auto", "device": "cpu", "dtype": "float32"} | options
    )
    assert engine.seeds_fix_texts is fixed
    settings = {"max_new_tokens": 24, "temperature": 1.0, "seed": 5}
    texts = {engine.generate("def main(", **settings).text for _ in range(3)}
    assert len(texts) == 1 or not fixed
