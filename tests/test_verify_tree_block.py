"""Block verification of trees: exact for whole trees, more tokens than node by node, and on a chain the known rule."""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch

from foretoken.audit import decoding
from foretoken.core.laws import IID, Hub, Opaque, WithoutReplacement
from foretoken.core.policy import Plan
from foretoken.core.random import seeded
from foretoken.core.tree import Siblings, TokenTree, TreeBuilder, root_only
from foretoken.core.verifier import LawFamily
from foretoken.core.walk import PathVerifier, walk_of
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.verify.block import TreeBlock, is_chain
from tables import PlainNumbers, each, table_decoding, tiny_engine

TRANSPORT = VERIFIERS["block-transport"]
UNEVEN = static.StaticTree((-1, 0, 0, 1, 1, 2))


def enumerated(rule, family: LawFamily, policy, v: int = 2, num_tokens: int = 3, seed: int = 0) -> tuple[float, float]:
    """(deviation from the target's law, drafted tokens accepted)."""
    case = table_decoding(rule, family, policy, v, seed=seed, num_tokens=num_tokens)
    law, accepted = decoding.enumerate_law(case)
    return decoding.deviation(law, decoding.own_law(case)), accepted


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("block", "family"), [("block-transport", IID), ("block-rrsw", WithoutReplacement), ("block-rrsw", IID)]
)
def test_trees_are_exact_and_longer_than_node_by_node(block: str, family: LawFamily) -> None:
    worst, accepted = enumerated(VERIFIERS[block], family, UNEVEN)
    assert worst <= decoding.TOLERANCE
    by_node = enumerated(VERIFIERS[block.removeprefix("block-")], family, UNEVEN)[1]
    assert accepted > by_node + (1e-3 if family is IID else -1e-12)  # two of two tokens: always accepted


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "family"), [("block-transport", IID), ("block-rrsw", WithoutReplacement)])
@pytest.mark.parametrize("as_tree", [False, True])
def test_on_a_chain_it_is_block_verification(
    name: str, family: LawFamily, as_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it goes from node to node, as it does where a tree branches."""
    if as_tree:
        monkeypatch.setattr("foretoken.verify.block.is_chain", lambda _: False)
    worst, accepted = enumerated(VERIFIERS[name], family, static.chain(3), v=3, num_tokens=4)
    assert worst <= decoding.TOLERANCE
    assert accepted == pytest.approx(
        enumerated(VERIFIERS["block"], IID, static.chain(3), v=3, num_tokens=4)[1], abs=1e-12
    )


def test_a_chain_of_certain_draws_is_told_from_others() -> None:
    q = torch.full((3,), 1 / 3)

    def grown(*records: tuple[int, Siblings]) -> TokenTree:
        builder = TreeBuilder(0)
        for node, siblings in records:
            builder.add(node, siblings)
        return builder.build()

    one, twice, none = Siblings((1,), q, IID(1)), Siblings((1, 1), q, IID(2)), Siblings((), q, IID(1, (0.5, 0.5)))
    perhaps = Siblings((1,), q, IID(1, (0.5, 0.5)))
    assert is_chain(grown((0, one), (1, one)))
    for law in (WithoutReplacement(1), Hub(1)):
        assert is_chain(grown((0, Siblings((1,), q, law)), (1, one)))
    assert not is_chain(grown((0, one), (1, Siblings((1,), None, Opaque(1)))))
    others = [(0, twice), (0, perhaps), (0, none), (0, Siblings((1, 2), q, IID(2)))]
    assert not any(is_chain(grown(other)) for other in others)
    assert not any(is_chain(grown((0, one), (1, siblings))) for _, siblings in others)
    assert not is_chain(grown((0, Siblings((1, 2), q, IID(2))), (1, one)))


@dataclass(frozen=True)
class Entangled:
    """Two draws at the root, one below each, and below those so many as all tokens of that level sum up to: what is
    drawn below one child depends on what was drawn below the other."""

    max_nodes: int = 9
    max_draws: int = 2
    weighs: bool = False
    level: dict = field(default_factory=lambda: defaultdict(list), hash=False, compare=False)

    def root(self, past):
        return ()

    def past(self, states):
        return None

    def laws(self, family):
        return (family(2),)

    def sizes(self):
        return (0, 2, 4, 8)

    def at(self, family, temperature):
        return self

    def plan(self, states, q, family):
        depth = len(states[0])
        if depth == 2:
            n = min(2, sum(path[-1] for path in states))
            return [Plan(family(n), path) if n else None for path in states]
        return [Plan(family(2 - depth), path) for path in states]

    def grow(self, plans, q, draws):
        return [[(*plan.memo, x) for x in row] for plan, row in zip(plans, draws, strict=True)]

    def select(self, states, first):
        return list(range(first, len(states))) if len(states[-1]) < 3 else []

    def keep(self, states):
        return None


@pytest.mark.usefixtures("unchecked")
def test_numbers_that_depend_on_other_branches_are_exact() -> None:
    worst, accepted = enumerated(TRANSPORT, IID, Entangled(), num_tokens=4, seed=4)
    assert worst <= decoding.TOLERANCE
    assert accepted > 1


@dataclass(frozen=True)
class Perhaps(Entangled):
    """A chain of two draws, each of which is made with probability 1/2."""

    def laws(self, family):
        return (IID(1, (0.5, 0.5)),)

    def plan(self, states, q, family):
        return [Plan(IID(1, (0.5, 0.5)), path) for path in states]

    def select(self, states, first):
        return list(range(first, len(states))) if len(states) > first and len(states[-1]) < 2 else []


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["transport", "block-transport", "block-rrsw", "block"])
def test_a_draw_that_may_not_be_made_is_exact(name: str) -> None:
    worst, accepted = enumerated(VERIFIERS[name], IID, Perhaps(), num_tokens=2)
    assert worst <= decoding.TOLERANCE
    assert accepted > 0.1


@pytest.mark.usefixtures("unchecked")
def test_weights_that_forget_the_siblings_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second child that is visited with less than its due, as if its sibling had not been tried, is lossy."""
    visit = TreeBlock._visit

    def forgetful(self, tree, node, weight, after, rng):
        siblings = tree.siblings[0]
        second = (
            node > 0 and len(set(siblings.draws)) > 1 and node == tree.child(0, list(dict.fromkeys(siblings.draws))[1])
        )
        return visit(self, tree, node, 0.3 * weight if second else weight, after, rng)

    monkeypatch.setattr(TreeBlock, "_visit", forgetful)
    assert enumerated(TRANSPORT, IID, UNEVEN)[0] > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["block-transport", "block-rrsw"])
