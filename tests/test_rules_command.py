"""`python -m benchmarks rules` and `reproduce`, on tiny models in place of the demo pair."""

import json
from pathlib import Path

import pytest

from benchmarks import rules as measure
from benchmarks import speed
from benchmarks.reproduce import ARTEFACTS
from command import Command
from raising import raising

pytestmark = pytest.mark.long

SMALL = ["--positions", 4, "--draws", "1,2", "--temperature", "1"]
LOSSLESS = 1e-12
APPROXIMATE = 1e-3 / 2  # half of an L1 distance


def test_rules_on_a_pair_of_models(run: Command) -> None:
    code, out, err = run("benchmarks", "rules", *SMALL, "--json")
    assert code == 0
    assert "scoring 4 positions" in err
    report = json.loads(out)
    assert (report["target"], report["drafter"], report["positions"]) == ("demo", "demo", 4)
    accepted, times, deviations = report["tables"]
    rows = {(row["rule"], row["law"]): row for row in accepted["rows"]}
    best = rows["optimum, iid", "bound"]
    for name in ("rrs", "kseq", "transport"):
        assert 0 < rows[name, "iid"]["k=2"] <= best["k=2"] + 1e-9
    assert rows["transport", "iid"]["k=2"] == pytest.approx(best["k=2"], abs=1e-9)
    assert rows["standard", "iid"]["k=2"] is None
    assert rows["rrs", "iid"]["k=1"] == pytest.approx(rows["hub", "hub"]["k=1"], abs=1e-9)
    hindsight = rows["better-of, p known", "bound"]["k=2"]
    assert hindsight >= max(rows["budgeted", "iid, random N"]["k=2"], rows["hub", "hub"]["k=2"])
    assert hindsight >= rows["better-of", "chosen from q"]["k=2"]
    assert any(row["rule"] == "transport" and row["k=2"] > 0 for row in times["rows"])
    assert len(deviations["rows"]) >= 8
    for row in deviations["rows"]:
        assert all(row[k] is None or row[k] <= LOSSLESS for k in ("k=1", "k=2")), row


def test_rules_on_toy_distributions(run: Command) -> None:
    tables = run.json("benchmarks", "rules", "--toy", "--draws", "1,2", "--temperature", "0.5")["tables"]
    assert len(tables) == len(measure.SIMILARITIES)
    for table in tables:
        rows = {(row["rule"], row["law"]): row for row in table["rows"]}
        for (name, law), row in rows.items():
            if row["deviation"] is not None:
                allowed = APPROXIMATE if name == "global-resolution" else LOSSLESS
                assert row["deviation"] <= allowed, name
            if law == "iid" and row["k=2"] is not None:
                assert row["k=2"] <= rows["optimum, iid", "bound"]["k=2"] + 1e-9, name
        for name in ("ot-lp", "ot-maxflow", "ot-maxflow-optimised", "transport"):
            best = rows["optimum, iid", "bound"]["k=2"]
            assert rows[name, "iid"]["k=2"] == pytest.approx(best, abs=1e-6), name


def test_rules_print_text_markdown_and_a_plot(run: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "some.txt").write_text("import os\n" * 20)
    code, out, _ = run("benchmarks", "rules", *SMALL, "--text", "some.txt", "--markdown", "--plot", "x.png")
    assert code == 0
    assert "#### Acceptance, temperature 1\n\n| rule | law | k=1 | k=2 |\n|---|---|---|---|\n" in out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = run("benchmarks", "rules", *SMALL)
    assert code == 0
    assert "Processor time of one verification" in out


def test_rules_by_speed(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "GRID", ((4, 2), (6, 3), (300, 3)))
    monkeypatch.setattr(speed, "PAIRS", 2)
    (table,) = run.json("benchmarks", "rules", "--speed", "--temperature", "1")["tables"]
    rows = {row["rule"]: row for row in table["rows"]}
    for name in ("transport", "transport-grouped", "hub", "ot-lp", "global-resolution-thinned"):
        assert 0 < rows[name]["(4, 2)"] < 1000
    assert rows["transport"]["(300, 3)"] > 0
    assert rows["ot-lp"]["(300, 3)"] is None  # 4,500,000 sets
    assert rows["spechub"]["(6, 3)"] is None


