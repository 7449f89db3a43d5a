"""What docs/extending.md shows: a rule, a tree, a drafter and a benchmark are added here, and decode losslessly."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import foretoken
from benchmarks import __main__ as benchmarks
from engines import check_greedy
from foretoken.build import with_recipe
from foretoken.core.laws import IID
from foretoken.core.tree import Siblings
from foretoken.names import MADE_BY
from foretoken.recipe import KINDS, Kind, Recipe
from foretoken.trees import forms
from foretoken.verify import VERIFIERS
from snippets import ROOT, blocks

# Mixed, comb and echo, as the page has them.
SHOWN: dict[str, Any] = {}
for code in blocks(ROOT / "docs" / "extending.md", "python"):
    alone: dict[str, Any] = {}  # a block has all of its imports
    exec(compile(code, "docs/extending.md", "exec"), alone)
    SHOWN |= alone


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """place("foretoken.verify.mixed", Mixed): the file that a new thing would stand in."""

    def put(name: str, thing: Callable) -> None:
        module = ModuleType(name)
        setattr(module, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, name, module)

    return put


def assert_lossless(demo, **options) -> foretoken.Engine:
    """Greedy texts are plain decoding's; sampled ones come."""
    options.setdefault("drafter", demo / "drafter")
    engine = foretoken.load(demo / "target", **options)
    assert_drafts(engine)
    return engine


def assert_drafts(engine: foretoken.Engine) -> None:
    check_greedy(engine, ["def f("], 12)
    assert engine.generate("x", max_new_tokens=8, temperature=1.0, seed=1).stats.num_drafted > 0


def test_a_verifier(demo, place, monkeypatch):
    place("foretoken.verify.mixed", SHOWN["Mixed"])
    monkeypatch.setitem(VERIFIERS._homes, "mixed", "verify.mixed:Mixed")  # the line in RULES
    q, p = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    rule = foretoken.verifier("mixed")
    emitted = sum(float(q[x]) * rule(p, Siblings((x,), q, IID(1))) for x in range(3))
    assert torch.allclose(emitted, p, atol=1e-6)
    assert_lossless(demo, verifier="mixed", tree="chain:3")


def test_a_tree(demo, monkeypatch):
    monkeypatch.setitem(
        forms.TREES, "comb", forms.Form("comb:D", "a chain with a leaf per node", forms._sized("comb:D"))
    )
    monkeypatch.setitem(MADE_BY, "comb", SHOWN["comb"])
    assert foretoken.tree("comb:3").max_nodes == 7
    assert assert_lossless(demo, tree="comb:3").tree == "comb:3"


def test_a_drafter(demo, place, monkeypatch):
    place("foretoken.draft.echo", SHOWN["echo"])
    monkeypatch.setitem(KINDS, "echo", Kind("draft.echo:echo", "the last token again", "exact-match"))
    engine = foretoken.load(demo / "target", drafter="ngram")
    engine = with_recipe(replace(engine, source=replace(engine.source, kind="echo")), Recipe("chain:3"))
    assert (engine.drafter.name, engine.verifier.name) == ("echo", "exact-match")
    assert_drafts(engine)


def test_a_benchmark(run, place, monkeypatch):
    def command(times: int = 3) -> None:
        print("measured " * times)

    place("benchmarks.mine", command)
    monkeypatch.setitem(benchmarks.SCRIPTS, "mine", "prints")
    assert run("benchmarks", "mine", "--times", 2)[:2] == (0, "measured measured \n")
