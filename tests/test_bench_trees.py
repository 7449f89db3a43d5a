"""Acceptance vectors, the benchmark of trees, and the tables of tokens per step that it reproduces."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.papers import global_resolution_steps
from benchmarks.papers.global_resolution_steps import Paths, TopDrafter
from benchmarks.tree_methods import DEFAULT, TreeMethod, at_zero, method
from benchmarks.tree_report import PARTS, Sample, ratio, with_error
from benchmarks.tree_runs import Cell, Course, TreeRun, measure
from benchmarks.tree_runs import run as run_cell
from command import run as run_on_demo_models
from foretoken.audit import decoding
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.draft.lm import LMDrafter
from foretoken.measure.child_acceptance import child_acceptance
from foretoken.measure.report import Report
from foretoken.measure.results import Book
from foretoken.measure.teacher_forcing import ScoredText
from foretoken.models.target import LMTarget
from foretoken.names import tree_policy, verifier_named
from foretoken.trees.paths import PathTree
from foretoken.trees.static import StaticTree
from foretoken.verify import VERIFIERS
from tables import table_decoding, tiny_engine

SMALL = ("--prompts", 1, "--max-new-tokens", 3)


@pytest.mark.usefixtures("unchecked")
def test_acceptance_of_children_is_that_of_the_rule() -> None:
    """Over one position, and all of its draws by number: the mean of the row at each draw; at T = 0 a match."""
    p, q = torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([[0.6, 0.3, 0.1]])
    text = ScoredText(p.log().expand(300, -1), q.log().expand(300, -1))
    found = child_acceptance(VERIFIERS["rrsw"], WithoutReplacement, 2, text, 1.0, 0)
    first = float(torch.minimum(p, q).sum())
    assert abs(found.acceptance[0] - first) < 5 * found.standard_error[0]
    assert found.acceptance[1] > 0.1
    assert found.positions == 300
    greedy = child_acceptance(VERIFIERS["exact-match"], Opaque, 3, text, 0.0, 0)
    assert greedy.acceptance == (0.0, 1.0, 0.0)  # the target's likeliest token is the drafter's second
    with pytest.raises(ForetokenError, match="at least 1"):
        child_acceptance(VERIFIERS["rrsw"], WithoutReplacement, 0, text, 1.0, 0)


def test_methods() -> None:
    engine = tiny_engine()
    sizes = {}
    for name in DEFAULT:
        for nodes in (2, 8):
            drafter = method(name).at(nodes, engine.drafter, lambda: [0.6, 0.2])
            assert drafter is not None
            if isinstance(drafter.policy, StaticTree):
                sizes[name, nodes] = drafter.policy.max_nodes - 1
    assert sizes["kary+rrs", 2] == 2
    assert sizes["kary+rrs", 8] == 6
    assert sizes["sequoia+rrsw", 8] == sizes["chain+block", 8] == 8
    assert method("kary+rrs").at(1, engine.drafter, list) is None
    paths = [method("paths+gbv").at(nodes, engine.drafter, list) for nodes in (4, 8, 16, 32, 64)]
    assert [tree and tree.policy for tree in paths] == [
        PathTree(0, k, n) for k, n in ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8))
    ]
    assert at_zero([method("kary+rrs"), method("kary+hub")]) == [TreeMethod("kary", "exact-match")]
    for wrong in ("nonsense", "kary", "kary+nonsense", "dynamic+rrsw", "kary+exact-match"):
        with pytest.raises(ForetokenError, match=r"write SHAPE|cannot be"):
            method(wrong)


def test_steps_are_counted_to_a_stopping_time() -> None:
    """Where all drafts are accepted every step brings the chain and one more, the last one too."""
    engine = tiny_engine()
    drafter = LMDrafter(engine.target.lm, tree_policy("chain:3"), IID, engine.target.vocab_size)
    course = Course(engine.target, [[3, 1, 4], [1, 5], [9]], num_tokens=9, batch=2)
    found = run_cell(Cell(1.0, 3, "chain+rrs", drafter, verifier_named("rrs")), course)
    assert found.tokens == (12, 12, 12)
    assert found.steps == (3, 3, 3)
    assert found.drafted == (9, 9, 9)
    assert found.own_s > 0
    assert found.target_s + found.drafter_s + found.own_s < found.wall_s


def book(path: Path, settings: dict | None = None, commit: str = "a") -> Book[TreeRun]:
    return Book(str(path), TreeRun, settings or {}, {"commit": commit}, "--out", "runs")


def test_methods_in_turn_at_every_prompt_count_what_they_count_alone(tmp_path: Path) -> None:
    """With and without times: the same texts. In turn: a method's second prompt comes after every method's first."""
    engine, rule = tiny_engine(), verifier_named("rrs")
    v = engine.target.vocab_size
    cells = [
        Cell(t, n, f"chain:{n}", LMDrafter(engine.drafter.lm, tree_policy(f"chain:{n}"), IID, v), rule)
        for t in (0.5, 1.0)
        for n in (2, 3)
    ]
    course = Course(engine.target, [[3, 1, 4], [1, 5], [9]], num_tokens=6, batch=2, rounds=2)
    books, told = [], []
    for timed in (False, True):
        books.append(book(tmp_path / f"{timed}.jsonl"))
        told.append([])
        measure(course, cells, books[-1], told[-1].append, timed)
    assert len(books[0].found) == 8
    others = {found.key: found for found in books[1].found}
    for found in books[0].found:
        other = others[found.key]
        assert (found.tokens, found.steps, found.drafted) == (other.tokens, other.steps, other.drafted)
    alone, in_turn = ([line for line in lines if "warming" not in line] for lines in told)
    shown = "round 1/2, prompt {}/3: chain:{}, {} nodes, temperature 0.5"
    assert [line.partition("] ")[2] for line in in_turn[:4]] == [
        shown.format(i, n, n) for i, n in ((1, 2), (1, 3), (3, 3), (3, 2))
    ]
    assert [line.partition("] ")[2] for line in alone[:2]] == [shown.format(i, 2, 2) for i in (1, 3)]
    again: list[str] = []
    measure(course, cells, book(tmp_path / "True.jsonl"), again.append, True)
    assert not again


def sample(tokens: list[int], steps: list[int]) -> Sample:
    return Sample(np.array(tokens), np.array(steps), np.array(steps))


def test_errors_are_those_of_repeated_experiments() -> None:
    """Against the spread of 1,500 simulated benchmarks, to 5%; pairs share their prompts, which cancels."""
    rng = np.random.default_rng(0)

    def experiment() -> tuple[Sample, Sample]:
        ease = rng.gamma(20, 1 / 20, 30)
        steps = rng.integers(8, 13, (2, 30))
        one, other = (sample(rng.poisson(rate * ease * s), s) for rate, s in zip((4, 3), steps, strict=True))
        return one, other

    pairs = [experiment() for _ in range(1500)]
    efficiencies = np.array([one.efficiency for one, _ in pairs])
    assert np.mean([one.error for one, _ in pairs]) == pytest.approx(efficiencies.std(), rel=0.05)
    ratios = np.array([ratio(one, other) for one, other in pairs])
    assert ratios[:, 1].mean() == pytest.approx(ratios[:, 0].std(), rel=0.05)
    unpaired = np.array([(one.influence**2).sum() + (other.influence**2).sum() for one, other in pairs]) ** 0.5
    assert ratios[:, 1].mean() < 0.9 * (unpaired * ratios[:, 0]).mean()


def test_one_prompt_has_no_error_and_no_run_no_figures() -> None:
    assert with_error(ratio(sample([9], [3]), sample([6], [3]))[0], sample([9], [3]).error, 2) == "1.50"
    assert with_error(1.5, 0.25, 2) == "1.50 ± 0.25"
    report = Report("title", {}, interrupted=True)
    report.table("empty", ["a"])
    assert "before there were any" in report.markdown()
    report.tables[0].add("x")
    assert "of what was done" in report.markdown()


@pytest.mark.usefixtures("unchecked")
def test_the_commands(run, tmp_path: Path) -> None:
    vectors, out, plot = tmp_path / "vectors", tmp_path / "runs.jsonl", tmp_path / "trees.svg"
    measured = ("bench", "acceptance", "--prompts", 1, "--max-new-tokens", 4, "--children", 2, "--out", vectors)
    code, printed, _ = run(*measured, "--verifier", "rrsw", "--temperature", 1, "--json")
    assert code == 0
    (row,) = json.loads(printed)["tables"][0]["rows"]
    kept = json.loads((vectors / "rrsw-1.json").read_text())
    assert [row["b=1"], row["b=2"]] == kept["acceptance"]
    assert tree_policy(f"sequoia:4@{vectors / 'rrsw-1.json'}").max_nodes == 5
    both = ("--temperature", 0, "--temperature", 1)
    arguments = ("benchmarks", "trees", *SMALL, "--nodes", 2, *both, "--json", "--speed")
    files = ("--acceptance", tmp_path / "other", "--out", out, "--plot", plot)
    names = ("sequoia+rrsw", "budget+block-transport", "dynamic+exact-match")
    asked = [part for name in names for part in ("--method", name)]
    code, printed, err = run(*arguments, *files, *asked)
    assert code == 0, err
    found = {table["title"]: table for table in json.loads(printed)["tables"]}
    greedy = {row["method"]: row for row in found["Tokens per step, temperature 0"]["rows"]}
    assert {k: v for k, v in greedy["budget+exact-match"].items() if k != "method"} == {
        k: v for k, v in greedy["dynamic+exact-match"].items() if k != "method"
    }
    against = {row["method"]: row for row in found["Tokens per step over sequoia+rrsw's, temperature 1"]["rows"]}
    assert against["sequoia+rrsw"]["2 nodes"].startswith("1.000")
    for row in found["Milliseconds of a step, temperature 1"]["rows"]:
        step, *parts = (row[name] for name in PARTS)
        assert sum(parts) == pytest.approx(step)
        assert min(parts) > 0
    assert len(out.read_text().splitlines()) == 2 * 3
    assert plot.stat().st_size > 1000
    again = run(*arguments[:-2], *files[:-2], *asked, "--markdown")
    assert again[0] == 0
    assert "round" not in again[2]  # nothing is run again
    assert "Tokens per step, temperature 1" in again[1]
    code, _, err = run(*arguments, *files[:-2], *asked, "--children", 3)
    assert code == 2
    assert "children 4, not 3: name another --out" in err
    assert len(out.read_text().splitlines()) == 2 * 3


@pytest.mark.usefixtures("unchecked")
def test_a_file_of_something_else_is_refused(run, tmp_path: Path) -> None:
    arguments = ("bench", "acceptance", *SMALL, "--verifier", "rrsw", "--temperature", 1, "--out", tmp_path)
    assert run(*arguments)[0] == 0
    measured = (tmp_path / "rrsw-1.json").read_text()
    of_other_weights = json.dumps(json.loads(measured) | {"weights": ["0" * 16, "1" * 16]})
    for foreign, what in (
        ("nonsense", "is not a file of foretoken bench acceptance"),
        ('{"acceptance": [0.5]}', "is not a file of foretoken bench acceptance"),
        (of_other_weights, "was measured with weights"),
    ):
        (tmp_path / "rrsw-1.json").write_text(foreign)
        code, _, err = run(*arguments)
        assert code == 2
        assert what in err
        assert (tmp_path / "rrsw-1.json").read_text() == foreign


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rule", ["transport", "block-transport"])
def test_paths_have_the_targets_law(rule: str) -> None:
    """i.i.d. paths that share their beginnings: the number of draws below a node is that of the paths through it."""
    case = table_decoding(VERIFIERS[rule], IID, Paths(2, 2), 2)
    law, accepted = decoding.enumerate_law(case)
    assert decoding.deviation(law, decoding.own_law(case)) <= decoding.TOLERANCE
    assert accepted > 0.5


def test_drafts_from_the_top_have_the_cut_q() -> None:
    engine = tiny_engine()
    drafter = TopDrafter(engine.drafter.lm, Paths(3, 2), IID, engine.target.vocab_size)
    course = Course(LMTarget(engine.target.lm), [[3, 1, 4]], num_tokens=6, batch=1)
    kept = []

    class Looking(type(VERIFIERS["transport"])):
        def __call__(self, p, siblings):
            kept.append(int((siblings.q > 0).sum()))
            return super().__call__(p, siblings)

    run_cell(Cell(1.0, 6, "paths", drafter, Looking()), course)
    assert set(kept) == {10}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["spechub-tables5-7", "global-resolution-table4"])
def test_reproductions(monkeypatch, capsys, name: str) -> None:
    """A row of each table; all of them take minutes."""
    spechub_trees = importlib.import_module("benchmarks.papers.spechub_trees")
    chosen, cited = {5: "biSeq4", 6: "3^2", 7: "2^2"}, spechub_trees.cited
    monkeypatch.setattr(spechub_trees, "cited", lambda n: {1.0: {chosen[n]: cited(n)[1.0][chosen[n]]}})
    monkeypatch.setattr(global_resolution_steps, "TABLE_4", {2: global_resolution_steps.TABLE_4[2]})
    code, printed, err = run_on_demo_models(monkeypatch, capsys, "benchmarks", "reproduce", name, "--quick", "--json")
    assert code == 0, err
    tables = json.loads(printed)["tables"]
    assert [len(table["rows"]) for table in tables] == ([1, 1, 1] if name.startswith("spechub") else [1])
    shown = [cell for table in tables for cell in table["rows"][0].values() if isinstance(cell, str) and "±" in cell]
    assert len(shown) == (3 + 2 + 3 if name.startswith("spechub") else 5)
    assert all(float(cell.split()[0]) >= 1 for cell in shown)
