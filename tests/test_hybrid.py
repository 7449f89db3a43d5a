"""Two drafters in a row: the text's law, its seed, who drafts when, and what is refused."""

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from itertools import product

import pytest
import torch

import foretoken
import tiny
from engines import check_greedy, ids_of
from foretoken.audit.decoding import Decoding, deviation, own_law, table_pair
from foretoken.build import load
from foretoken.cli.options import EngineOptions
from foretoken.core.interfaces import DraftSession, FeatureDrafter, GuestSession, LearningSession, PrefixSession
from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import PricedSiblings, TokenTree, chain, root_only
from foretoken.draft.acceptance import Acceptance
from foretoken.draft.auto import AutoDrafter, AutoSession
from foretoken.draft.controller import Controller, Costs, Experience, expected_extra
from foretoken.draft.hybrid import HybridDrafter, HybridSession
from foretoken.draft.lookup import LookupDrafter
from foretoken.draft.own import OwnDrafter
from foretoken.recipe import in_a_row
from foretoken.trees import static
from foretoken.trees.budget import BudgetTree
from foretoken.verify import VERIFIERS
from foretoken.verify.strings import StringRejection
from test_auto import CASES, enumerated
from thinning import one_in

PROMPTS = ["def f(x):\n    return x\n\ndef g(x):\n", "ab ab ab ab", "import os\nimport sys\n", "one two three one two"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rule", "family", "policy"),
    [
        *CASES,
        ("traversal", WithoutReplacement, static.kary(2, 1)),
        ("block-transport", IID, BudgetTree(3, depth=2, most_draws=2)),
    ],
)
def test_whole_decodings_have_the_targets_law(monkeypatch, rule, family, policy):
    """Each drafter in turn, as the text has it: a step of the lookup may follow one of the model, and the reverse."""
    target, inner = table_pair(policy, family, 2, seed=3)
    drafter = HybridDrafter(inner, LookupDrafter(static.chain(3)), policy.sizes())
    by = set[bool]()
    propose = HybridSession.propose

    def watched(self, sequences):
        trees = propose(self, sequences)
        by.update(mine for mine, tree in zip(self._taken, trees, strict=True) if len(tree) > 1)
        return trees

    monkeypatch.setattr(HybridSession, "propose", watched)
    prompt = (0, 1, 0, 0, 1, 0)
    law, _ = enumerated(lambda: drafter, target, VERIFIERS[rule], 4, prompt)
    assert math.fsum(law.values()) == pytest.approx(1, abs=1e-12)
    own = own_law(Decoding(target, inner, VERIFIERS[rule], prompt=prompt, num_tokens=4))
    assert deviation(law, own) <= 1e-12
    assert by == {False, True}, "only one of the two drafted"


def in_row(models, first="suffix", **options) -> foretoken.Engine:
    """The lookup and the model in a row, both as objects: what `load` makes of names of folders."""
    tokenizers = {"tokenizer": tiny.tokenizer(), "drafter_tokenizer": tiny.tokenizer()}
    engine = load(models[0], drafter=models[1], **tokenizers, **options)
    looked_up = load(models[0], drafter=first, tokenizer=tiny.tokenizer())
    sizes = foretoken.tree(engine.recipe.tree).sizes()
    return replace(engine, drafter=HybridDrafter(engine.drafter, looked_up.drafter, sizes))


@pytest.mark.parametrize(
    ("first", "tree"), one_in(5, product(["ngram", "suffix"], ["chain:3", "kary:2x2", "budget:6", "dynamic:6"]))
)
def test_the_greedy_text_is_the_plain_text(models, tree, first):
    check_greedy(in_row(models, first, tree=tree, max_batch=2), PROMPTS, times=2)


@pytest.mark.parametrize("tree", one_in(3, ["kary:2x2", "chain:3", "budget:6"]))
def test_a_seed_fixes_the_text_whatever_the_store_holds_and_whoever_is_beside_it(models, tree):
    engine = in_row(models, tree=tree)
    settings = {"max_new_tokens": 40, "temperature": 0.8}
    alone = [engine.generate(prompt, seed=5 + i, **settings).token_ids for i, prompt in enumerate(PROMPTS)]
    for prompt in PROMPTS:  # now the store holds these texts, and greedy ones of the same prompts
        engine.generate(prompt, max_new_tokens=40, temperature=0.0)
    assert ids_of(engine.generate(PROMPTS, seed=5, **settings)) == alone
    assert ids_of([engine.generate(PROMPTS[2], seed=7, **settings)]) == alone[2:3]


