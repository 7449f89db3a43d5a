"""Acceptance vectors, and the papers' tables of tokens per step, counted on the real engine."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.papers import global_resolution_steps, spechub_curves, spechub_trees
from benchmarks.papers.global_resolution_steps import Paths
from benchmarks.papers.shaped import Flattened, Likeliest, ShapedDrafter, flattened_to
from benchmarks.papers.steps import Course, Sample
from benchmarks.papers.steps import run as counted
from foretoken.audit import decoding
from foretoken.audit.enumerate import TOLERANCE
from foretoken.cli.options import load_engine
from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.draft.lm import LMDrafter
from foretoken.measure.child_acceptance import child_acceptance
from foretoken.measure.teacher_forcing import ScoredText
from foretoken.names import tree_policy, verifier_named
from foretoken.verify import VERIFIERS
from raising import raising
from tables import table_decoding, tiny_engine

pytestmark = pytest.mark.long

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


def test_steps_are_counted_to_a_stopping_time() -> None:
    """Where all drafts are accepted every step brings the chain and one more, the last one too."""
    engine = tiny_engine()
    drafter = LMDrafter(engine.target.lm, tree_policy("chain:3"), IID, engine.target.vocab_size)
    course = Course(engine.target, [[3, 1, 4], [1, 5], [9]], num_tokens=9, batch=2)
    found = counted(drafter, verifier_named("rrs"), 1.0, course)
    assert found.tokens.tolist() == [12, 12, 12]
    assert found.steps.tolist() == [3, 3, 3]
    assert found.wall_s > 0


def test_errors_are_those_of_repeated_experiments() -> None:
    """Against the spread of 1,500 simulated benchmarks, to 5%; one prompt tells nothing of its error."""
    rng = np.random.default_rng(0)

    def experiment() -> Sample:
        steps = rng.integers(8, 13, 30)
        return Sample(rng.poisson(4 * rng.gamma(20, 1 / 20, 30) * steps), steps)

    found = [experiment() for _ in range(1500)]
    spread = np.array([sample.efficiency for sample in found]).std()
    assert np.mean([sample.error for sample in found]) == pytest.approx(spread, rel=0.05)
    assert np.isnan(Sample(np.array([9]), np.array([3])).error)


@pytest.mark.usefixtures("unchecked")
def test_the_command(run, tmp_path: Path) -> None:
    vectors = tmp_path / "vectors"
    measured = ("bench", "acceptance", "--prompts", 1, "--max-new-tokens", 4, "--children", 2, "--out", vectors)
    (row,) = run.json(*measured, "--verifier", "rrsw", "--temperature", 1)["tables"][0]["rows"]
    kept = json.loads((vectors / "rrsw-1.json").read_text())
    assert [row["b=1"], row["b=2"]] == kept["acceptance"]
    for temperatures in ((0, 1), (1, 0)):
        named = [word for t in temperatures for word in ("--temperature", t)]
        (table,) = run.json(*measured, *named, "--verifier", "rrsw")["tables"]
        largest = max(max(json.loads(path.read_text())["standard_error"]) for path in vectors.iterdir())
        assert table["notes"] == [f"Standard errors up to {largest:.3f}; 4 positions per row."]
    assert tree_policy(f"sequoia:4@{vectors / 'rrsw-1.json'}").max_nodes == 5


def test_an_interrupt_before_any_figures_is_told(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("foretoken.measure.child_acceptance.continued", raising(KeyboardInterrupt))
    code, out, _ = run("bench", "acceptance", *SMALL, "--out", tmp_path / "vectors")
    assert (code, out.splitlines()[-1]) == (130, "Interrupted before there were any figures.")
    assert not (tmp_path / "vectors").exists()


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("spechub", "Verifier spechub is not lossless for 4 children of a node: give --children 2,"),
        ("block-pairwise", "is not lossless for 4 children of a node: give --children 2,"),
        ("standard", "is not lossless for 4 children of a node: give --children 1,"),
        ("randomised", "is not lossless for 4 children of a node: give --children 1,"),
        ("global-resolution", "Verifier global-resolution is only approximately lossless"),
    ],
)
def test_rules_that_do_not_take_so_many_children_are_refused(
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule: str, says: str
) -> None:
    """Before a model is loaded; at temperature 0 every rule is exact-match, which takes any number."""
    monkeypatch.setattr("foretoken.measure.pair.load_pair", raising(KeyboardInterrupt))
    arguments = ("bench", "acceptance", *SMALL, "--verifier", "rrs", "--verifier", rule, "--out", tmp_path / "vectors")
    run.refused(says, *arguments)
    assert run(*arguments, "--temperature", 0)[0] == 130


@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_a_drafter_without_a_distribution_is_named(run, tmp_path: Path, drafter: str) -> None:
    code, _, err = run("bench", "acceptance", "--drafter", drafter, "--prompts", 2, "--out", tmp_path / "made")
    assert code == 2
    assert f"Drafter {drafter} has no distribution to draw from" in err


@pytest.mark.usefixtures("unchecked")
def test_a_file_of_something_else_is_refused(run, tmp_path: Path) -> None:
    arguments = ("bench", "acceptance", *SMALL, "--verifier", "rrsw", "--temperature", 1, "--out", tmp_path)
    assert run(*arguments)[0] == 0
    measured = (tmp_path / "rrsw-1.json").read_text()
    other = {"weights": ["0" * 16, "1" * 16], "verifier": "hub", "temperature": 1.0000001}
    damaged = [("acceptance", [0.5]), ("acceptance", 7), ("acceptance", ["x", 2, 3, 4]), ("standard_error", [])]

    def changed(key: str, value: object) -> str:
        return json.dumps(json.loads(measured) | {key: value})

    for foreign, what in (
        *((changed(key, value), f"was measured with {key}") for key, value in other.items()),
        *((changed(key, value), "is not a file of foretoken bench") for key, value in damaged),
        ("nonsense", "is not a file of foretoken bench acceptance"),
        ('{"acceptance": [0.5]}', "is not a file of foretoken bench acceptance"),
    ):
        (tmp_path / "rrsw-1.json").write_text(foreign)
        run.refused(what, *arguments)
        assert (tmp_path / "rrsw-1.json").read_text() == foreign


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rule", ["transport", "block-transport"])
def test_paths_have_the_targets_law(rule: str) -> None:
    """i.i.d. paths that share their beginnings: the number of draws below a node is that of the paths through it."""
    case = table_decoding(VERIFIERS[rule], IID, Paths(2, 2), 2)
    law, accepted = decoding.enumerate_law(case)
    assert decoding.deviation(law, decoding.own_law(case)) <= TOLERANCE
    assert accepted > 0.5


@pytest.mark.parametrize("tree", ["paths", "chain:2"])
@pytest.mark.parametrize("batch", [1, 2])
def test_drafts_are_drawn_from_the_changed_q_and_recorded_with_it(tree: str, batch: int) -> None:
    """On the demo pair, whose compiled calls draw and score on roads of their own."""
    engine = load_engine(None, None)
    policy = Paths(3, 2) if tree == "paths" else tree_policy(tree)
    course = Course(engine.target, [[3, 1, 4], [1, 5]], num_tokens=6, batch=batch)
    seen = []

    class Looking(type(VERIFIERS["transport"])):
        def __call__(self, p, siblings):
            seen.append((siblings.q, siblings.draws))
            return super().__call__(p, siblings)

    inner = engine.drafter
    for shape, support in ((Likeliest(10), 10), (Flattened(0.0), inner.vocab_size)):
        seen.clear()
        drafter = ShapedDrafter(inner.lm, policy, IID, inner.vocab_size, shape)
        counted(drafter, Looking(), 1.0, course)
        assert {int((q > 0).sum()) for q, _ in seen} == {support}
        assert all(float(q.sum()) == pytest.approx(1, abs=1e-5) for q, _ in seen)
        assert all(float(q[list(draws)].min()) > 0 for q, draws in seen)


def test_a_flattened_q_is_that_of_smaller_logits() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(Flattened(0.4)((logits / 0.6).softmax(1)), (0.4 * logits / 0.6).softmax(1), atol=1e-12)


def test_a_drafter_is_made_worse_to_measure_but_not_better() -> None:
    rng = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(2 * torch.randn(50, 9, generator=rng, dtype=torch.float64), 1) for _ in range(2))
    own = float(torch.minimum(p, q).sum(1).mean())
    worse = flattened_to(p, p, 0.7)
    assert float(torch.minimum(p, worse(p)).sum(1).mean()) == pytest.approx(0.7, abs=1e-6)
    assert flattened_to(p, q, own + 0.1) == Flattened(1.0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["spechub-tables5-7", "global-resolution-table4"])
def test_reproductions(monkeypatch, cli, name: str) -> None:
    """A row of each table; all of them take minutes."""
    chosen, cited = {5: "biSeq4", 6: "3^2", 7: "2^2"}, spechub_trees.cited
    monkeypatch.setattr(spechub_trees, "cited", lambda n: {1.0: {chosen[n]: cited(n)[1.0][chosen[n]]}})
    monkeypatch.setattr(global_resolution_steps, "TABLE_4", {2: global_resolution_steps.TABLE_4[2]})
    tables = cli.json("benchmarks", "reproduce", name, "--quick")["tables"]
    assert [len(table["rows"]) for table in tables] == ([1, 1, 1] if name.startswith("spechub") else [1])
    shown = [cell for table in tables for cell in table["rows"][0].values() if isinstance(cell, str) and "±" in cell]
    assert len(shown) == (3 + 2 + 3 if name.startswith("spechub") else 5)
    assert all(float(cell.split()[0]) >= 1 for cell in shown)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["spechub-figure1", "spechub-figure6"])
def test_curves_of_tokens_per_step(cli, name: str) -> None:
    (table,) = cli.json("benchmarks", "reproduce", name, "--quick")["tables"]
    assert [row["tree"] for row in table["rows"]] == (["2^2", "2^3"] if name == "spechub-figure1" else ["2^2"])
    for row in table["rows"]:
        assert all(1 <= float(row[f"{rule}, ours"].split()[0]) <= 4 for rule in spechub_curves.RULES)
        assert (row["rrs, JF68m"] is None) == (row["T"] == "0.2")


@pytest.mark.usefixtures("unchecked")
def test_acceptance_by_draft_falls_to_nothing(cli) -> None:
    """Both rules accept the first draft alike, as often as JF68m's; all ten together are accepted at most always."""
    rows = cli.json("benchmarks", "reproduce", "spechub-figure7", "--positions", "24", "--quick")["tables"][0]["rows"]
    assert len(rows) == 10
    for rule in ("rrs", "rrsw"):
        assert rows[0][rule] == pytest.approx(0.4418, abs=0.15)
        assert sum(row[rule] for row in rows) <= 1
        assert rows[0][rule] > 3 * rows[5][rule]
