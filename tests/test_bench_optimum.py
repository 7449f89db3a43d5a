"""The joint optimum: what is known of it on chains and at depth 1, that it can be had, and the command."""

from itertools import product
from math import prod

import pytest

from benchmarks.joint import Drawn, Path, accepted, drawn, optimum
from command import Command
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID
from foretoken.names import tree_policy
from foretoken.verify import VERIFIERS
from foretoken.verify.acceptance import alpha_star

pytestmark = pytest.mark.long

JOINT = ("block-transport", "traversal", "gbv")


def case(tree: str, v: int, seed: int = 0) -> Drawn:
    return drawn(tree_policy(tree), v, seed)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("tree", "v"), [("chain:1", 3), ("chain:2", 3), ("chain:3", 2)])
def test_on_a_chain_block_verification_has_it(tree: str, v: int) -> None:
    for seed in range(5):
        chain = case(tree, v, seed)
        best = optimum(chain).accepted
        for rule in ("block", *JOINT):
            assert accepted(VERIFIERS[rule], chain) == pytest.approx(best, abs=1e-9)
    assert accepted(VERIFIERS["standard"], chain) < best - 1e-3 or tree == "chain:1"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("tree", "k"), [("kary:2x1", 2), ("kary:3x1", 3), ("delayed:0+3x1", 3)])
def test_at_depth_1_it_is_the_known_optimum(tree: str, k: int) -> None:
    """alpha* of Hu et al. 2025, which `transport` has."""
    for seed in range(5):
        one = case(tree, 3, seed)
        siblings = one.trees[0][0].siblings[0]
        best = optimum(one).accepted
        assert best == pytest.approx(float(alpha_star(IID(k), one.p(()), siblings.q)), abs=1e-9)
        assert accepted(VERIFIERS["transport"], one) == pytest.approx(best, abs=1e-9)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tree", ["kary:2x2", "delayed:0+2x2", "delayed:1+2x1"])
def test_no_rule_accepts_more(tree: str) -> None:
    names = ("rrs", "rrsw", "kseq", "transport", *JOINT)
    for seed in range(3):
        one = case(tree, 2, seed)
        best = optimum(one).accepted
        assert max(accepted(VERIFIERS[name], one) for name in names) <= best + 1e-9


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tree", ["kary:2x2", "delayed:0+3x2"])
def test_it_can_be_had_by_a_lossless_rule(tree: str) -> None:
    """If z comes after the accepted path x with what a(x) p(z | x) leaves, the text has the target's law."""
    v, one = 2, case(tree, 2, 3)
    a = optimum(one).through

    def next_tokens(path: Path) -> list[float]:
        """The probability that `path` is accepted and z comes next."""
        return [a[path] * float(one.p(path)[z]) - a.get((*path, z), 0.0) for z in range(v)]

    assert min(left for path in a for left in next_tokens(path)) > -1e-9
    law = dict.fromkeys(product(range(v), repeat=one.depth + 1), 0.0)
    for path in a:
        for z, chance in enumerate(next_tokens(path)):
            for rest in product(range(v), repeat=one.depth - len(path)):
                whole = (*path, z, *rest)
                after = range(len(path) + 1, len(whole))
                law[whole] += chance * prod(float(one.p(whole[:i])[whole[i]]) for i in after)
    own = {path: prod(float(one.p(path[:i])[x]) for i, x in enumerate(path)) for path in law}
    assert max(abs(law[path] - own[path]) for path in law) < 1e-9


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("tree", "least"), [("kary:2x2", 0.99), ("delayed:0+2x2", 0.99)])
def test_block_transport_is_near_it(tree: str, least: float) -> None:
    """And nearer than each other rule, on average over pairs."""
    cases = [case(tree, 3, seed) for seed in (2, 3, 4)]
    best = [optimum(one).accepted for one in cases]

    def share(name: str) -> float:
        return sum(accepted(VERIFIERS[name], one) / most for one, most in zip(cases, best, strict=True)) / len(cases)

    found = share("block-transport")
    assert found > least
    assert found > max(share(name) for name in ("transport", "traversal", "gbv"))


def test_the_command(run: Command) -> None:
    rules = ("--verifier", "rrs", "--verifier", "block")
    (row,) = run.json("benchmarks", "optimum", "--case", "kary:2x1/2", *rules, "--pairs", "2")["tables"][0]["rows"]
    assert row["tree/tokens"] == "kary:2x1/2"
    assert 0 < row["optimum"] <= 1
    assert 0.5 < float(row["rrs"].split()[0]) <= 1
    assert row["block"] is None


def test_too_many_trees_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.joint.MOST_TREES", 10)
    with pytest.raises(ForetokenError, match="More than 10 trees"):
        case("kary:2x2", 2)
