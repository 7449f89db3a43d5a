"""Block verification: the exact law of whole chains and trees, more tokens than node by node; and in the engine."""

from collections import defaultdict
from itertools import product

import pytest
import torch

from foretoken.audit.enumerate import TOLERANCE
from foretoken.core.laws import IID, Hub, Opaque, WithoutReplacement
from foretoken.core.policy import Plan, TreePolicy
from foretoken.core.random import seeded
from foretoken.core.tree import Siblings, TokenTree, TreeBuilder, chain, root_only
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.core.walk import walk_of
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.verify.block import TreeBlock, decide, is_chain, plain_decision
from tables import PlainNumbers, each, off_target, table_decoding
from thinning import one_in
from whole_texts import Path, Table, add_text, chance, deviation, pair, paths, steps

BLOCK, STANDARD, TRANSPORT = VERIFIERS["block"], VERIFIERS["standard"], VERIFIERS["block-transport"]
UNEVEN = static.StaticTree((-1, 0, 0, 1, 1, 2))


def law_and_length(rule: Verifier, p: Table, q: Table, v: int, length: int) -> tuple[dict[Path, float], float]:
    """({first length + 1 tokens: probability}, expected tokens per step); after the last token comes the target's
    own text, as from a next step that is lossless."""
    law: dict[Path, float] = {}
    expected = 0.0
    for tokens in paths(v, length):
        for (kept, token), prob in steps(rule, p, q, tokens):
            expected += chance(q, tokens) * prob * (len(kept) + 1)
            add_text(law, (*kept, token), chance(q, tokens) * prob, p, length + 1)
    return law, expected


@pytest.mark.usefixtures("unchecked")
def test_what_is_kept_of_a_text_is_what_block_verification_keeps() -> None:
    """P(text begins with y, and the step kept i drafts or more) of every y, over all drafts and decisions."""
    v, length = 3, 3
    p, q = pair(v, length, seed=0)
    joint: dict[tuple[tuple[int, ...], int], float] = defaultdict(float)
    for tokens in paths(v, length):
        for (kept, _), prob in steps(BLOCK, p, q, tokens):
            for i in range(len(kept) + 1):
                joint[tokens[:i], i] += chance(q, tokens) * prob
    for y in paths(v, length):
        at_least, ratio = 1.0, 1.0
        for i, x in enumerate(y, start=1):
            ratio *= float(q[y[: i - 1]][x] / p[y[: i - 1]][x])
            at_least = min(at_least, ratio)
            assert joint[y[:i], i] == pytest.approx(chance(p, y[:i]) * at_least, abs=1e-12)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", range(3))
def test_the_law_of_a_whole_block_and_its_length(seed: int) -> None:
    """V = 3, L = 3: exact, and longer than node by node."""
    p, q = pair(3, 3, seed)
    law, length = law_and_length(BLOCK, p, q, 3, 3)
    assert len(law) == 81
    assert deviation(law, p) < 1e-12
    node_law, node_length = law_and_length(STANDARD, p, q, 3, 3)
    assert deviation(node_law, p) < 1e-12
    assert length > node_length + 0.01


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", ["p == q", "one-hot p", "one-hot q", "zeros", "equal at the first node"])
def test_blocks_at_the_edges(case: str) -> None:
    p, q = pair(3, 2, seed=5)
    eye = torch.eye(3, dtype=torch.float64)
    if case == "p == q":
        p = {x: row.clone() for x, row in q.items()}
    elif case == "one-hot p":
        p = {x: eye[len(x) % 3] for x in p}
    elif case == "one-hot q":
        q = {x: eye[(len(x) + 1) % 3] for x in q}
    elif case == "zeros":
        p = {x: row * (1 - eye[0]) / (row * (1 - eye[0])).sum() for x, row in p.items()}
        q = {x: row * (1 - eye[len(x)]) / (row * (1 - eye[len(x)])).sum() for x, row in q.items()}
    else:
        p[()] = q[()].clone()
    law, length = law_and_length(BLOCK, p, q, 3, 2)
    assert deviation(law, p) < 1e-12
    assert length >= law_and_length(STANDARD, p, q, 3, 2)[1] - 1e-12


