"""`foretoken tune`: what it tries, how the faster half is kept, and the command."""

import json
import math
from dataclasses import replace
from itertools import count, product
from pathlib import Path

import pytest

import foretoken
import tiny
from command import Command
from foretoken.build import with_recipe
from foretoken.core.errors import ForetokenError
from foretoken.measure.continuations import Continued, Runs, Workload
from foretoken.measure.results import Journal
from foretoken.profile import read_profile
from foretoken.recipe import PLAIN, PLAINLY, Recipe
from foretoken.tune import candidates, run
from raising import raising
from thinning import one_in

# What is tried, and which half is kept.


def test_the_faster_half_goes_on_to_the_next_prompt(demo, monkeypatch, tmp_path):
    """A recipe of depth d takes d seconds a step that brings two tokens, plain decoding 4 for one."""
    engine = foretoken.load(str(demo / "target"), drafter=str(demo / "drafter"))
    asked: list[tuple[int, str]] = []

    def ran(workload: Workload, of, i: int, seed: int, new: int | None = None) -> Continued:
        if new is None:
            asked.append((seed, of.recipe.tree))
        depth = 2 if of.recipe == PLAINLY else int(of.recipe.tree.partition(":")[2])
        return Continued((1, 1) if of.recipe == PLAINLY else (2, 2), 4.0 * depth)

    monkeypatch.setattr(Workload, "run", ran)
    tried = [Recipe(f"chain:{depth}", "block") for depth in (6, 1, 5, 2, 4, 3)]
    work = Workload([[1, 2], [3, 4], [5, 6], [7, 8]], 16, 1.0, float, seed=7)

    def halved() -> list[run.Measured]:
        return run.halved(engine, work, tried, 2, 1, Journal(str(tmp_path / "part"), {}), lambda _: None)

    found = halved()
    depths = {7: (1, 2, 3, 4, 5, 6), 8: (1, 2, 3), 9: (1, 2), 10: (1, 2)}
    for seed, left in depths.items():
        ran_at = sorted(tree for at, tree in asked if at == seed)
        assert ran_at == sorted([PLAIN, *(f"chain:{depth}" for depth in left)])
    assert [x.recipe.tree for x in found] == [f"chain:{depth}" for depth in range(1, 7)]
    assert [len(x.runs.runs) for x in found] == [4, 4, 2, 1, 1, 1]
    assert [x.x_plain for x in found] == pytest.approx([4.0 / depth for depth in range(1, 7)])
    asked.clear()
    again = halved()
    assert (again, asked) == (found, []), "what was measured is not measured again"


def test_the_speed_is_the_mean_of_ratios_and_has_an_error():
    own, plain = (Runs(tuple(Continued((2,), s) for s in seconds)) for seconds in ((1.0, 4.0), (2.0, 32.0)))
    found = run.Measured(Recipe("chain:1", "block"), own, plain, 2)
    assert found.x_plain == pytest.approx(4.0)
    assert found.error == pytest.approx(4.0 * math.log(2))  # of the logarithms ln 2 and ln 8
    twice = replace(found, runs=Runs(2 * own.runs), plain=Runs(2 * plain.runs))
    assert (twice.x_plain, twice.error) == (found.x_plain, found.error), "a second round is no other prompt"
    one = replace(found, runs=Runs(own.runs[:1]), plain=Runs(plain.runs[:1]))
    assert (one.x_plain, one.error) == (pytest.approx(2.0), None)
    assert found.pays
    assert one.pays
    uneven = Runs(tuple(Continued((2,), s) for s in (1.0, 60.0)))  # on average faster, by less than the error
    assert replace(found, runs=uneven).x_plain > 1
    assert not replace(found, runs=uneven).pays


@pytest.mark.parametrize(
    ("trees", "dear", "found"),
    [
        (["kary:2x2", "kary:3x1"], 1.0, (0.3, 0.2, 0.1)),
        (["kary:2x2", "kary:3x1"], 9.0, (0.3, 0.0, 0.3)),  # what chains take stays as it is
        ([], 1.0, (0.3, 0.3, 0.0)),
    ],
)
def test_what_a_step_takes_beyond_a_plain_one_is_found_again(trees, dear, found):
    """Once .3, per level .2, per node .1, in plain steps of 5 seconds; trees without a fixed shape tell nothing.

    dear: how many times as much a node takes that is one more than the levels.
    """
    sizes = {"chain:1": (1, 1), "chain:4": (4, 4), "chain:8": (8, 8), "kary:2x2": (2, 6), "kary:3x1": (1, 3)}
    plain = Runs((Continued((1,), 5.0),))

    def timed(tree: str, seconds: float) -> run.Measured:
        return run.Measured(Recipe(tree), Runs((Continued((2,), seconds),)), plain, 1)

    took = {tree: 1.3 + 0.3 * levels + 0.1 * dear * (nodes - levels) for tree, (levels, nodes) in sizes.items()}
    measured = [timed(tree, 5 * took[tree]) for tree in ("chain:1", "chain:4", "chain:8", *trees)]
    shapeless = [timed(tree, 99.0) for tree in ("budget:8", "chain:6@0.5")]
    assert run.extra_of(measured + shapeless) == pytest.approx(found)