class Recorded:
    """A drafter that always drafts the same chain, and notes what it was asked and shown."""

    name, laws, max_nodes = "recorded", (Opaque(1),), 4

    def __init__(self) -> None:
        self.rows = 0
        self.asked: list[list[int]] = []
        self.shown: list[list[tuple[int, ...]]] = []

    def open(self, batch, slots) -> DraftSession:
        return self

    def join(self) -> None:
        self.rows += 1

    def leave(self, row) -> None:
        self.rows -= 1

    def propose(self, sequences):
        self.asked.append([seq.depth_left for seq in sequences])
        return [chain([seq.ids[-1], 3, 3], [foretoken.Siblings((3,), None, Opaque(1))] * 2 + [None])
                if seq.depth_left > 0 else root_only(seq.ids[-1]) for seq in sequences]  # fmt: skip

    def observe(self, sequences, trees, paths) -> None:
        self.shown.append(list(paths))
        assert [len(tree) > 1 for tree in trees] == [depth > 0 for depth in self.asked[-1]]


def text(ids: Iterable[int]) -> Sequence:
    return Sequence([*ids], Sampling(temperature=0.0), seeded(0), 100)


def opened(model, texts: int = 1) -> HybridSession:
    """A session of so many texts, of a model and of a lookup."""
    session = HybridDrafter(model, LookupDrafter(static.chain(8)), (0, 1, 2)).open(texts, 200)
    for _ in range(texts):
        session.join()
    return session


def test_each_text_of_a_batch_is_drafted_by_the_one_that_gains_more_there():
    """One repeats itself, the other does not; the model sees the first as a text for which nothing is drafted."""
    model = Recorded()
    session = opened(model, texts=2)
    sequences = [text([*range(10, 40), *range(10, 30)]), text([*range(50, 90)])]
    looked_up, drafted = session.propose(sequences)
    assert looked_up.tokens == (29, *range(30, 38))
    assert drafted.tokens == (89, 3, 3)
    assert model.asked == [[0, 99]]
    assert [seq.depth_left for seq in sequences] == [99, 99]
    for seq, tree in zip(sequences, (looked_up, drafted), strict=True):
        seq.ids += [*tree.tokens[1:], 1]
    session.observe(sequences, [looked_up, drafted], [tuple(range(9)), (0, 1, 2)])
    assert model.shown == [[(0,), (0, 1, 2)]]


def test_where_all_texts_are_looked_up_the_model_is_not_asked():
    model = Recorded()
    session = opened(model)
    (tree,) = session.propose([seq := text([*range(10, 40), *range(10, 30)])])
    seq.ids += [30, 1]
    session.observe([seq], [tree], [(0, 1)])
    assert (model.asked, model.shown) == ([], [])


def test_a_model_whose_drafts_fail_loses_its_turn_to_a_short_match():
    """A match of one token is worth less than a model's draft, until the model's drafts are known to be useless."""

    def chosen_after(useless: int) -> tuple[int, int]:
        """(how often the model was asked, the first draft token) at a match of one token after useless drafts."""
        model = Recorded()
        session = opened(model)
        seq = text([1, 2, *range(20, 40)])
        for new in range(100, 100 + useless):
            (tree,) = session.propose([seq])
            seq.ids += [new]
            session.observe([seq], [tree], [(0,)])
        seq.ids += [20]
        asked = len(model.asked)
        return asked, session.propose([seq])[0].tokens[1]

    assert chosen_after(0) == (0, 3)
    assert chosen_after(12) == (12, 21)


# Every kind of model behind a lookup.