def test_the_compiled_walk_is_the_plain_one(name: str, dtype: torch.dtype) -> None:
    """Trees of no, one and two draws a node; the same uniforms, so the same path and token."""
    rng, v = torch.Generator().manual_seed(0), 300
    kept: set[int] = set()
    for seed in range(150):
        builder, frontier = TreeBuilder(0), [0]
        for k in (1, 1, 2, 1, 1):
            below = []
            for node in frontier[: 3 - seed % 2]:
                q = torch.softmax(2 * torch.randn(v, generator=rng, dtype=dtype), -1) * 1.5
                draws = tuple(torch.multinomial(q, k, generator=rng, replacement=True).tolist())
                siblings = Siblings(draws, q, IID(k)) if seed % 5 else Siblings((), q, IID(1, (1.0, 0.0)))
                below += builder.add(node, siblings).values()
            frontier = below
        tree = builder.build()
        near = torch.stack([x.q if x is not None else torch.ones(v, dtype=dtype) for x in tree.siblings])
        p = near * torch.exp(0.3 * torch.randn(near.shape, generator=rng, dtype=dtype))
        found = []
        for plainly in (False, True):
            source = PlainNumbers(seeded(seed)) if plainly else seeded(seed)
            found.append(VERIFIERS[name].walk(tree, each(p.__getitem__), source))
        assert found[0] == found[1]
        kept.add(len(found[0][0]))
    assert kept >= {1, 2, 4, 5, 6}


@pytest.mark.parametrize("case", ["p == q", "one-hot p", "one-hot q", "disjoint"])
def test_edges(case: str) -> None:
    """The walk ends, and emits what p allows."""
    eye = torch.eye(3, dtype=torch.float64)
    p, q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.5, 0.4, 0.1], dtype=torch.float64)
    p, q = {"p == q": (q, q), "one-hot p": (eye[2], q), "one-hot q": (p, eye[0]), "disjoint": (eye[2], 1 - eye[2])}[
        case
    ]
    draws = (0,) if case == "one-hot q" else (0, 1)
    builder = TreeBuilder(0)
    for node in builder.add(0, Siblings(draws * 2, q, IID(len(draws) * 2))).values():
        builder.add(node, Siblings(draws, q, IID(len(draws))))
    tree, rng = builder.build(), seeded(0)
    for _ in range(50):
        path, token = walk_of(TRANSPORT)(tree, each(lambda node: p), rng)
        assert all(p[tree.tokens[node]] > 0 for node in path[1:])
        assert p[token] > 0
    assert walk_of(TRANSPORT)(root_only(0), each(lambda node: eye[1]), rng) == ((0,), 1)


def test_it_takes_trees_that_branch() -> None:
    assert isinstance(TRANSPORT, PathVerifier)
    engine = tiny_engine(tree="budget:8", verifier="block-transport")
    plain = tiny_engine(drafter=None, tree="chain:1")
    for temperature in (0.0, 1.0):
        result = engine.generate([3, 1, 4], max_new_tokens=12, temperature=temperature, seed=0)
        assert len(result.token_ids) == 12
    greedy = {"max_new_tokens": 12, "temperature": 0.0}
    assert engine.generate([3, 1, 4], **greedy).token_ids == plain.generate([3, 1, 4], **greedy).token_ids
