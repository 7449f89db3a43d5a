"""The arena: expected acceptance beside the audit's enumeration of the walk, trees on given texts, and the command."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.arena import Measured, measure, scores
from benchmarks.arena_clock import Timed, time_all, workload_of
from benchmarks.book import Book
from benchmarks.contestants import Contestant, contestants, nodes_of, rules, trees_of, usual
from benchmarks.expected import ends, survival
from benchmarks.places import Text, answered, drafted_along, pair_named
from foretoken.audit.branching import outcomes
from foretoken.audit.enumerate import laws_of
from foretoken.build import plain
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Opaque
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.core.walk import walk_of
from foretoken.decode import Decoder
from foretoken.engine import Engine
from foretoken.measure.teacher_forcing import logits_at
from foretoken.names import policy_for, tree_policy
from foretoken.trees.dynamic import RankedTree
from foretoken.verify import VERIFIERS
from tables import each, table_decoding, tiny_engine, trees

pytestmark = pytest.mark.long

SHAPES = ("chain:3", "chain:2@0.5", "kary:2x2", "kary:3x1", "delayed:1+2x1", "delayed:0+2x2", "budget:3", "dynamic:3")
OF_TWO_TOKENS = ("kary:2x2", "delayed:0+2x2", "budget:3")  # else there are too many trees
MOST_TREES = 80
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5]]


def meeting() -> Iterator[tuple[str, LawFamily, str]]:
    """Every rule, with every law that it takes, on every shape whose draws it takes."""
    for name in rules():
        rule = VERIFIERS[name]
        for family in dict.fromkeys(type(law) for law in laws_of(rule)):
            for shape in SHAPES:
                policy = policy_for(tree_policy(shape), rule)
                if isinstance(policy, RankedTree) == (family is Opaque) and all(map(rule.accepts, policy.laws(family))):
                    yield name, family, shape


def cases(rule: Verifier, family: LawFamily, shape: str) -> Iterator[tuple[TokenTree, torch.Tensor]]:
    """Trees that the drafting that runs makes of tables, and p after each of their nodes."""
    v = 2 if shape in OF_TWO_TOKENS else 3
    case = table_decoding(rule, family, policy_for(tree_policy(shape), rule), v)
    for tree, *_ in trees(case)[:MOST_TREES]:
        texts = [[0, 1, *(tree.tokens[i] for i in tree.path_to(node)[1:])] for node in range(len(tree))]
        yield tree, torch.stack([case.target.lm.table[text[-2], text[-1]].double() for text in texts])


def by_enumeration(rule: Verifier, tree: TokenTree, p: torch.Tensor) -> list[float]:
    """P(the accepted path ends at each node), every choice of the walk taken in turn."""
    found, run = [0.0] * len(tree), walk_of(rule)
    for (path, _), prob in outcomes(lambda rng: run(tree, each(lambda node: p[node]), rng)):
        found[path[-1]] += prob
    return found


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "family", "shape"), list(meeting()), ids=lambda x: x if isinstance(x, str) else x.__name__
)
def test_where_paths_end_is_what_the_walk_does(name: str, family: LawFamily, shape: str) -> None:
    rule, compared = VERIFIERS[name], 0
    for tree, p in cases(rule, family, shape):
        want = by_enumeration(rule, tree, p)
        assert ends(rule, tree, p).tolist() == pytest.approx(want, abs=1e-12)
        at_least = [sum(x for x, d in zip(want, tree.depths, strict=True) if d >= i) for i in (1, 2)]
        assert survival(rule, tree, p, 2) == pytest.approx(at_least, abs=1e-12)
        compared += len(tree) > 1
    assert compared


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("wrong", "right"), [("rrsw", "traversal"), ("transport", "block-transport")])
def test_the_enumeration_sees_an_expectation_of_another_rule(wrong: str, right: str) -> None:
    """The rule of one node in the place of its own over whole paths."""
    rule = VERIFIERS[right]
    off = [
        max(
            abs(a - b)
            for a, b in zip(ends(VERIFIERS[wrong], tree, p).tolist(), by_enumeration(rule, tree, p), strict=True)
        )
        for tree, p in cases(rule, rule.laws[0], "kary:2x2")
    ]
    assert max(off) > 0.01


def test_a_rule_over_paths_that_is_not_known_is_refused() -> None:
    tree, p = next(cases(VERIFIERS["standard"], IID, "chain:3"))
    with pytest.raises(ForetokenError, match="string-rejection has no exact expectation"):
        ends(VERIFIERS["string-rejection"], tree, p)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["rrsw", "traversal", "block-transport"])
def test_decoding_accepts_what_is_expected_of_its_trees(name: str) -> None:
    """Over steps of real decodings, counts less expectations add up to 0 within 4 standard errors: another seed would
    leave them once in 16,000 times."""
    engine = tiny_engine(verifier=name)
    off: list[float] = []

    def watch(seq, tree, scores, path, token) -> None:
        p = scores.p(range(len(tree))).double()
        off.append(len(path) - 1 - sum(survival(engine.verifier, tree, p, 2)))

    for seed in range(60):
        decoder = Decoder(engine.target, engine.drafter, engine.verifier, 1, 64, watch)
        decoder.join(Sequence([3, 1, 4], Sampling(temperature=0.8), seeded(seed), 24))
        while decoder.sequences:
            decoder.step()
    values = np.array(off)
    assert values.std() > 0.1
    assert abs(values.mean()) < 4 * values.std() / len(values) ** 0.5


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tree", ["chain:3", "delayed:1+2x2", "budget:4"])
def test_trees_stand_at_places_of_the_text(tree: str) -> None:
    """Each is rooted at the token before its place; p and q at its nodes are those of plain forwards."""
    engine = tiny_engine(tree=tree)
    texts = [Text([3, 1, 4], [1, 5, 9, 2, 6], [0, 2, 3]), Text([2, 7], [1, 8, 2, 8], [1]), Text([9], [4, 4], [0, 1])]
    v, sampling, seen = engine.target.vocab_size, Sampling(temperature=0.7), []
    for number, drafted, p in drafted_along(engine, texts, 0.7, 5):
        text = texts[number]
        place = text.places[seen.count(number)]
        seen.append(number)
        before = [*text.prompt, *text.answer[:place]]
        assert drafted.tokens[0] == before[-1]
        for node in range(len(drafted)):
            ids = before + [drafted.tokens[i] for i in drafted.path_to(node)[1:]]
            want_p, want_q = (
                sampling(logits_at(lm, [ids], [(0, len(ids) - 1)], v))[0]
                for lm in (engine.target.lm, engine.drafter.lm)
            )
            torch.testing.assert_close(p[node].float(), want_p, rtol=1e-4, atol=1e-6)
            if (siblings := drafted.siblings[node]) is not None:
                torch.testing.assert_close(siblings.q, want_q, rtol=1e-4, atol=1e-6)
    assert sorted(seen) == [0, 0, 0, 1, 2, 2]


def test_answers_and_their_places() -> None:
    engine = tiny_engine()
    found = answered(engine, PROMPTS, 12, 4, 0.7, 0)
    want = plain(engine).generate(PROMPTS, max_new_tokens=12, temperature=0.7, seed=0)
    assert [text.answer for text in found] == [result.token_ids for result in want]
    assert all(text.places == [0, 3, 6, 9] for text in found if len(text.answer) == 12)
    short = answered(engine, PROMPTS, 2, 4, 0.7, 0)
    assert {tuple(text.places) for text in short} == {(0, 1)}


def test_who_meets() -> None:
    engine = tiny_engine()
    at_1 = contestants(engine, 8, trees_of(8), 1.0, rules())
    assert {c.rule for c in at_1} == set(rules())
    assert {c.law for c in at_1 if c.tree == "chain:8"} == {"iid"}
    assert [nodes_of(tree) for tree in trees_of(8)] == [8, 6, 8, 8, 8, 8, 8]
    assert {c.tree for c in at_1 if c.rule == "exact-match"} == {"dynamic:8"}
    for c in at_1:
        c.engine(engine)  # which refuses what is not lossless
    at_0 = contestants(engine, 8, trees_of(8), 0.0, rules())
    assert {(c.rule, c.law) for c in at_0} == {("exact-match", "opaque")}
    assert len(at_0) == 6  # budget:8 is dynamic:8 there
    assert {usual(8, t, engine) in contestants(engine, 8, trees_of(8), t, rules()) for t in (0.0, 1.0)} == {True}
    by_lookup = contestants(tiny_engine(drafter="ngram", tree="chain:2"), 8, trees_of(8), 1.0, rules())
    assert {c.tree for c in by_lookup} == {"chain:8", "kary:2x2"}
    assert pair_named("a,b").target == "a"


def book(path: Path) -> Book[Measured]:
    return Book(str(path), Measured, {}, {})


@pytest.mark.usefixtures("unchecked")
def test_what_is_measured_is_the_mean_of_the_places_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    engine = tiny_engine()
    c = Contestant(4, "delayed:0+2x2", "traversal", "iid")
    texts = answered(engine, PROMPTS, 8, 2, 0.7, 0)
    first, again = book(tmp_path / "a"), book(tmp_path / "b")
    measure(engine, texts, 0.7, [c], first, 3, lambda line: None)
    (score,) = scores(first.found, 0.7, [c])
    want = [[], [], []]
    for number, tree, p in drafted_along(c.engine(engine), texts, 0.7, 3):
        want[number].append(sum(survival(VERIFIERS["traversal"], tree, p, 2)))
    assert score.accepted.tolist() == pytest.approx([np.mean(rows) for rows in want])
    assert score.error == pytest.approx(np.std(score.accepted, ddof=1) / 3**0.5)
    again.add(first.found[1])
    measure(engine, texts, 0.7, [c], again, 3, lambda line: None)
    assert sorted(again.found, key=lambda m: m.text) == first.found
    lines: list[str] = []
    measure(engine, texts, 0.7, [c], book(tmp_path / "b"), 3, lines.append)
    assert not lines


@pytest.mark.usefixtures("unchecked")
def test_by_the_clock_whole_blocks_are_kept(tmp_path: Path) -> None:
    engine: Engine = replace(tiny_engine(), max_batch=1)
    engines = {"plain": plain(engine), "drafted": engine}
    work = workload_of(engine, PROMPTS[:2], 16, 0.7, 0)

    def timed() -> Book[Timed]:
        return Book(str(tmp_path / "clock"), Timed, {}, {})

    def stop(line: str) -> None:
        if line.startswith("[4/"):  # the second method on the second prompt
            raise KeyboardInterrupt

    assert time_all(engines, work, 1, timed(), stop)
    assert [run.prompt for run in timed().found] == [0, 0]
    assert not time_all(engines, work, 1, found := timed(), lambda line: None)
    assert sorted((run.prompt, run.method) for run in found.found) == [
        (i, m) for i in (0, 1) for m in ("drafted", "plain")
    ]
    assert all(sum(run.tokens) + 1 <= 16 for run in found.found if run.method == "plain")


@pytest.mark.usefixtures("unchecked")
def test_the_command(run, tmp_path: Path) -> None:
    small = ("--pair", "toy", "--nodes", 4, "--prompts", 2, "--places", 2, "--max-new-tokens", 16)
    some = [part for rule in ("exact-match", "block", "rrsw", "traversal") for part in ("--rule", rule)]
    asked = ("benchmarks", "arena", *small, *some, "--temperature", 0, "--temperature", 1, "--rounds", 1)
    found = {table["title"]: table["rows"] for table in run.json(*asked, "--plot", tmp_path / "arena.svg")["tables"]}
    (row,) = found["toy, temperature 1: the best beside the usual"]
    assert row["usual"] == "chain:4 block, iid"
    ruled = {row["rule"]: row for row in found["toy, temperature 1: the same, more than the usual accepts"]}
    assert ruled["block, iid"]["4 nodes"] == "+0.00 ± 0.00"
    drawn = [f"{rule}, {law}" for law in ("iid", "without_replacement") for rule in ("rrsw", "traversal")]
    assert list(ruled) == ["block, iid", *drawn, "exact-match"]
    accepted = found["toy, temperature 1, 4 nodes: accepted, and nodes drafted in brackets"]
    of_trees = {row["rule"]: row for row in accepted}
    assert of_trees["block, iid"]["chain:4"].endswith("(4.0)")
    assert of_trees["block, iid"]["delayed:0+2x2"] is None
    depths = found["toy, temperature 1, 4 nodes: P(at least so many accepted) on delayed:0+2x2"]
    assert all(1 >= row["1"] >= row["2"] > 0 for row in depths)
    clocked = {row["method"]: row for row in found["toy, temperature 0: by the clock"]}
    assert clocked["plain"]["x plain"] == "1.00 ± 0.00"
    assert clocked["auto"]["tokens per step"] >= 1
    assert (tmp_path / "arena.svg").stat().st_size > 1000
    again = run(*asked, "--markdown")
    assert again[0] == 0
    assert "texts 1 to" not in again[2]  # nothing is measured again
    named = run(
        "benchmarks", "arena", *small[:2], *small[4:], *some, "--tree", "kary:2x2", "--temperature", 1, "--json"
    )
    titles = [table["title"] for table in json.loads(named[1])["tables"]]
    assert "toy, temperature 1, 6 nodes: accepted, and nodes drafted in brackets" in titles
    run.refused("places 2, not 3: name another --out", *asked, "--places", 3)