def test_a_wrong_threshold_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With h_i = w_i throughout the block is lossy, and the same check says so."""
    monkeypatch.setattr("foretoken.verify.block._keep", lambda w, excess: w)
    p, q = pair(3, 2, seed=1)
    assert deviation(law_and_length(BLOCK, p, q, 3, 2)[0], p) > 0.01


def test_trees_without_drafts_or_without_q() -> None:
    p = torch.tensor([0.0, 1.0, 0.0])
    assert walk_of(BLOCK)(root_only(0), each(lambda node: p), seeded(0)) == ((0,), 1)
    opaque = chain([0, 1, 2], [Siblings((1,), None, Opaque(1)), Siblings((2,), None, Opaque(1)), None])
    assert walk_of(BLOCK)(opaque, each(lambda node: p), seeded(0)) == ((0, 1), 1)


def test_a_chain_that_ended_early() -> None:
    """A node whose law drew nothing ends the block there."""
    q = torch.tensor([0.5, 0.5, 0.0])
    tree = chain([0, 1], [Siblings((1,), q, IID(1)), Siblings((), q, IID(1))])
    path, token = walk_of(BLOCK)(tree, each(lambda node: torch.eye(3)[[1, 2][node]]), seeded(0))
    assert (path, token) == ((0, 1), 2)


@pytest.mark.parametrize(
    ("dtype", "sharpness", "length"),
    one_in(5, product([torch.float32, torch.float64], [0.0, 1.0, 4.0], [1, 2, 5])),
)
def test_the_compiled_decision_is_the_plain_one(dtype: torch.dtype, sharpness: float, length: int) -> None:
    """sharpness: how far p is from q; 0 is p == q. Neither is quite normalised."""
    rng = torch.Generator().manual_seed(length)
    lengths = set()
    for v in (1, 3, 65, 4096):
        for _ in range(40):
            logits = 2 * torch.randn(length + 1, v, generator=rng, dtype=torch.float64)
            other = logits + sharpness * torch.randn(length + 1, v, generator=rng, dtype=torch.float64)
            p, q = 1.25 * logits.softmax(-1).to(dtype), 1.25 * other[:-1].softmax(-1).to(dtype)
            drafts = tuple(torch.multinomial(q, 1, generator=rng)[:, 0].tolist())
            u = torch.rand(1, 2, generator=rng, dtype=torch.float64)
            decision = decide(p, q, drafts, u)
            assert decision == plain_decision(p, q, drafts, u)
            lengths.add(decision[0])
    assert lengths == (set(range(length + 1)) if sharpness else {length})


@pytest.mark.parametrize("family", [IID, WithoutReplacement, Hub])
def test_it_takes_one_draw_a_node_and_no_more(family: type[IID]) -> None:
    assert BLOCK.accepts(family(1))
    assert not BLOCK.accepts(family(2))


# Trees.


def enumerated(rule, family: LawFamily, policy, v: int = 2, num_tokens: int = 3, seed: int = 0) -> tuple[float, float]:
    """(deviation from the target's law, drafted tokens accepted)."""
    return off_target(table_decoding(rule, family, policy, v, seed=seed, num_tokens=num_tokens))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("block", "family"),
    [
        ("block-transport", IID),
        ("block-pairwise", WithoutReplacement),
        ("traversal", WithoutReplacement),
        ("traversal", IID),
    ],
)
def test_trees_are_exact_and_longer_than_node_by_node(block: str, family: LawFamily) -> None:
    worst, accepted = enumerated(VERIFIERS[block], family, UNEVEN)
    assert worst <= TOLERANCE
    by_node = enumerated(VERIFIERS[block].rule, family, UNEVEN)[1]
    assert accepted > by_node + (1e-3 if family is IID else -1e-12)  # two of two tokens: always accepted


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "family"), [("block", IID), ("block-transport", IID), ("traversal", WithoutReplacement)]
)
def test_whole_decodings_with_a_chain(name: str, family: LawFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules for trees decide as the one for chains does, also when they go from node to node."""
    by_node = enumerated(STANDARD, IID, static.chain(3), v=3, num_tokens=4)[1]
    by_block = enumerated(BLOCK, IID, static.chain(3), v=3, num_tokens=4)[1]
    assert by_block > by_node
    for as_tree in (False, True):
        if as_tree:
            monkeypatch.setattr("foretoken.verify.block.is_chain", lambda _: False)
        worst, accepted = enumerated(VERIFIERS[name], family, static.chain(3), v=3, num_tokens=4)
        assert worst <= TOLERANCE
        assert accepted == pytest.approx(by_block, abs=1e-12)


class Entangled(TreePolicy):
    """Two draws at the root, one below each, and below those so many as all tokens of that level sum up to: what is
    drawn below one child depends on what was drawn below the other."""

    max_nodes, max_draws = 9, 2

    def root(self, past):
        return ()

    def sizes(self):
        return (0, 2, 4, 8)

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


@pytest.mark.usefixtures("unchecked")
def test_numbers_that_depend_on_other_branches_are_exact() -> None:
    worst, accepted = enumerated(TRANSPORT, IID, Entangled(), num_tokens=4, seed=4)
    assert worst <= TOLERANCE
    assert accepted > 1


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


@pytest.mark.parametrize(
    ("dtype", "name"),
    one_in(2, product([torch.float32, torch.float64], ["block-transport", "block-pairwise", "traversal"])),
)
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
def test_trees_at_the_edges(case: str) -> None:
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


@pytest.mark.parametrize(
    ("name", "law"), [("traversal", WithoutReplacement), ("block-transport", IID), ("block-pairwise", IID)]
)
def test_a_tree_may_be_deeper_than_pythons_stack(name: str, law: type[IID]) -> None:
    """Where p is q every draft token on the first path is accepted, down to the branches at its end."""
    depth, q = 1500, torch.full((2,), 0.5)
    inner = (Siblings((0,), q, law(1)),) * depth
    tree = TokenTree(
        tokens=(0,) * (depth + 2) + (1,),
        parents=(*range(-1, depth + 1), depth),
        siblings=(*inner, Siblings((0, 1), q, law(2)), None, None),
    )
    path, token = VERIFIERS[name].walk(tree, lambda nodes: q.expand(len(nodes), -1), seeded(0))
    assert path[: depth + 1] == tuple(range(depth + 1))
    assert len(path) == depth + 2
    assert token in (0, 1)
