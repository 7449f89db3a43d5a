"""`foretoken tune`: its costs, its short runs and the command."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import foretoken
import tiny
from command import Command
from foretoken.core.errors import ForetokenError
from foretoken.measure.continuations import Continued, Runs, Workload
from foretoken.profile import read_profile
from foretoken.recipe import PLAIN, PLAINLY, Recipe
from foretoken.tune import grid
from foretoken.tune.costs import ForwardCosts, StepCosts
from foretoken.tune.grid import modelled
from foretoken.tune.run import RUN, Prediction, watched
from foretoken.vocab.slem import SLEMDrafter
from raising import raising

# Costs.


def test_forward_costs_are_lines_between_measurements():
    costs = ForwardCosts([1, 5], [100, 200], [[1.0, 2.0], [3.0, 6.0]])
    assert costs.at(3, 100) == pytest.approx(1.5)
    assert costs.at(9, 100) == pytest.approx(3.0)
    assert costs.at(1, 150) == pytest.approx(2.0)
    assert costs.at(3, 300) == pytest.approx(1.5 + 2 * 3.0)
    assert ForwardCosts([1, 5], [100], [[1.0, 2.0]]).at(3, 900) == pytest.approx(1.5)


def test_overheads_are_found_again():
    target, drafter = (ForwardCosts([1, 15], [10], [[x, 2 * x]]) for x in (10.0, 2.0))
    true = StepCosts(target, drafter, 10, 0.5, {"chain": ([1, 4, 12], [0.3, 0.9, -0.2]), "kary": ([1, 3], [0.7, 1.5])})
    probes = [
        (PLAIN, []),
        *(("chain", [1.0] * depth) for depth in (12, 1, 4)),
        *(("kary", [1.9, 3.5, 6.2][:depth]) for depth in (1, 3)),
    ]
    found = StepCosts(target, drafter, 10).calibrated([(*probe, true.step(*probe)) for probe in probes])
    assert found.plain == pytest.approx(0.5)
    for probe in [*probes, ("chain", [1.0, 1.0]), ("kary", [1.8, 3.1])]:
        assert found.step(*probe) == pytest.approx(true.step(*probe))
    maybe = [0.5, 0.25, 0.25]  # one level in all
    assert true.step("chain", maybe) == pytest.approx(target.at(2, 10) + 1.0 * 2.0 + 0.5 + 0.3)
    assert true.step("chain", [1.0, 1.0]) == pytest.approx(target.at(3, 10) + 2 * 2.0 + 0.5 + 0.5)
    assert true.step(*probes[-1]) == pytest.approx(
        target.at(12.6, 10) + 2.0 + drafter.at(1.9, 10) + drafter.at(3.5, 10) + 0.5 + 1.5
    )


# Short runs.


def test_a_family_grows_as_long_as_it_gets_faster_and_times_are_on_one_scale():
    grown, shrunk = ([Recipe(f"{kind}:{n}", "exact-match") for n in (4, 8, 16, 32)] for kind in ("dynamic", "budget"))
    speed = dict(zip(grown + shrunk, [2.0, 3.0, 2.9, 1.0, 3.0, 2.0, 9.0, 9.0], strict=True))
    asked = []

    def run(chosen):
        """Plain decoding takes 5 seconds a step, twice as long as when it was measured: all does."""
        asked.append(chosen[1:])
        return {
            c: Runs((Continued((1,), 5.0),)) if c == PLAINLY else Runs((Continued((6, 6), 24 / speed[c]),))
            for c in chosen
        }

    found = watched([grown, shrunk], run, 2.5)
    assert asked == [[grown[0], shrunk[0]], [grown[1], shrunk[1]], [grown[2]], [grown[3]]]
    assert set(found) == {Prediction(c, 6.0, 6 / speed[c], RUN) for c in (*grown, *shrunk[:2])}


def test_a_workload_that_measures_nothing_is_refused():
    with pytest.raises(ForetokenError, match="below 16 tokens"):
        Workload([[1]], 4, 1.0, float)
    with pytest.raises(ForetokenError, match="no prompts"):
        Workload([], 40, 1.0, float)


# The command.

SMALL = ["--prompts", 1, "--max-new-tokens", 20, "--json"]


@pytest.fixture
def run(run: Command, monkeypatch, unchecked) -> Command:
    monkeypatch.setattr("foretoken.tune.costs.ROUNDS", 1)
    monkeypatch.setattr("foretoken.tune.costs.NODES", (1, 3, 15))
    monkeypatch.setattr("foretoken.tune.grid.NODES_RUN", (4, 8))
    monkeypatch.setattr("foretoken.tune.grid.DRAFTS_RUN", (1, 4))
    monkeypatch.setattr("foretoken.tune.grid.num_cores", lambda: 1)
    return run


def test_tune_writes_a_profile_that_generate_and_bench_take(run, tmp_path):
    code, out, err = run("tune", *SMALL, "--best", 2)
    assert code == 0, err
    assert "profile written to foretoken-profile.json" in err
    assert [path.name for path in tmp_path.iterdir()] == ["foretoken-profile.json"]
    forwards, overheads, configurations = json.loads(out)["tables"]
    assert {(row["model"], row["context"]) for row in forwards["rows"]} >= {("target", 128), ("drafter", 128)}
    assert Counter(row["tree"] for row in overheads["rows"]) == {
        "plain": 1,
        "chain block": 3,
        **dict.fromkeys(("chain rrsw", "kary transport", "kary hub"), 2),
    }
    rows = {(row["tree"], row["verifier"]): row for row in configurations["rows"]}
    speeds = [row["tokens/s"] for row in configurations["rows"]]
    assert speeds == sorted(speeds, reverse=True)
    assert rows["chain:5", "block"]["tokens per step"] >= rows["chain:5", "rrsw"]["tokens per step"] - 0.2
    assert sum(row["measured tokens/s"] is not None for row in rows.values()) == 3
    assert rows[PLAIN, ""]["measured x plain"] == 1
    profile = read_profile("foretoken-profile.json")
    best = max((r for r in rows.values() if r["measured tokens/s"]), key=lambda r: r["measured tokens/s"])
    assert (profile.tree, profile.verifier) == (best["tree"], best["verifier"])
    assert 0 < profile.acceptance <= 1
    by = {(row["tree"].partition(":")[0], row["predicted by"]) for row in rows.values()}
    assert by == {
        *((kind, "model") for kind in (PLAIN, "chain", "kary")),
        ("dynamic", "short run"),
        ("budget", "short run"),
    }
    full, cut = (rows[tree, "block"] for tree in ("chain:12", "chain:12@0.4"))
    assert cut["tokens per step"] < full["tokens per step"]
    assert cut["ms a step"] < full["ms a step"]
    profiled = ("generate", "ab", "--profile", "foretoken-profile.json", "--json", "--max-new-tokens", 4)
    assert run.json(*profiled, "--method", "fixed")["tree"] == profile.tree
    assert run.json(*profiled, "--seed", 1)["tree"].startswith("auto, at most")
    arguments = ("--rounds", 1, "--prompts", 1, "--max-new-tokens", 4, "--temperature", 1, "--json")
    rows = run.json("bench", "--profile", "foretoken-profile.json", *arguments)["rows"]
    wanted = {"chain:5", "kary:2x2"} if profile.tree == PLAIN else {profile.tree}
    assert {row["method"] for row in rows if row["system"] == "foretoken"} == {PLAIN} | wanted
    run.refused(
        "made for another drafter", "bench", "--profile", "foretoken-profile.json", "--drafter", "ngram", *arguments
    )


def test_an_interrupted_tune_goes_on(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("foretoken.tune.run.forward_costs", raising(KeyboardInterrupt))
        code, _, err = run("tune", *SMALL, "--temperature", 0)
    assert code == 130
    assert "goes on from here" in err
    assert not (tmp_path / "foretoken-profile.json").exists()
    code, out, err = run("tune", *SMALL, "--temperature", 0)
    assert code == 0, err
    assert "going on after 1 measurements" in err
    assert "replaced" not in err
    assert {row["verifier"] for row in json.loads(out)["tables"][-1]["rows"]} == {
        *("", "block", "transport", "exact-match")
    }


@pytest.mark.parametrize("other", [("--compile", "off"), "drafter", "processor"])
def test_measurements_of_something_else_are_replaced_and_it_is_said(run, demo, monkeypatch, other):
    monkeypatch.setattr("foretoken.tune.run.forward_costs", raising(KeyboardInterrupt))
    assert run("tune", *SMALL)[0] == 130
    again = ()
    if other == "drafter":
        folder = demo.parent / "other"
        tiny.save(tiny.llama(8), folder)
        monkeypatch.setattr("foretoken.cli.options.resolve_models", lambda *_: (str(demo / "target"), str(folder)))
    elif other == "processor":
        monkeypatch.setattr("foretoken.models.identity.cpu_name", lambda: "Z80")
    else:
        again = other
    monkeypatch.setattr("foretoken.tune.run._measure", raising(KeyboardInterrupt))
    code, _, err = run("tune", *SMALL, *again)
    assert code == 130
    assert "foretoken-profile.json.part is of other settings, models or versions: it is replaced" in err
    assert "going on" not in err


def test_tune_watches_a_drafter_without_a_distribution(run):
    rows = run.json("tune", *SMALL, "--drafter", "ngram", "--best", 1)["tables"][-1]["rows"]
    tokens = [row["tokens per step"] for row in sorted(rows, key=lambda row: int(row["tree"][6:] or 0))]
    assert tokens == sorted(tokens), "a deeper chain cannot bring less"
    assert read_profile("foretoken-profile.json").drafter == "ngram"


def test_tune_tosses_coins_where_drafter_and_target_have_a_core_each(run, monkeypatch):
    monkeypatch.setattr("foretoken.tune.grid.num_cores", lambda: 2)
    monkeypatch.setattr(
        "foretoken.tune.run.modelled", lambda *arguments: [c for c in modelled(*arguments) if chosen(c)]
    )

    def chosen(c: Recipe) -> bool:
        return c.draft_probability is not None or c.name in ("chain:1 block", "chain:4 block")

    found = run.json("tune", *SMALL, "--best", 64)  # all: which of them are best is the machine's affair
    rows = [row for row in found["tables"][-1]["rows"] if row["a"] is not None]
    assert {(row["tree"], row["a"]) for row in rows} == set(grid.TOSSED)
    assert all(row["measured tokens/s"] > 0 for row in rows)


@pytest.fixture
def strangers(demo: Path) -> Path:
    """A drafter with another vocabulary, whose best guess is often right."""
    folder = demo.parent / "stranger"
    if not folder.exists():
        tiny.save(tiny.llama(0, vocab=259), folder, extra=("ab", "de"))
    return folder


def test_tune_tries_every_way_to_draft_with_another_vocabulary(run, strangers):
    foreign = ("--drafter", strangers, "--vocab", "auto")
    rows = run.json("tune", *SMALL, "--best", 2, *foreign)["tables"][-1]["rows"]
    assert {(row["vocab"], row["predicted by"]) for row in rows} == {
        (None, "model"),
        *(("tli", by) for by in ("model", "short run")),
        *((vocab, "short run") for vocab in ("slem", "slrs", "union")),
    }
    profile = read_profile("foretoken-profile.json")
    best = max((r for r in rows if r["measured tokens/s"]), key=lambda r: r["measured tokens/s"])
    assert (profile.tree, profile.verifier) == (best["tree"], best["verifier"])
    assert profile.vocab in ("tli", "slem", "slrs", "union")
    way, weights = profile.drafter.split(" ", 1)
    assert way == profile.vocab
    arguments = ("--drafter", strangers, "--profile", "foretoken-profile.json", "--json", "--max-new-tokens", 4)
    bench = ("bench", "--rounds", 1, "--prompts", 1)
    for command in (("generate", "ab", "--method", "fixed"), ("generate", "ab"), bench):
        assert run.json(*command, *arguments)
    for vocab in ("tli", "slem", "slrs", "union"):  # had plain decoding been the best
        plainly = replace(profile, tree=PLAIN, verifier="", vocab=vocab, drafter=f"{vocab} {weights}")
        plainly.write("foretoken-profile.json")
        assert run.json(*bench, *arguments), vocab
    named = ("--drafter", strangers, "--vocab", "slem", "--temperature", 0)
    rows = run.json("tune", *SMALL, "--best", 1, *named)["tables"][-1]["rows"]
    assert {row["vocab"] for row in rows} == {None, "slem"}


def test_ways_that_need_common_tokens_are_left_out_where_there_are_none(models):
    engine = foretoken.load(
        models[0], drafter=models[1], vocab="slem", tokenizer=tiny.tokenizer(), drafter_tokenizer=tiny.tokenizer()
    )
    assert isinstance(engine.drafter, SLEMDrafter)
    assert grid.able(engine, ["tli", "slem", "union"]) == ["tli", "slem", "union"]
    engine.drafter.translation.__dict__["pairs"] = {}
    assert grid.able(engine, ["tli", "slem", "union"]) == ["slem"]
    assert grid.able(engine, []) == []


def test_tune_takes_a_workload_file_and_refuses_what_it_cannot_do(run, tmp_path):
    (tmp_path / "w.jsonl").write_text('{"prompt": "ab"}\n')
    run.refused("it has 1", "tune", *SMALL, "--prompts", 2, "--workload", "w.jsonl")
    for arguments, says in (
        (("--drafter", "none"), "no drafter to tune"),
        (("--max-new-tokens", 4), "below 16 tokens"),
        (("--max-new-tokens", 4000), "do not fit the context"),
    ):
        run.refused(says, "tune", *SMALL, *arguments)