def test_an_interrupt_prints_what_is_there(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_times", raising(KeyboardInterrupt))
    code, out, _ = run("benchmarks", "rules", *SMALL)
    assert code == 130
    assert "transport" in out
    assert out.splitlines()[-1] == "Interrupted: the figures are of what was done."


def test_the_names_are_listed(run: Command) -> None:
    code, out, _ = run("benchmarks", "reproduce", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(ARTEFACTS)


def figures(run: Command, name: str, *arguments: object) -> list[dict]:
    return run.json("benchmarks", "reproduce", name, "--quick", *arguments)["tables"]


def test_spechub_figures_come_out_as_printed(run: Command) -> None:
    masses, pairs = figures(run, "spechub-figures")
    assert [row["figure"] for row in masses["rows"]] == ["4a", "4b", "5"]
    for row in masses["rows"]:
        for what in ("a", "b", "c", "cost"):
            assert row[f"{what}, ours"] == pytest.approx(row[f"{what}, paper"], abs=1e-9), row
    for row in pairs["rows"]:
        assert row["ours"] == pytest.approx(row["paper"], abs=1.1e-3), row


def test_spechub_table4_follows_from_normal_logits_only(run: Command) -> None:
    (table,) = figures(run, "spechub-table4")
    assert len(table["rows"]) == 30
    off = {
        key: sum(abs(row[f"ours, {key} logits"] - row["paper"]) for row in table["rows"]) / 30
        for key in ("normal", "uniform")
    }
    assert off["normal"] < 0.1 < off["uniform"]  # ten pairs: the standard error of a mean is about 0.05


def test_spechub_tables_are_shares_of_all_positions(run: Command) -> None:
    (table,) = figures(run, "spechub-tables1-3")
    assert len(table["rows"]) == 9
    for row in table["rows"]:
        assert 0 <= row["first, ours"] <= 1
        assert 0 <= row["second, ours"] <= 1 - row["first, ours"] + 1e-9


def test_global_resolution_times_and_limits(run: Command) -> None:
    (table,) = figures(run, "global-resolution-table1", "--cell-seconds", 0.05, "--positions", 3)
    cells = {(row["(V, n)"], row["solver"]): row for row in table["rows"]}
    assert len({cell for cell, _ in cells}) == 7
    assert cells["(10, 2)", "ot-lp"]["Llama-3, ms (success)"] == "4.07"
    assert cells["(10, 2)", "ot-lp"]["Gemma-2, ms (success)"] == "7.85"
    assert all(row["positions"] >= 1 for (_, solver), row in cells.items() if solver == "transport")
    assert "not run" in cells["(1000, 2)", "ot-lp"]["ours, ms (success)"]
    (table,) = figures(run, "global-resolution-table2", "--cell-seconds", 0.05, "--positions", 3)
    ours = [row for row in table["rows"] if row["solver"].startswith("transport")]
    for row in ours:
        assert row["ms"] <= float(row["limit, ms"])
        rivals = [r["ours"] for r in table["rows"] if r["limit, ms"] == row["limit, ms"] and r["ours"] is not None]
        assert row["ours"] == max(rivals)


@pytest.mark.parametrize("name", ["global-resolution-figure1", "global-resolution-temperature"])
def test_optimal_acceptance_grows_with_drafts_and_tokens(run: Command, name: str) -> None:
    table = figures(run, name, "--positions", 3, "--cell-seconds", 0.05)[0]
    ours = [row for row in table["rows"] if "paper" not in str(row.get("law", ""))]
    assert len(ours) >= 8
    for row in ours:
        values = [row[column] for column in row if column.startswith("n=")]
        assert values == sorted(values)
