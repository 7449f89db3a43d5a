"""`python -m benchmarks repetitive` on a tiny model: every drafter, the same texts, and what a store may remember."""

import pytest

from benchmarks.by_kind import rows
from benchmarks.ngram_rule import NgramRule
from benchmarks.peers import Answered
from benchmarks.repetitive import KINDS, RULE, engines, read_prompts
from command import Command
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.draft.store import Store
from foretoken.measure.harness import Turn, blocks
from serving import save_target

pytestmark = pytest.mark.long

NAMES = ["plain", RULE, "ngram", "suffix", "self", "suffix+self"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("repetitive"))


def test_every_drafter_writes_the_plain_text(run: Command, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = []
    monkeypatch.setattr(Store, "clear", lambda store: cleared.append(store))
    options = ("--target", target, "--kind", "chat", "--unseen", "--max-new-tokens", 24, "--rounds", 2, "--json")
    found = run.json("benchmarks", "repetitive", *options)["rows"]
    assert [row["name"] for row in found] == NAMES
    assert {row["kind"] for row in found} == {"chat"}
    assert all(row["num_same"] == row["num_answers"] == 4 for row in found)
    assert all(row["tokens_per_step"] >= 1 for row in found)
    assert found[0]["vs_plain"][0] == found[1]["vs_other"][0] == 1
    assert len(cleared) == 4, "once a round for each of two stores"


def test_prompts() -> None:
    for kind in KINDS:
        shown, unseen = (read_prompts([kind], unseen)[1] for unseen in (False, True))
        assert (len(shown), len(unseen)) == (6, 2)
        assert not [each for each in shown if each in unseen]


@pytest.mark.parametrize("method", ["fixed", "auto"])
def test_each_store_is_its_own(target: str, method: str) -> None:
    made = engines(target, method)
    assert list(made) == ["plain", RULE, "ngram", "suffix", "self", "suffix+self"]
    stores = [engine.source.store for engine in made.values() if engine.source.store is not None]
    assert len(stores) == 2
    assert stores[0] is not stores[1]


def test_ratios_are_taken_of_the_same_prompt_in_the_same_round() -> None:
    """Whatever the machine's speed in a block: twice as fast is twice as fast, without an error."""
    turns = []
    for block, pace in zip(blocks(2, 2, [0.0]), (1.0, 3.0, 0.5, 7.0), strict=True):
        turns.append(Turn("plain", block, 0, False, Answered(10, 2 * pace, 10, [1])))
        turns.append(Turn(RULE, block, 1, False, Answered(10, pace, 5, [1])))
        turns.append(Turn("suffix", block, 2, True, Answered(10, pace / 2, 2, [block.prompt + 1])))
    plain, rule, suffix = rows(turns, ["edits", "edits"], RULE)
    assert (plain.vs_plain, rule.vs_plain, rule.vs_other) == ((1.0, 0.0), pytest.approx((2, 0)), (1.0, 0.0))
    assert suffix.vs_plain == pytest.approx((4, 0))
    assert suffix.vs_other == pytest.approx((2, 0))
    assert (suffix.tokens_per_step, suffix.num_same, suffix.num_answers) == (5, 2, 4)


def test_the_rule_before_drafts_what_followed_the_last_occurrence() -> None:
    """The latest of the longest n-gram; where it runs into the end of the text, the one before it goes on."""

    def drafted(ids: list[int], depth: int) -> list[int]:
        session = NgramRule(depth).open(1, 64)
        session.join()
        return [*session.propose([Sequence(ids, Sampling(temperature=0.0), seeded(0), 50)])[0].tokens[1:]]

    assert drafted([1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3], 3) == [4, 9, 2]
    assert drafted([1, 2, 8, 5, 1, 2, 1, 2], 4) == [1, 2]
    assert drafted([1, 2, 3], 4) == []