def test_a_workload_that_measures_nothing_is_refused():
    with pytest.raises(ForetokenError, match="below 16 tokens"):
        Workload([[1]], 4, 1.0, float)
    with pytest.raises(ForetokenError, match="no prompts"):
        Workload([], 40, 1.0, float)
    with pytest.raises(ForetokenError, match="ends in its first step: ask for more new tokens"):
        _ = Continued((), 0.0).tokens_per_s


@pytest.mark.parametrize(("temperature", "drafter"), one_in(3, product([0.0, 0.7], ["model", "ngram"])))
def test_every_recipe_that_is_tried_can_be_drafted(demo, monkeypatch, drafter, temperature):
    monkeypatch.setattr(candidates, "num_cores", lambda: 2)
    engine = foretoken.load(str(demo / "target"), drafter=str(demo / "drafter") if drafter == "model" else drafter)
    tried = candidates.candidates(engine, (), temperature)
    assert len(set(tried)) == len(tried)
    for recipe in tried:
        with_recipe(engine, recipe).generate([1, 2, 3], max_new_tokens=3, temperature=temperature)
    assert any(recipe.draft_probability for recipe in tried) == (drafter == "model" and temperature > 0)
    assert any(recipe.tree.startswith("kary") for recipe in tried) == (drafter != "ngram")


def test_methods_that_need_common_tokens_are_left_out_where_there_are_none(models):
    engine = foretoken.load(
        models[0], drafter=models[1], vocab="slem", tokenizer=tiny.tokenizer(), drafter_tokenizer=tiny.tokenizer()
    )

    def vocabs() -> set[str | None]:
        return {recipe.vocab for recipe in candidates.candidates(engine, ["tli", "slem", "union"], 1.0)}

    assert vocabs() == {"tli", "slem", "union"}
    engine.drafter.translation.__dict__["pairs"] = {}
    assert vocabs() == {"slem"}
    with pytest.raises(ForetokenError, match="shares no tokens with its target: take vocab slem"):
        candidates.candidates(engine, ["tli", "union"], 1.0)


# The command.

SMALL = ["--prompts", 1, "--max-new-tokens", 16]


@pytest.fixture
def tune(run: Command, monkeypatch, unchecked) -> Command:
    """Some recipes of every kind are tried."""
    monkeypatch.setattr(candidates, "CHAINS", ["chain:1", "chain:3"])
    monkeypatch.setattr(candidates, "UNSURE", ["chain:3@0.4"])
    monkeypatch.setattr(candidates, "BRANCHING", ["kary:2x1"])
    monkeypatch.setattr(candidates, "NODES", (4,))
    monkeypatch.setattr(candidates, "num_cores", lambda: 1)
    return run


def test_tune_writes_a_profile_that_generate_and_bench_take(tune, tmp_path):
    out, err = tune.good("tune", *SMALL, "--best", 2, "--json")
    assert "profile written to foretoken-profile.json" in err
    assert [path.name for path in tmp_path.iterdir()] == ["foretoken-profile.json"]
    (table,) = json.loads(out)["tables"]
    rows = {row["tree"]: row for row in table["rows"]}
    assert set(rows) == {PLAIN, "chain:1", "chain:3", "chain:3@0.4", "kary:2x1", "dynamic:4", "budget:4"}
    assert (rows[PLAIN]["x plain"], rows[PLAIN]["tokens per step"]) == (1, 1)
    profile = read_profile("foretoken-profile.json")
    fastest = max(rows.values(), key=lambda row: row["x plain"])
    assert (profile.tree, profile.verifier) == (fastest["tree"], fastest["verifier"])
    assert profile.acceptance == rows["chain:1"]["tokens per step"] - 1
    profiled = ("generate", "ab", "--profile", "foretoken-profile.json", "--max-new-tokens", 4)
    assert tune.json(*profiled, "--method", "fixed")["tree"] == profile.tree
    assert tune.json(*profiled, "--seed", 1)["tree"].startswith("auto, at most")
    arguments = ("--rounds", 1, "--prompts", 1, "--max-new-tokens", 4, "--temperature", 1)
    bench = ("bench", "--profile", "foretoken-profile.json", *arguments)
    wanted = {"chain:5", "kary:2x2"} if profile.tree == PLAIN else {profile.tree}
    assert {row["method"] for row in tune.json(*bench)["rows"] if row["system"] == "foretoken"} == {PLAIN} | wanted
    tune.refused("made for another drafter", *bench, "--drafter", "ngram")


