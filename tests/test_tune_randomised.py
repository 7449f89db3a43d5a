"""`python -m benchmarks randomised` on tiny models."""

import json

import pytest
import torch

from benchmarks.expand import with_cost_ratio
from benchmarks.objective import OBJECTIVES, accepted
from benchmarks.randomised import GRID, Ratios, _optima, with_coins
from foretoken.build import load
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Coins
from foretoken.decode import NoDrafter
from foretoken.measure.continuations import Workload
from foretoken.measure.report import Report
from raising import raising

pytestmark = pytest.mark.long


def test_the_tables_hold_the_optima_that_a_fine_grid_finds():
    rng = torch.Generator().manual_seed(0)
    p, q = (torch.rand(5, 8, generator=rng, dtype=torch.float64).pow(3) for _ in range(2))
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    report = Report("", {})
    _optima(report, p, q, Ratios(0.4, 0.1))
    grid = torch.linspace(0, 1, 10001, dtype=torch.float64)
    asked = [("paper", 0.4), ("throughput", 0.4), ("throughput", 0.5)]
    for row, (name, lam) in zip(report.tables[0].json()["rows"], asked, strict=True):
        values = OBJECTIVES[name](grid, accepted(p, q, grid), lam)
        assert row["x plain there"] == pytest.approx(float(values.max()), abs=1e-4)
        assert row["x plain at a = 1"] == pytest.approx(float(values[-1]), abs=1e-12)
        assert (row["holds"] == "yes") == (row["best a"] < 1)


def test_coins_and_costs(demo):
    engine = load(str(demo / "target"), drafter=str(demo / "drafter"), quantise_drafter="none")
    assert with_coins(engine, 0.0).drafter == NoDrafter()
    half = with_coins(engine, 0.5).drafter
    assert half.law == Coins(0.5)
    costly = with_cost_ratio(engine, str(demo / "drafter"), 4.0)
    big, with_coin = costly.drafter, with_coins(costly, 0.5).drafter
    assert with_coin.lm is big.lm
    rows = [lm.open(1, 8) for lm in (engine.drafter.lm, big.lm)]
    for of in rows:
        of.join()
    one, other = (of.score([[5, 6, 7]], [[-1, 0, 1]])[0] for of in rows)
    assert torch.allclose(one, other, atol=1e-4), "another cost, the same function"
    with pytest.raises(ForetokenError, match="cost-ratio is -1"):
        with_cost_ratio(engine, str(demo / "drafter"), -1.0)


def test_the_command_prints_predicted_and_measured_and_draws_both_figures(run, monkeypatch, tmp_path, unchecked):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("benchmarks.randomised.FORWARDS", 1)
    measured = ("benchmarks", "randomised", "--prompts", 1, "--max-new-tokens", 16)
    optima, by_a = run.json(*measured, "--plot", "f.png")["tables"]
    assert [row["objective"] for row in optima["rows"]] == ["paper", "throughput", "throughput"]
    assert [row["a"] for row in by_a["rows"]] == [f"{a:g}" for a in GRID]
    rates = [row["acceptance of a draft"] for row in by_a["rows"][1:]]
    assert rates == sorted(rates, reverse=True)
    assert by_a["rows"][0]["measured x plain"] == by_a["rows"][0]["predicted x plain"] == 1
    assert all(row["measured x plain"] > 0 for row in by_a["rows"])
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def entries(path):
    return {entry["name"]: entry["value"] for entry in map(json.loads, path.read_text().splitlines())}


def test_interrupted_it_goes_on_from_where_it_was(run, monkeypatch, tmp_path, unchecked):
    monkeypatch.setattr("benchmarks.randomised.FORWARDS", 1)
    arguments = ("benchmarks", "randomised", "--prompts", 2, "--max-new-tokens", 16, "--json")
    path = tmp_path / "foretoken-randomised.part"
    whole = Workload.run

    def broken_off(workload, engine, i, *others):
        if i == 1 and engine.recipe.draft_probability == 0.4:
            raise KeyboardInterrupt
        return whole(workload, engine, i, *others)

    with monkeypatch.context() as patched:
        patched.setattr("benchmarks.randomised.forward_times", raising(KeyboardInterrupt))
        code, _, err = run(*arguments)
    assert (code, "goes on after what foretoken-randomised.part holds" in err) == (130, True), err
    texts = entries(path)
    assert set(texts) == {"text 1", "text 2"}
    with monkeypatch.context() as patched:
        patched.setattr(Workload, "run", broken_off)
        code, _, err = run(*arguments)
    assert (code, "going on after 2 measurements" in err) == (130, True), err
    done = entries(path)
    assert {name: done[name] for name in texts} == texts
    assert len(done) == 4, "two texts, the forwards, the grid on the first prompt"
    (first,) = (found for name, found in done.items() if name.endswith("prompt 1"))
    first["a = 0.4"][1] = 1e6  # seconds
    key = json.loads(path.read_text().splitlines()[0])["key"]
    lines = [json.dumps({"name": name, "value": value, "key": key}) for name, value in done.items()]
    path.write_text("\n".join(lines) + "\n")
    code, out, err = run(*arguments)
    assert (code, "going on after 4 measurements" in err) == (0, True), err
    slow = {row["a"]: row["measured x plain"] < 1e-3 for row in json.loads(out)["tables"][1]["rows"]}
    assert slow == {f"{a:g}": a == 0.4 for a in GRID}, "what was measured is not measured again"
    assert not path.exists()
    run.refused("Cannot write nowhere/x.part", *arguments, "--part", "nowhere/x.part")
