"""Chains that end where the drafter is unsure: exact as they stand, lossy if the unsure draft itself is dropped."""

import pytest

from foretoken.audit.decoding import TOLERANCE, Shape, measure
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.core.tree import Siblings, TreeBuilder
from foretoken.names import tree_policy
from foretoken.trees.confident import ConfidentChain, Sure
from foretoken.verify import VERIFIERS
from tables import tiny_engine


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("rule", "family"),
    [("block", IID), ("block-transport", IID), ("rrs", IID), ("rrsw", WithoutReplacement), ("exact-match", Opaque)],
)
def test_whole_decodings_have_the_targets_law(rule, family, seed):
    found = measure(VERIFIERS[rule], family, Shape("chain:3@0.5", ConfidentChain(3, 0.5), 2), seed, num_tokens=4)
    assert found.worst <= TOLERANCE
    assert found.accepted > 0.3


def test_dropping_the_unsure_draft_is_caught(monkeypatch):
    """A node whose draw was made and then taken back has another law than one where none was made."""
    add = TreeBuilder.add

    def forgetful(self, parent, record):
        kept = tuple(x for x in record.draws if record.q is None or record.q[x] >= 0.5)
        return add(self, parent, Siblings(kept, record.q, IID(len(kept))))

    shape = Shape("wrong", ConfidentChain(2, 0.5), 3)
    assert measure(VERIFIERS["rrs"], IID, shape, 1).exact
    monkeypatch.setattr(TreeBuilder, "add", forgetful)
    assert measure(VERIFIERS["rrs"], IID, shape, 1).worst > 0.01


def test_a_node_below_the_floor_gets_no_child():
    tree = ConfidentChain(4, 0.25)
    states = [Sure(0.25, 1), Sure(0.2499, 1), Sure(1.0, 4)]
    assert [plan is not None for plan in tree.plan(states, None, IID)] == [True, False, False]
    assert tree.select(states, 0) == [0]
    assert tree.select(states, 1) == []
    assert tree.sizes() == (0, 1, 2, 3, 4)


def test_it_drafts_less_than_the_whole_chain_and_gives_the_same_text_in_a_batch():
    fixed, ended = tiny_engine(tree="chain:5"), tiny_engine(tree="chain:5@0.02")
    prompts, options = [[3, 1, 4], [1, 5, 9], [2, 6, 5], [3, 5, 8]], {"max_new_tokens": 24, "temperature": 1.0}
    together = ended.generate(prompts, seed=3, **options)
    for i, (prompt, result) in enumerate(zip(prompts, together, strict=True)):
        assert ended.generate(prompt, seed=3 + i, **options).token_ids == result.token_ids
    drafts = [sum(r.stats.num_drafted for r in e.generate(prompts, seed=3, **options)) for e in (fixed, ended)]
    assert 0 < drafts[1] < drafts[0]


@pytest.mark.parametrize(
    ("spec", "says"),
    [("chain:4@", "a number, not ''"), ("chain:4@x", "not 'x'"), ("chain:4@0", "above 0"), ("chain:4@1.5", "1.5"),
     ("chain:0@0.5", "positive integers"), ("chain:4@nan", "nan")],
)  # fmt: skip
def test_bad_words_are_named(spec, says):
    with pytest.raises(ForetokenError, match=says):
        tree_policy(spec)
