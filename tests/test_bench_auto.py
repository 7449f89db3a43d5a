"""`python -m benchmarks auto` on tiny models."""

import pytest
import torch

import tiny
from benchmarks.auto import COLUMNS, Replay, by_lookup, changing, fill, halves, methods, useless
from foretoken.build import load
from foretoken.core.errors import ForetokenError
from foretoken.measure.continuations import Continued, Runs
from foretoken.measure.report import Table

pytestmark = pytest.mark.long


def runs(*of: tuple[tuple[int, ...], float]) -> Runs:
    return Runs(tuple(Continued(tokens, seconds) for tokens, seconds in of))


def test_rows_compare_with_plain_and_with_the_best_fixed_method():
    table = Table("", COLUMNS)
    fill(table, {
        "plain": runs(((1, 1), 2.0), ((1, 1), 4.0)),
        "chain:2": runs(((2, 2), 2.0), ((2, 2), 2.0)),
        "auto": runs(((2, 1), 2.0), ((2, 1), 2.0)),
    })  # fmt: skip
    plain, chain, auto = table.rows
    assert plain[2:4] == [1, pytest.approx((4 / 6) / 2)]
    assert chain[2:] == [pytest.approx((2 + 4) / 2), 1, 2]
    assert auto[3] == pytest.approx((6 / 4) / 2)


def test_a_replayed_text_is_written_whatever_the_model_wants():
    engine = load(tiny.llama(0), drafter="ngram", tokenizer=tiny.tokenizer())
    (replay,) = changing([[5, 6]], [[9] * 3, [7, 8, 9, 10, 11]], 4)
    assert replay.text == [5, 6, 7, 8, 9, 10, 7, 8, 9, 10]
    result = engine.generate([5, 6], max_new_tokens=8, seed=0, processors=(replay,))
    assert result.token_ids == replay.text[2:]
    assert bool(Replay([1, 2])(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 4)).isfinite().any())
    with pytest.raises(ForetokenError, match="0 held-out texts have 9 tokens"):
        changing([[5]], [[1] * 8], 9)


def test_tokens_a_step_by_half():
    assert halves(runs(((1, 1, 4, 4), 1.0)), 2) == (1, 4)


def test_a_useless_drafter_is_another_one_of_the_same_shape():
    target = tiny.llama(0)
    engine = load(target, drafter=tiny.perturbed(target, 0.1, 1))
    other = useless(engine, 0)
    assert other.drafter.laws == engine.drafter.laws
    good = engine.drafter.lm  # pyright: ignore[reportAttributeAccessIssue]
    drafting = [methods(other, ["chain:3"])["chain:3"].drafter, other.drafter]
    assert all(of.lm is not good for of in drafting)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ForetokenError, match="has no weights"):
        useless(load(target, drafter="ngram", tokenizer=tiny.tokenizer()), 0)


def test_prompt_lookup_drafts_in_every_method_of_its_case() -> None:
    target = tiny.llama(0)
    engine = by_lookup(load(target, drafter=tiny.perturbed(target, 0.1, 1), tokenizer=tiny.tokenizer()))
    found = methods(engine, ["chain:3", "chain:8"])
    assert {of.source.kind for of in found.values()} == {"ngram"}
    assert [found[name].drafter.name for name in ("chain:3", "chain:8")] == ["ngram", "ngram"]
    assert found["chain:3"].verifier.name == "exact-match"


def test_the_command_runs_every_case(run, unchecked):
    few = ("--prompts", 1, "--max-new-tokens", 24, "--rounds", 1, "--temperature", 0, "--tree", "chain:2", "--json")
    good, random, lookup = run.json("benchmarks", "auto", *few)["tables"]
    for table, fixed in ((good, ["chain:2"]), (random, ["chain:2"]), (lookup, ["chain:3", "chain:8"])):
        assert [row["method"] for row in table["rows"]] == ["plain", *fixed, "auto"]
        assert table["rows"][0]["x plain"] == 1
        assert max(row["x best fixed"] for row in table["rows"][:-1]) == 1
    assert len(lookup["notes"]) == 4
