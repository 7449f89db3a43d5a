"""`python -m benchmarks execution` on a tiny random model."""

import json
from pathlib import Path

import pytest
import torch

import tiny
from benchmarks.execution import Timing, load_forwards, memory_bandwidth, summarise, weight_bytes
from command import Command
from foretoken.measure.clocks import clock_named, seconds
from foretoken.models.panels import pack

pytestmark = pytest.mark.long

QUICK = ["--nodes", "1,3", "--context", "8,20", "--batch", "1,2", "--rounds", 3]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tiny.llama(0, hidden=64), tmp_path_factory.mktemp("target"))


@pytest.fixture
def execution(run: Command, target: str) -> Command:
    return Command(lambda *arguments: run("benchmarks", "execution", "--target", target, *arguments))


def test_every_path_takes_its_turn_at_every_place(execution: Command, tmp_path: Path) -> None:
    out, err = execution.good(*QUICK, "--json")
    assert "context 8, batch 2: 1 nodes" in err
    lines = [json.loads(line) for line in (tmp_path / "foretoken-execution.jsonl").read_text().splitlines()]
    report = json.loads(out)
    assert report["paths"] == {"transformers": "modules, DynamicCache", "eager": "modules", "compiled": "kernel"}
    assert report["clock"] == "thread"
    assert 0.1 < report["memory_gb_s"] < 10_000
    # nodes 1 and 3 at the first context and batch; 1 and 8 nodes at either context, and at either batch
    places = {(1, 8, 1), (3, 8, 1), (8, 8, 1), (1, 20, 1), (8, 20, 1), (1, 8, 2), (8, 8, 2)}
    assert {(line["nodes"], line["context"], line["batch"]) for line in lines} == places
    assert len(lines) == 3 * 3 * len(places)
    assert [line["path"] for line in lines[:4]] == ["transformers", "eager", "compiled", "eager"]  # in turn
    assert all(line["ms"] > 0 and line["gb_s"] > 0 for line in lines)
    assert len(report["rows"]) == 3 * len(places)
    for row in report["rows"]:
        assert row["num_runs"] == 3
        assert row["ms"]["low"] <= row["ms"]["median"] <= row["ms"]["high"]
        if row["path"] == "eager":
            assert row["vs_eager"] == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_a_gguf_file_is_not_for_transformers(run: Command, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    says = "is a GGUF file, whose packed weights transformers does not run"
    run.refused(says, "benchmarks", "execution", "--target", tmp_path / "model.gguf")


def test_the_table_and_the_plot(execution: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, _ = execution.good("--nodes", 1, "--context", "8", "--batch", 1, "--rounds", 1, "--plot", "x.png")
    for words in ("'compiled': 'kernel'", "GB/s", "over nodes", "clock thread", "dtype float32"):
        assert words in out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_forward_leaves_the_rows_as_they_were(target: str) -> None:
    paths = load_forwards(target, "cpu", None, None, 0).paths.values()
    for path in paths:
        path.open(9, 2, 5)
        for nodes in (1, 5, 2):
            path.forward(nodes)
            path.forget()
    theirs, ours, compiled = paths
    assert theirs.cache.get_seq_length() == 9  # pyright: ignore[reportAttributeAccessIssue]
    for path in (ours, compiled):
        assert path.rows.lengths == [9, 9]  # pyright: ignore[reportAttributeAccessIssue]


def test_weights_are_counted_as_they_are_read() -> None:
    model = tiny.llama(0)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    linear = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    head = 257 * 32
    assert weight_bytes(model) == 4 * (linear + norms + head)
    pack(model)  # 64 columns a panel, two bytes a weight
    padded = sum(-(-m.out_features // 64) * 64 * m.in_features for m in model.modules() if hasattr(m, "panels"))
    assert padded > linear + head
    assert weight_bytes(model) == 2 * padded + 4 * norms


def test_medians_of_ratios_inside_a_round() -> None:
    ms = {"transformers": (4.0, 8.0, 40.0), "eager": (2.0, 2.0, 4.0), "compiled": (1.0, 4.0, 4.0)}
    timings = [
        Timing(path, "", 1, 8, 1, round_, 0, times[round_], 1.0) for round_ in range(3) for path, times in ms.items()
    ]
    rows = {row.path: row for row in summarise([*timings, Timing("eager", "", 1, 8, 1, 3, 0, 100.0, 1.0)])}
    assert rows["compiled"].vs_transformers.median == 4.0  # of 4, 2, 10
    assert rows["compiled"].vs_eager.median == 1.0  # of 2, 0.5, 1
    assert rows["eager"].num_runs == 3  # the round that lacks the others is left out
    assert rows["transformers"].ms.median == 8.0


def test_the_clock_is_the_threads_own_only_where_one_thread_works(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert clock_named(cpu) == "thread"
    assert clock_named(torch.device("cuda")) == "wall"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert clock_named(cpu) == "wall"
    for clock in ("thread", "wall"):
        now = seconds(clock, cpu)
        before = now()
        memory_bandwidth(cpu, now)
        assert now() > before
