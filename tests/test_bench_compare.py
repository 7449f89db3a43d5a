"""`python -m benchmarks compare` on a tiny model: any ways to draft, the same greedy texts, and figures by kind."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import gguf_zoo
from benchmarks.by_kind import ALL, rows, tables
from benchmarks.compare import engines, read_prompts, read_way
from benchmarks.peers import Answered
from command import Command
from foretoken.core.errors import ForetokenError
from foretoken.measure.harness import Turn, blocks
from foretoken.measure.report import Report
from foretoken.models.panels import PackedLinear
from serving import save_target

pytestmark = pytest.mark.long

LINES = [
    {"kind": "chat", "prompt": "a b"},
    {"kind": "chat", "prompt": "b a"},
    {"kind": "code", "prompt": "c d"},
    {"kind": "chat", "prompt": "d c"},
    {"kind": "code", "prompt": "b c d"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a file of prompts."""
    folder = tmp_path_factory.mktemp("compare")
    save_target(folder / "target", context=512)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return folder


def options(folder: Path) -> tuple[str | int, ...]:
    named = ("--target", str(folder / "target"), "--workload", str(folder / "prompts.jsonl"))
    return (*named, "--prompts", 2, "--max-new-tokens", 12)


def test_every_way_writes_the_plain_text(run: Command, folder: Path) -> None:
    ways = ("in 4 bits: drafter=self tree=chain:2", "drafter=ngram method=auto", "drafter=self:q8_0 tree=kary:2x2")
    named = [part for way in ways for part in ("--way", way)]
    found = run.json("benchmarks", "compare", *options(folder), *named)
    assert found["ways"]["in 4 bits"] == {"drafter": "self", "tree": "chain:2"}
    greedy = [row for row in found["rows"] if row["temperature"] == 0]
    assert {row["kind"] for row in greedy} == {ALL, "chat", "code"}
    assert {row["name"] for row in greedy} == {"plain", "in 4 bits", *ways[1:]}
    assert all(row["num_same"] == row["num_answers"] == (4 if row["kind"] == ALL else 2) for row in greedy)
    drafted = next(row for row in greedy if row["name"] == "in 4 bits")
    assert drafted["tokens_per_step"] > 1
    assert {row["temperature"] for row in found["rows"]} == {0, 0.7}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--way", "drafter=self colour=red"], "colour=red"),
        (["--way", "self"], "'self'"),
        (["--way", "a: "], "names no option"),
        (["--way", "plain: drafter=self"], "name of its own"),
        (["--way", "a: drafter=self", "--way", "a: drafter=ngram"], "name of its own"),
        (["--way", "drafter=self", "--prompts", 3], "2 prompts of kind code"),
        (["--way", "drafter=self", "--prompts", 0], "prompts"),
        (["--way", "drafter=no-such-folder"], "no-such-folder"),
        (["--way", "drafter=suffix"], "suffix"),
        (["--way", "quantise=q8_0 drafter=ngram"], "quantise=q8_0"),
    ],
)
def test_what_cannot_be_is_refused(run: Command, folder: Path, given: list[str | int], said: str) -> None:
    run.refused(said, "benchmarks", "compare", *options(folder), *given)


def test_a_way_is_read_with_or_without_a_name() -> None:
    assert read_way("slem, 4 bits: drafter=a/b vocab=slem") == ("slem, 4 bits", {"drafter": "a/b", "vocab": "slem"})
    alone = "drafter=self:q4_0 tree=chain:4"
    assert read_way(alone) == (alone, {"drafter": "self:q4_0", "tree": "chain:4"})
    with pytest.raises(ForetokenError, match="max_batch=2"):
        read_way("drafter=self max_batch=2")


def test_prompts_of_each_kind_take_turns(folder: Path) -> None:
    kinds, prompts = read_prompts(str(folder / "prompts.jsonl"), 2)
    assert kinds == ["chat", "code", "chat", "code"]
    assert prompts == ["a b", "c d", "b a", "b c d"]


def test_a_kind_has_the_ratios_of_its_own_prompts() -> None:
    """Twice as fast on one kind and eight times on the other is four times in all, the geometric mean."""
    turns = []
    for block in blocks(2, 2, [0.0]):
        turns.append(Turn("plain", block, 0, False, Answered(8, 8.0, 8, [1])))
        turns.append(Turn("drafted", block, 1, True, Answered(8, 1.0 if block.prompt else 4.0, 2, [1])))
    found = {(row.kind, row.name): row for row in rows(turns, ["chat", "code"])}
    assert [found[kind, "drafted"].vs_plain[0] for kind in (ALL, "chat", "code")] == pytest.approx([4, 2, 8])
    assert np.isnan(found["chat", "drafted"].vs_plain[1])  # of one prompt nothing is known of the error
    assert found[ALL, "drafted"].tokens_per_step == 4
    report = Report("", {})
    tables(report, list(found.values()))
    assert report.tables[0].rows[1][2:5] == ["4.00 ± 2.77", "2.00", "8.00"]  # two prompts, whatever the rounds


def test_decoding_is_told_apart_from_reading_the_prompt() -> None:
    """Both ways read it for two seconds; then one takes a quarter of the other's time for the same tokens."""
    turns = []
    for block in blocks(2, 2, [0.0]):
        turns.append(Turn("plain", block, 0, False, Answered(9, 10.0, 9, [1], 8 / 8.0)))
        turns.append(Turn("drafted", block, 1, True, Answered(9, 4.0, 3, [1], 8 / 2.0)))
    found = rows(turns, ["chat", "chat"])
    assert [row.vs_plain[0] for row in found] == pytest.approx([1, 2.5])
    assert [row.decoding_vs_plain[0] for row in found] == pytest.approx([1, 4])
    report = Report("", {})
    tables(report, found)
    assert report.tables[1].rows == [["plain", "1.00"], ["drafted", "4.00"]]


def test_what_was_done_before_an_interrupt_is_shown() -> None:
    """Of the second kind only one way is there yet."""
    first, second = blocks(1, 2, [0.0])
    turns = [Turn(name, first, 0, False, Answered(8, 8.0, 8, [1])) for name in ("plain", "drafted")]
    report = Report("", {})
    tables(report, rows([*turns, Turn("plain", second, 0, False, Answered(8, 8.0, 8, [1]))], ["chat", "code"]))
    assert report.tables[0].rows[1][2:5] == ["1.00", "1.00", "-"]


def test_all_ways_have_one_target_and_the_drafter_that_was_named(folder: Path, tmp_path: Path) -> None:
    """A GGUF drafter stays packed, whichever way it is of."""
    drafter = tmp_path / "drafter.gguf"
    gguf_zoo.save(gguf_zoo.model("llama"), "llama", drafter, gguf.GGMLQuantizationType.Q8_0)
    given = {"drafter": str(drafter), "vocab": "slem"}
    ways = {"two": {**given, "tree": "chain:2"}, "own": {"drafter": "self"}, "three": {**given, "tree": "chain:3"}}
    made = engines(str(folder / "target"), ways, None, None)
    assert list(made) == ["plain", *ways]
    assert len({id(engine.target.lm.model) for engine in made.values()}) == 1
    for name in ("two", "three"):
        lm: Any = made[name].source.lm
        assert any(isinstance(module, PackedLinear) for module in lm.model.modules())