def test_names():
    assert in_a_row("suffix+self") == ("suffix", "self")
    assert in_a_row("ngram+models/a+b") == ("ngram", "models/a+b")
    for alone in ("suffix", "self", "models/a+b", None, 3):
        assert in_a_row(alone) == (None, alone)


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("hybrid")
    return {
        "target": tiny.save(deepcopy(models[0]), root / "target"),
        "drafter": tiny.save(deepcopy(models[1]), root / "drafter"),
        "wide": tiny.save(tiny.llama(0, hidden=64), root / "wide"),
        "other": tiny.save(tiny.llama(3, vocab=259), root / "other", extra=("self", "def")),
    }


def test_a_folder_after_a_lookup(folders):
    engine = foretoken.load(folders["target"], drafter=f"suffix+{folders['drafter']}", tree="chain:3")
    assert (engine.recipe.tree, engine.verifier.name, engine.drafter.max_nodes) == ("chain:3", "block", 25)
    assert engine.drafter.name == f"suffix+{engine.drafter.inner.name}"
    assert engine.fingerprint == "suffix+" + foretoken.load(folders["target"], drafter=folders["drafter"]).fingerprint
    other = foretoken.build.with_recipe(engine, foretoken.recipe.Recipe("kary:2x2"))
    assert other.drafter.lookup.store is engine.source.store is not None
    assert isinstance(engine.drafter.open(1, 64), PrefixSession)


@pytest.mark.parametrize("method", ["fixed", "auto"])
def test_the_targets_own_weights_after_a_lookup(folders, method):
    """In the target's cache, which both leave as it must be."""
    engine = foretoken.load(folders["wide"], drafter="suffix+self", method=method, dtype="float32", max_batch=2)
    model = engine.drafter.inner
    assert isinstance(model.inner if isinstance(model, AutoDrafter) else model, OwnDrafter)
    assert isinstance(engine.drafter.open(1, 64), GuestSession)
    check_greedy(engine, PROMPTS, times=2)


def test_a_head_after_a_lookup_is_still_told_the_hidden_states(models):
    class Head(Recorded):
        feature_layers = (-1,)
        learnt = 0

        def learn(self, features) -> None:
            Head.learnt += len(features)

    drafter = HybridDrafter(Head(), LookupDrafter(static.chain(4)), (0, 1, 2))
    assert isinstance(drafter, FeatureDrafter)
    assert not isinstance(HybridDrafter(Recorded(), LookupDrafter(static.chain(4)), (0, 1, 2)), FeatureDrafter)
    session = drafter.open(1, 64)
    assert isinstance(session, LearningSession)
    session.learn([torch.zeros(1, 2)])
    assert (drafter.feature_layers, Head.learnt) == ((-1,), 1)


@pytest.mark.parametrize(
    ("vocab", "method"), one_in(3, [("slem", "fixed"), ("tli", "fixed"), ("slrs", "fixed"), ("auto", "auto")])
)
def test_another_vocabulary_after_a_lookup(folders, vocab, method):
    engine = foretoken.load(folders["target"], drafter=f"suffix+{folders['other']}", vocab=vocab, method=method)
    assert isinstance(engine.drafter, HybridDrafter)
    check_greedy(engine, PROMPTS, 30, times=2)
    assert all(result.token_ids for result in engine.generate(PROMPTS, max_new_tokens=10, temperature=1.0, seed=0))


def test_the_folder_after_a_lookup_is_found_from_elsewhere(folders, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").symlink_to(folders["drafter"])
    options = EngineOptions(target=folders["target"], drafter="suffix+small").anywhere()
    assert options.drafter == f"suffix+{tmp_path / 'small'}"
    assert EngineOptions(target=folders["target"], drafter="suffix+self").anywhere().drafter == "suffix+self"


@pytest.mark.parametrize(("before", "content"), [("list:", "[-1, 0, 0]"), ("sequoia:4@", '{"acceptance": [0.6, 0.2]}')])
def test_the_file_of_a_tree_is_found_from_elsewhere(folders, monkeypatch, tmp_path, before, content):
    monkeypatch.chdir(tmp_path)
    pair = {name: folders[name] for name in ("target", "drafter")}
    (tmp_path / "shape.json").write_text(content)
    options = EngineOptions(**pair, tree=f"{before}shape.json").anywhere()
    assert options.tree == f"{before}{tmp_path / 'shape.json'}"
    assert EngineOptions(**pair, tree="kary:2x2").anywhere().tree == "kary:2x2"


class NoneAtHalf:
    """Drafts token 0 or, at every second step in the mean, nothing, and prices what it drew."""

    def join(self) -> None: ...

    def leave(self, row: int) -> None: ...

    def observe(self, sequences, trees, paths) -> None: ...

    def propose(self, sequences) -> list[TokenTree]:
        trees = []
        for seq in sequences:
            drawn = (0,) if float(torch.rand(1, generator=self.generator)) < 0.5 else ()
            root = PricedSiblings(drawn, None, Opaque(1), lambda token: (0.5, 0.0)[token])
            trees.append(chain([seq.ids[-1], *drawn], [root, *([None] * len(drawn))]))
        return trees

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)