def test_a_profile_is_for_the_kind_of_blocks_that_it_was_made_with(tune):
    made = tune.json("tune", *SMALL, "--best", 1, "--quantise-drafter", "q8_0")
    assert (made["quantise"], made["quantise_drafter"]) == (None, "q8_0")
    profiled = ("generate", "ab", "--profile", "foretoken-profile.json", "--max-new-tokens", 4)
    tune.good(*profiled, "--quantise-drafter", "q8_0")
    tune.refused("made for another drafter", *profiled)


def test_tune_of_coins_and_of_a_lookup(tune, monkeypatch):
    monkeypatch.setattr(candidates, "num_cores", lambda: 2)
    found = tune.json("tune", *SMALL, "--best", 64)
    assert found["clock"] == "wall"
    tossed = {(row["tree"], row["a"]) for row in found["tables"][0]["rows"] if row["a"] is not None}
    assert tossed == {(tree, a) for tree in ("chain:1", "chain:3") for a in candidates.COINS}
    rows = tune.json("tune", *SMALL, "--drafter", "ngram")["tables"][0]["rows"]
    assert {row["tree"] for row in rows} == {PLAIN, "chain:1", "chain:3"}
    assert read_profile("foretoken-profile.json").drafter == "ngram"


def after(blocks: int, ran):
    """`run` of a workload that Ctrl-C ends once so many runs are done."""
    numbers = count()

    def broken_off(workload, *arguments):
        if next(numbers) >= blocks:
            raise KeyboardInterrupt
        return ran(workload, *arguments)

    return broken_off


def test_an_interrupted_tune_goes_on(tune, tmp_path, monkeypatch):
    two = ("tune", "--prompts", 2, *SMALL[2:], "--temperature", 0, "--json")
    with monkeypatch.context() as patched:
        patched.setattr(Workload, "run", after(14, Workload.run))  # six warm and run, then the second prompt
        code, _, err = tune(*two)
    assert code == 130
    assert "goes on after what" in err
    assert "foretoken-profile.json.part holds" in err
    assert not (tmp_path / "foretoken-profile.json").exists()
    out, err = tune.good(*two)
    assert "going on after 1 measurements" in err
    assert "replaced" not in err
    rules = {row["verifier"] for row in json.loads(out)["tables"][0]["rows"]}
    assert rules == {"", "block", "traversal", "exact-match"}


@pytest.mark.parametrize("other", one_in(3, ["drafter", "processor", (("--compile", "off"),)]))
def test_measurements_of_something_else_are_replaced_and_it_is_said(tune, demo, monkeypatch, other):
    two = ("tune", "--prompts", 2, *SMALL[2:])
    with monkeypatch.context() as patched:
        patched.setattr(Workload, "run", after(16, Workload.run))
        assert tune(*two)[0] == 130
    if other == "drafter":
        tiny.save(tiny.llama(8), folder := demo.parent / "other")
        monkeypatch.setattr("foretoken.cli.options.resolve_models", lambda *_: (str(demo / "target"), str(folder)))
    elif other == "processor":
        monkeypatch.setattr("foretoken.models.identity.cpu_name", lambda: "Z80")
    monkeypatch.setattr("foretoken.tune.run.continued", raising(KeyboardInterrupt))
    code, _, err = tune(*two, *(other if isinstance(other, tuple) else ()))
    assert code == 130
    assert "foretoken-profile.json.part is of other settings, models or versions: it is replaced" in err
    assert "going on" not in err


@pytest.mark.long
def test_tune_of_a_drafter_with_another_vocabulary(tune, demo: Path):
    stranger = demo.parent / "stranger"
    tiny.save(tiny.llama(0, vocab=259), stranger, extra=("ab", "de"))  # whose best guess is often right
    rows = tune.json("tune", *SMALL, "--best", 1, "--drafter", stranger, "--vocab", "auto")["tables"][0]["rows"]
    assert {row["vocab"] for row in rows} == {None, "tli", "slem", "slrs", "union"}
    profile = read_profile("foretoken-profile.json")
    method, weights = profile.drafter.split(" ", 1)
    assert method == profile.vocab
    arguments = ("--drafter", stranger, "--profile", "foretoken-profile.json", "--max-new-tokens", 4)
    bench = ("bench", "--rounds", 1, "--prompts", 1)
    for command in (("generate", "ab", "--method", "fixed"), ("generate", "ab"), bench):
        assert tune.json(*command, *arguments)
    for vocab in ("tli", "slem", "slrs", "union"):  # had plain decoding been the best
        plainly = replace(profile, tree=PLAIN, verifier="", vocab=vocab, drafter=f"{vocab} {weights}")
        plainly.write("foretoken-profile.json")
        assert tune.json(*bench, *arguments), vocab


def test_tune_takes_a_workload_file_and_refuses_what_it_cannot_do(tune, tmp_path):
    (tmp_path / "w.jsonl").write_text('{"prompt": "ab"}\n')
    tune.refused("it has 1", "tune", *SMALL, "--prompts", 2, "--workload", "w.jsonl")
    tune.refused("do not fit the context", "tune", *SMALL, "--max-new-tokens", 4000)
