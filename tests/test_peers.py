"""`python -m benchmarks peers` on a tiny model, with a server of the same model as another program."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import foretoken
from benchmarks.peers import Answered, ours, rows
from command import Command
from foretoken.decode import NoDrafter
from foretoken.draft.auto import AutoDrafter
from foretoken.measure.harness import Turn, blocks
from serving import Served, save_target, served

OURS = ["foretoken", "foretoken, drafter self", "foretoken, drafter ngram"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a chat template, and two questions."""
    folder = tmp_path_factory.mktemp("model")
    save_target(folder / "target")
    questions = [{"messages": [{"role": "user", "content": text}]} for text in ("Who?", "What is it?")]
    (folder / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(foretoken.load(str(folder / "target"))) as running:
        yield running


def quick(folder: Path) -> list[object]:
    workload = ("--target", folder / "target", "--workload", folder / "questions.jsonl")
    return ["benchmarks", "peers", *workload, "--prompts", 2, "--max-new-tokens", 24, "--rounds", 1]


def test_every_program_answers_every_prompt(run: Command, folder: Path, server: Served, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--server", f"other={server.url}", "--plot", "speed.svg", "--json")
    report = run.json(*quick(folder), *options)
    found = {row["name"]: row for row in report["rows"]}
    assert list(found) == [*OURS, "transformers", "other"]
    for name, row in found.items():
        assert row["num_tokens"] == 2 * 24, name  # nothing stops early
        assert row["tokens_per_s"]["low"] <= row["tokens_per_s"]["median"] <= row["tokens_per_s"]["high"]
    assert found["transformers"]["vs_transformers"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found["foretoken"]["vs_plain"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found["foretoken"]["tokens_per_step"] == 1
    assert [found[name]["num_same"] for name in OURS] == [2, 2, 2]
    assert (found["other"]["tokens_per_step"], found["other"]["num_same"]) == (None, None)
    assert report["left_out"] == ["llama.cpp: no --server llama.cpp=URL", "OpenVINO: no --openvino PATH"]
    assert report["date"]
    assert "<!-- foretoken, drafter self -->" in (tmp_path / "speed.svg").read_text()


def test_each_of_ours_drafts_as_its_name_says(folder: Path) -> None:
    engines = ours(str(folder / "target"))
    assert list(engines) == OURS
    assert isinstance(engines[OURS[0]].drafter, NoDrafter)
    assert [engines[name].kind for name in OURS[1:]] == ["self", "ngram"]
    assert all(isinstance(engines[name].drafter, AutoDrafter) for name in OURS[1:])


def test_ratios_are_taken_on_the_same_prompt() -> None:
    def turns(name: str, *of: Answered) -> list[Turn]:
        pairs = zip(blocks(1, 2, [0.0]), of, strict=True)
        return [Turn(name, block, 0, True, answered) for block, answered in pairs]

    plain = turns("foretoken", Answered(8, 1.0, 8, [1, 2]), Answered(8, 4.0, 8, [3, 4]))
    drafted = turns("foretoken, drafter self", Answered(8, 0.5, 4, [1, 2]), Answered(8, 1.0, 4, [3, 5]))
    theirs = turns("transformers", Answered(8, 2.0, 8, [1, 2]), Answered(8, 16.0, 8, [3, 4]))
    found = {row.name: row for row in rows([*plain, *drafted, *theirs])}
    self = found["foretoken, drafter self"]
    assert (self.vs_plain.low, self.vs_plain.median, self.vs_plain.high) == (2, 3, 4)
    assert (self.vs_transformers.low, self.vs_transformers.high) == (4, 16)
    assert (self.tokens_per_step, self.num_same, self.num_answers) == (2, 1, 2)
