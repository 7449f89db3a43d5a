"""Trees that end where the drafter is unsure: exact as they stand, lossy if the unsure draft itself is dropped."""

import pytest

from foretoken.audit.decoding import Shape, measure
from foretoken.audit.enumerate import TOLERANCE
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import Siblings, TreeBuilder
from foretoken.names import tree_policy
from foretoken.verify import VERIFIERS
from tables import tiny_engine


def test_dropping_the_unsure_draft_is_caught(monkeypatch):
    """A node whose draw was made and then taken back has another law than one where none was made."""
    add = TreeBuilder.add

    def forgetful(self, parent, record):
        kept = tuple(x for x in record.draws if record.q is None or record.q[x] >= 0.5)
        return add(self, parent, Siblings(kept, record.q, IID(len(kept))))

    shape = Shape("wrong", tree_policy("chain:2@0.5"), 3)
    assert measure(VERIFIERS["rrs"], IID, shape, 1).exact
    monkeypatch.setattr(TreeBuilder, "add", forgetful)
    assert measure(VERIFIERS["rrs"], IID, shape, 1).worst > 0.01


@pytest.mark.parametrize("rule", ["rrs", "transport", "block-transport", "exact-match"])
def test_trees_that_branch_may_end_early_too(rule):
    family = VERIFIERS[rule].laws[0]
    found = measure(VERIFIERS[rule], family, Shape("kary:2x2@0.5", tree_policy("kary:2x2@0.5"), 2), 5)
    assert found.worst <= TOLERANCE


def test_a_law_may_give_fewer_draws_than_there_are_children():
    """Without replacement from two tokens a node gets two children of three."""
    engine = tiny_engine(tree="kary:3x2@0.001", verifier="rrsw")
    result = engine.generate([3, 1, 4], max_new_tokens=16, top_k=2, seed=0)
    assert result.stats.num_drafted > 20


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_node_has_a_child_below_the_floor(temperature):
    engine = tiny_engine(tree="kary:2x4@0.01")
    session, seq = engine.drafter.open(1, 64), Sequence([3, 1, 4], Sampling(temperature), seeded(0), 9)
    session.join()
    (tree,) = session.propose([seq])
    (growth,) = session.growths
    parents = set(tree.parents[1:])
    assert len(growth.states) == len(tree)
    goes_on = [sure >= 0.01 for sure in growth.sure]
    for node, on in enumerate(goes_on):
        assert (node in parents) == (on and len(tree.path_to(node)) < 5)
    assert {*goes_on} == {True, False}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verifier", ["standard", "exact-match"])
def test_a_chain_ends_below_the_floor_of_its_depth(temperature, verifier):
    """And at the depth behind the last floor, however sure the drafter is."""
    engine = tiny_engine(tree="chain:8", verifier=verifier)

    def drafted(seed: int, floors: tuple[float, ...]) -> tuple[float, ...]:
        seq = Sequence([3, seed, 4], Sampling(temperature), seeded(seed), 20)
        seq.floors = floors
        session = engine.drafter.open(1, 64)
        session.join()
        (tree,) = session.propose([seq])
        assert len(tree.sure) == len(tree)
        return tree.sure

    whole = [drafted(seed, (1.0, 0.0, 0.0, 0.0, 0.0)) for seed in range(9)]
    assert all(len(sure) == 6 and sure[0] == 1 and sorted(sure, reverse=True) == [*sure] for sure in whole)
    middle = sorted(sure[2] for sure in whole)[4]
    for seed, sure in enumerate(whole):
        cut = drafted(seed, (1.0, 0.0, middle, 0.0))
        assert cut == pytest.approx(sure[: 5 if sure[2] >= middle else 3])


@pytest.mark.parametrize(("floors", "told"), [((0.0, 0.0), False), ((0.0, 0.1), True)])
def test_in_a_batch_the_drafter_tells_how_sure_it_is_only_where_that_decides(floors, told):
    session = tiny_engine(tree="chain:8").drafter.open(2, 64)
    texts = [Sequence([3, seed, 4], Sampling(0.0), seeded(seed), 20) for seed in range(2)]
    for seq in texts:
        session.join()
        seq.floors = floors
    trees = session.propose(texts)
    assert all(len(tree) <= 3 and (tree.sure is not None) is told for tree in trees)


@pytest.mark.parametrize(
    ("spec", "says"),
    [("chain:4@", "not ''"), ("chain:4@x", "not 'x'"), ("chain:4@0", "above 0"), ("chain:4@1.5", "1.5"),
     ("chain:0@0.5", "positive integers"), ("chain:4@nan", "nan"), ("kary:2x3@2", "kary:KxD@C"),
     ("delayed:2", "is incomplete"), ("delayed:2+3", "is incomplete"), ("delayed:-1+2x2", "positive integers"),
     ("delayed:2+0x2", "positive integers"), ("delayed:100+64x64", "more than")],
)  # fmt: skip
def test_bad_words_are_named(spec, says):
    with pytest.raises(ForetokenError, match=says):
        tree_policy(spec)
