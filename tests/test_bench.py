"""The benchmark from the command line, on tiny random models."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import expand
from command import Command
from foretoken.cli import options
from foretoken.measure.methods import Foretoken, Run
from raising import raising

pytestmark = pytest.mark.long

LINE = {
    "system", "method", "batch", "temperature", "prompt", "round", "order", "seed", "num_tokens", "num_target_forwards",
    "num_drafted", "num_accepted", "wall_s", "ttft_s", "forward_s", "scoring_s", "memory_bytes_per_token",
    "tokens_per_s", "decoded_per_s", "num_first", "block_efficiency", "acceptance_rate", "outside_forwards",
    "outside_scoring", "cpu", "cores",
    "threads", "load_average", "device", "python", "torch", "transformers", "foretoken", "commit", "dtype", "label",
    "num_params", "target", "drafter", "verifier", "execution",
}  # fmt: skip
QUICK = ["--rounds", 1, "--prompts", 2, "--max-new-tokens", 6]
OURS = [("foretoken", "plain"), ("foretoken", "chain:2"), ("foretoken", "kary:2x2")]
THEIRS = [("transformers", "plain"), ("transformers", "assisted 2"), ("transformers", "assisted default")]


@pytest.fixture
def bench(run: Command) -> Command:
    return Command(lambda *arguments: run("bench", *arguments))


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_method_runs_once_a_round_in_rotated_order(bench: Command, tmp_path: Path) -> None:
    out, err = bench.good(*QUICK, "--tree", "chain:2", "--tree", "kary:2x2", "--json")
    assert "round 1/1, prompt 2/2" in err
    lines = lines_of(tmp_path / "foretoken-bench.jsonl")
    assert not list(tmp_path.glob("*.tmp"))
    assert len(lines) == 2 * 2 * 6  # temperatures, prompts, methods
    assert all(set(line) == LINE for line in lines)
    blocks = [lines[i : i + 6] for i in range(0, len(lines), 6)]
    for turn, block in enumerate(blocks):
        assert len({(line["temperature"], line["prompt"], line["round"], line["seed"]) for line in block}) == 1
        ran = [(line["system"], line["method"]) for line in block]
        assert ran == [*(OURS + THEIRS)[turn:], *(OURS + THEIRS)[:turn]]
        assert [line["order"] for line in block] == list(range(6))
    for line in lines:
        assert line["num_tokens"] == 6  # nothing stops early
        assert 0 < line["ttft_s"] < line["wall_s"]
        assert 0 < line["forward_s"] < line["wall_s"]
        assert 0 < line["outside_forwards"] < 1
        assert (line["scoring_s"] is None) == (line["system"] == "transformers")
        assert line["num_accepted"] <= line["num_drafted"]
        assert line["num_tokens"] <= line["num_target_forwards"] + line["num_accepted"]
        assert 1 <= line["num_first"] <= line["num_tokens"]
        if line["method"] == "plain":
            assert (line["num_target_forwards"], line["num_drafted"], line["acceptance_rate"]) == (6, 0, None)
            assert line["num_first"] == 1

    report = json.loads(out)
    assert [(row["system"], row["method"]) for row in report["rows"]] == 2 * (OURS + THEIRS)
    assert report["max_new_tokens"] == 6
    assert report["num_prompts"] == 2
    for row in report["rows"]:
        assert row["num_runs"] == 2
        assert row["tokens_per_s"]["low"] <= row["tokens_per_s"]["median"] <= row["tokens_per_s"]["high"]
        assert row["vs_batch_1"] is None
        if row["method"] == "plain":
            own = "vs_plain" if row["system"] == "foretoken" else "vs_transformers"
            assert row[own] == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_batches_are_compared_with_batch_1(bench: Command, tmp_path: Path) -> None:
    out, _ = bench.good(*QUICK, "--tree", "chain:2", "--temperature", 1, "--batch", 1, "--batch", 3, "--out", "x.jsonl")
    lines = lines_of(tmp_path / "x.jsonl")
    of_three = [line for line in lines if line["batch"] == 3]
    assert {(line["system"], line["method"]) for line in of_three} == {*OURS[:2], THEIRS[0]}
    for line in of_three:
        assert line["num_tokens"] == 18
        assert line["block_efficiency"] >= 1
        if line["method"] == "plain":
            assert line["num_target_forwards"] == 18
    assert "x batch 1" in out


def test_the_table_says_what_it_shows(bench: Command) -> None:
    out, _ = bench.good(*QUICK, "--tree", "chain:2", "--temperature", 0, "--drafter", "ngram")
    shown = ("foretoken chain:2", "transformers lookup 2", "float32", "seed 0", "temperature 0, batch 1, as loaded")
    assert not [words for words in shown if words not in out]


def test_an_expanded_target_is_labelled(
    bench: Command, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo: Path
) -> None:
    monkeypatch.setitem(expand.SIZES, "300k", 300_000)
    _, err = run.good("benchmarks", "expand", "large", "--size", "300k")
    assert "parameters written to large" in err
    drafter = ("--drafter", demo / "drafter")
    out, _ = bench.good(*QUICK, "--temperature", 0, "--target", "large", *drafter)
    assert "expanded 300k: real acceptance, synthetic cost" in out
    lines = lines_of(tmp_path / "foretoken-bench.jsonl")
    assert all(270_000 <= line["num_params"] <= 330_000 for line in lines)
    bench.good(*QUICK, "--temperature", 0, "--out", "small.jsonl")
    small = lines_of(tmp_path / "small.jsonl")
    for big, line in zip(lines, small, strict=True):  # greedy: the same text, so the same acceptance
        assert (big["method"], big["num_target_forwards"]) == (line["method"], line["num_target_forwards"])
        assert big["num_accepted"] == line["num_accepted"]


def test_without_a_drafter_plain_decoding_is_compared_and_a_plot_is_drawn(bench: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = bench.json(*QUICK, "--drafter", "none", "--temperature", 0, "--plot", "x.png")["rows"]
    assert [(row["system"], row["method"]) for row in rows] == [OURS[0], THEIRS[0]]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_drafter_may_have_another_vocabulary(bench: Command, tmp_path: Path) -> None:
    drafter = Path(__file__).resolve().parents[1] / "models/drafter-1k"
    bench.good(*QUICK, "--drafter", drafter, "--vocab", "auto", "--tree", "chain:2", "--temperature", 0)
    rows = lines_of(tmp_path / "foretoken-bench.jsonl")
    assert {(row["system"], row["method"]) for row in rows} == {OURS[0], ("foretoken", "chain:2"), THEIRS[0]}
    assert sum(row["num_drafted"] for row in rows) > 0


def test_an_interrupt_keeps_what_was_measured(bench: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, calls = Foretoken.run, []

    def interrupted(self: Foretoken, *arguments: object) -> Run:
        calls.append(self)
        if len(calls) == 3:  # the first warms up; transformers' plain run comes between
            raise KeyboardInterrupt
        return run(self, *arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Foretoken, "run", interrupted)
    code, out, _ = bench(*QUICK, "--drafter", "none", "--temperature", 0)
    assert (code, "Interrupted" in out) == (130, True)
    assert len((tmp_path / "foretoken-bench.jsonl").read_text().splitlines()) == 3


def test_an_interrupt_before_the_first_run_leaves_an_earlier_file(
    bench: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own.jsonl").write_text(earlier := '{"system": "foretoken", "method": "plain", "tokens_per_s": 1.0}\n')
    monkeypatch.setattr(Foretoken, "run", raising(KeyboardInterrupt))
    code, out, err = bench(*QUICK, "--drafter", "none", "--out", "own.jsonl")
    assert (code, out, "written" in err) == (130, "", False)
    assert (tmp_path / "own.jsonl").read_text() == earlier


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--max-new-tokens", 300], "not fit the context of 256"), (["--plot", "x.docx"], "plot")],
)
def test_bad_input_is_one_sentence(bench: Command, tmp_path: Path, arguments: list[object], words: str) -> None:
    bench.refused(words, *arguments)
    assert not list(tmp_path.iterdir())


def test_missing_heldout_prompts_are_named(
    bench: Command, demo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(options, "demo_folder", lambda: tmp_path)
    bench.refused("heldout.jsonl", "--target", demo / "target", "--drafter", "none")


def test_a_target_alone_is_measured_with_the_drafter_that_fits_it(bench: Command, demo: Path) -> None:
    assert bench.json(*QUICK, "--tree", "chain:2", "--temperature", 0, "--target", demo / "target")["drafter"] == "auto"
