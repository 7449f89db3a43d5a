"""Sequoia: the best of all trees, by brute force; its file; and the chain where branching does not pay."""

import itertools
import json
import math

import pytest

from foretoken.core.errors import ForetokenError
from foretoken.names import tree_policy
from foretoken.trees.forms import read_acceptance
from foretoken.trees.sequoia import sequoia
from foretoken.trees.static import StaticTree, chain


def all_trees(nodes: int, children: int, levels: int):
    """Every parent list of so many nodes besides the root."""
    for parents in itertools.product(*(range(i) for i in range(1, nodes + 1))):
        tree = StaticTree((-1, *parents))
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        if max(depths) <= levels and max(map(parents.count, range(nodes + 1))) <= children:
            yield tree


def expected_tokens(tree: StaticTree, acceptance: list[float]) -> float:
    """Tokens per step, the bonus counted, where children are accepted with these probabilities."""
    reach, seen = [1.0], [0] * len(tree.parents)
    for parent in tree.parents[1:]:
        reach.append(reach[parent] * acceptance[seen[parent]])
        seen[parent] += 1
    return math.fsum(reach)


@pytest.mark.parametrize("acceptance", [[0.7, 0.2, 0.05], [0.4, 0.35, 0.2], [0.9, 0.01], [0.5]])
@pytest.mark.parametrize("levels", [2, 5])
def test_no_tree_is_better(acceptance: list[float], levels: int) -> None:
    for budget in (1, 2, 3, 5):
        best = max(
            expected_tokens(tree, acceptance)
            for n in range(budget + 1)
            for tree in all_trees(n, len(acceptance), levels)
        )
        found = sequoia(acceptance, budget, levels)
        assert len(found.parents) <= budget + 1
        assert expected_tokens(found, acceptance) == pytest.approx(best)


def test_a_single_child_gives_the_chain() -> None:
    assert sequoia([0.8], 6) == chain(6)
    assert sequoia([0.8, 0.0], 6) == chain(6)


def test_the_file(tmp_path) -> None:
    file = tmp_path / "acceptance.json"
    file.write_text(json.dumps({"acceptance": [0.6, 0.2], "verifier": "rrsw"}))
    assert read_acceptance(str(file)) == [0.6, 0.2]
    assert tree_policy(f"sequoia:5@{file}") == sequoia([0.6, 0.2], 5)
    for text, message in (
        ('{"a": 1}', "must hold JSON"),
        ("nonsense", "must hold JSON"),
        ('{"acceptance": 3}', "list"),
    ):
        file.write_text(text)
        with pytest.raises(ForetokenError, match=message):
            tree_policy(f"sequoia:5@{file}")
    with pytest.raises(ForetokenError, match="Cannot read"):
        read_acceptance(str(tmp_path / "none.json"))
    with pytest.raises(ForetokenError, match="sequoia:N@FILE"):
        tree_policy("sequoia:5")
    with pytest.raises(ForetokenError, match="sum to at most 1"):
        sequoia([0.9, 0.9], 4)