@pytest.mark.usefixtures("unchecked")
def test_that_no_draft_token_was_drawn_is_not_replaced_by_a_lookup():
    """Of 1,500 tokens with p = (1/2, 1/2) 750 +- 19 are the first; 674 to 826 are in 4 standard deviations."""
    session = HybridSession(NoneAtHalf(), LookupDrafter(static.chain(4)).open(1, 64), (0, 1))
    p, rng, first = torch.tensor([0.5, 0.5], dtype=torch.float64), seeded(3), 0
    for _ in range(1500):
        seq = Sequence([0, 1], Sampling(temperature=1.0), rng, 8)
        session.join()
        (tree,) = session.propose([seq])
        path, token = StringRejection().walk(tree, lambda nodes: p[None].expand(len(nodes), -1), rng)
        first += (tree.tokens[path[1]] if len(path) > 1 else token) == 0
        session.leave(0)
    assert 674 <= first <= 826


@pytest.mark.usefixtures("unchecked")
def test_a_lookup_is_not_cut_at_the_depth_of_the_models_last_draft():
    session = HybridSession(NoneAtHalf(), LookupDrafter(static.chain(24)).open(1, 256), (0, 1))
    seq = Sequence(list(range(2, 62)) * 2, Sampling(temperature=0.0), seeded(0), 100)
    session.join()
    seq.floors = (0.0,)  # as a controller of the model leaves it
    assert session.propose([seq])[0].num_drafted == 24


@pytest.mark.parametrize(("accepted", "since"), [(90.0, 10**6), (1.0, 5)])
def test_no_lookup_takes_the_place_of_a_plain_step_that_is_measured(accepted, since):
    """The model's controller would take a lookup's nodes for what a plain step costs: where it is time to measure that,
    and where drafting seems to pay no more."""
    extra, now = expected_extra(range(4)), iter(range(10**6))
    costs = Costs(extra, 1.0, since_look=since)
    assert costs.due == (since > 5)
    controller = Controller(Experience(extra, Acceptance(accepted, 100.0), {1: costs}))
    auto = AutoSession(Recorded(), controller, lambda: float(next(now)))
    session = HybridSession(auto, LookupDrafter(static.chain(4)).open(1, 256), (0, 1, 2))
    seq, drafted = text([1, 2, *range(20, 40)]), []
    session.join()
    for new in (20, 50, 20, 51, 20, 52, 20, 53, 20, 54):  # after 20 a lookup finds 21, a match of one token
        (tree,) = session.propose([seq])
        drafted.append((auto.looking, tree.num_drafted > 0))
        seq.ids.append(new)
        session.observe([seq], [tree], [(0,)])
    assert (True, True) not in drafted
    assert {looking for looking, _ in drafted} == {True, False}


@pytest.mark.parametrize("beside", [0, 1])
def test_under_method_auto_a_batch_is_left_to_the_model(models, beside):
    """Looked-up nodes take time from the other texts of a batch: with 32 users they made it five times slower."""
    engine = in_row(models, "ngram", method="auto")
    session = engine.drafter.open(2, 256)
    sequences = [Sequence(list(range(2, 62)) * 2, Sampling(temperature=0.0), seeded(i), 100) for i in range(1 + beside)]
    for _ in sequences:
        session.join()
    assert [tree.num_drafted > 0 for tree in session.propose(sequences)] == [beside == 0] * len(sequences)
