"""The rule of an engine where none is named, and engines with another tree."""

import json

import pytest

import tiny
from foretoken.build import load, plain, with_recipe
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, WithoutReplacement
from foretoken.decode import NoDrafter
from foretoken.engine import Engine
from foretoken.recipe import PLAIN, Recipe


def engine_of(models, drafter: object = "model", **options) -> Engine:
    named = models[1] if drafter == "model" else drafter
    return load(models[0], drafter=named, tokenizer=tiny.tokenizer(), drafter_tokenizer=tiny.tokenizer(), **options)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "block"),
        ({"method": "auto"}, "block"),
        ({"tree": "kary:1x3"}, "block"),
        ({"tree": "chain:3", "law": "without_replacement"}, "block"),
        ({"vocab": "tli"}, "block"),
        ({"tree": "kary:2x2"}, "traversal"),
        ({"tree": "kary:2x2", "method": "auto"}, "traversal"),
        ({"tree": "budget:6"}, "block-transport"),
        ({"tree": "dynamic:6"}, "exact-match"),
        ({"drafter": "ngram"}, "exact-match"),
        ({"drafter": "ngram", "tree": "kary:2x2"}, "exact-match"),
        ({"vocab": "slem"}, "exact-match"),
        ({"vocab": "union", "tree": "chain:2"}, "string-rejection"),
        ({"draft_probability": 0.5}, "randomised"),
        ({"tree": "kary:2x2", "draft_probability": 0.5}, "transport"),
    ],
)
def test_the_default_rule_is_of_the_tree_and_of_how_is_drafted(models, options, rule):
    assert engine_of(models, **options).verifier.name == rule


def test_a_path_in_a_file_is_a_chain(models, tmp_path):
    for parents, rule in (([-1, 0, 1, 2], "block"), ([-1, 0, 0], "traversal")):
        (tmp_path / "tree.json").write_text(json.dumps(parents))
        assert engine_of(models, tree=f"list:{tmp_path / 'tree.json'}").verifier.name == rule


def test_another_tree_takes_its_own_rule_unless_one_is_named(models):
    engine = engine_of(models, tree="chain:2")
    for tree, named, rule, law in (
        ("kary:2x2", None, "traversal", WithoutReplacement),
        ("kary:2x2", "transport", "transport", IID),
        ("chain:4", None, "block", IID),
        ("chain:4", "rrsw", "rrsw", WithoutReplacement),
    ):
        other = with_recipe(engine, Recipe(tree, named))
        assert (other.tree, other.verifier.name, other.drafter.law) == (tree, rule, law)
        assert other.drafter.laws == engine_of(models, tree=tree, verifier=named).drafter.laws
    with pytest.raises(ForetokenError, match="standard is not lossless"):
        with_recipe(engine, Recipe("kary:2x2", "standard"))
    with pytest.raises(ForetokenError, match="exact-match"):
        with_recipe(engine_of(models, "ngram"), Recipe("chain:2", "rrsw"))


def test_plain_decoding_stays_plain(models):
    engine = plain(engine_of(models))
    assert (engine.drafter, engine.tree) == (NoDrafter(), PLAIN)
    assert with_recipe(engine, Recipe("kary:2x2")) is engine
    assert engine_of(models, "none", tree="chain:3").drafter == NoDrafter()


@pytest.mark.parametrize("tree", ["chain:3", "kary:2x2"])
def test_another_tree_is_the_engine_that_load_makes(models, tree):
    """The same text and the same drafts for a seed."""
    wanted = engine_of(models, tree=tree).generate("ab", max_new_tokens=24, seed=2)
    got = with_recipe(engine_of(models), Recipe(tree)).generate("ab", max_new_tokens=24, seed=2)
    assert (got.token_ids, got.stats.num_drafted) == (wanted.token_ids, wanted.stats.num_drafted)
