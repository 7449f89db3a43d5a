"""`python -m benchmarks heads`: every head with every tree, plain text at temperature 0, times."""

import time

import pytest
import torch

import tiny
from benchmarks import heads
from benchmarks.head_clocks import PARTS
from foretoken.heads.checkpoint import save_head
from foretoken.heads.head import new_head
from foretoken.measure.clocks import Clock
from foretoken.models.causal_lm import CausalLM
from foretoken.models.parts import parts

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    model = tiny.llama(0, context=2048)
    tiny.save(model, root / "target")
    torch.manual_seed(0)
    for kind in ("gumiho", "eagle"):
        save_head(new_head(kind, parts(CausalLM(model))), root / kind)
    return root


def test_command(folder, monkeypatch, cli):
    monkeypatch.setattr(heads, "WARM_TOKENS", 1)  # warming up says nothing about the table
    heads_of = ("benchmarks", "heads", "--target", folder / "target")
    both = ("--head", folder / "eagle", "--head", folder / "gumiho", "--drafter", "none", "--nodes", 6, "--levels", 3)
    results = cli.json(*heads_of, *both, "--prompts", 1, "--max-new-tokens", 5, "--tree", "chain:3")["results"]
    cold = [r["method"] for r in results if r["temperature"] == 0]
    assert cold == [
        "plain", "eagle chain:3 block", "eagle dynamic:6 exact-match",
        "gumiho chain:3 block", "gumiho dynamic:6 exact-match", "gumiho product:6 exact-match",
        "gumiho, 3 levels dynamic:6 exact-match", "gumiho, 3 levels product:6 exact-match",
    ]  # fmt: skip
    warm = {r["method"]: r for r in results if r["temperature"] == 1}
    assert {"eagle kary:2x3 hub", "gumiho kary:2x3 transport", "eagle budget:6 block-transport"} <= warm.keys()
    assert warm.keys() > set(cold)
    assert warm["plain"]["tokens_per_step"] == warm["plain"]["speedup"] == 1
    for r in results[1:]:
        assert r["steps"] * r["tokens_per_step"] == pytest.approx(5)
        parts = r["components_ms_per_step"]
        assert list(parts) == list(PARTS)
        if r["method"] != "plain":
            assert 0 < max(parts["1st level"], parts["whole chain"]) <= r["draft_ms_per_step"]
            assert r["nodes_per_step"] > 0
    levels = ("--head", folder / "gumiho", "--levels", 9, "--drafter", "none")
    cli.refused("drafts 2 to 7 levels, not 9", *heads_of, *levels)
    tiny.save(tiny.llama(0, vocab=300), folder / "larger")
    larger = ("--head", folder / "eagle", "--nodes", 4, "--drafter", folder / "larger")
    cli.refused("has 300 tokens and target", *heads_of, *larger)


def test_a_clock_stands_still_while_the_one_that_halts_it_runs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    outer = Clock()
    inner = Clock(halts=outer)

    def wait(seconds):
        now[0] += seconds

    with outer:
        wait(1)
        with outer, inner:
            wait(10)
        wait(2)
    with inner:
        wait(20)
    wait(100)
    with outer:
        wait(4)
    assert (outer.seconds, inner.seconds, outer.count, inner.count) == (7, 30, 2, 2)
