"""Block verification: the exact law of a whole block, more tokens than node by node, and its place in the engine."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from foretoken.audit import decoding
from foretoken.audit.branching import outcomes
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Opaque, WithoutReplacement
from foretoken.core.random import seeded
from foretoken.core.tree import Siblings, TokenTree, chain, root_only
from foretoken.core.walk import PathVerifier, walk, walk_of
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.verify.block import decide, plain_decision
from tables import each, table_decoding, tiny_engine

BLOCK, STANDARD = VERIFIERS["block"], VERIFIERS["standard"]
Table = dict[tuple[int, ...], Tensor]


def tables(v: int, length: int, seed: int, sharpness: float = 1.5) -> tuple[Table, Table]:
    """p and q after every prefix of up to `length` tokens."""
    rng = torch.Generator().manual_seed(seed)
    prefixes = [prefix for n in range(length + 1) for prefix in itertools.product(range(v), repeat=n)]
    p, q = (
        {x: torch.softmax(sharpness * torch.randn(v, generator=rng, dtype=torch.float64), 0) for x in prefixes}
        for _ in range(2)
    )
    return p, q


def drafted(q: Table, tokens: tuple[int, ...]) -> TokenTree:
    records = [Siblings((x,), q[tokens[:i]], IID(1)) for i, x in enumerate(tokens)]
    return chain([0, *tokens], [*records, None])


def law_and_length(rule, p: Table, q: Table, v: int, length: int) -> tuple[dict[tuple[int, ...], float], float]:
    """({first length + 1 tokens: probability}, expected tokens a step); after the step's last token comes the target's
    own text, as from a next step that is lossless."""
    law: dict[tuple[int, ...], float] = {}
    expected = 0.0
    run = walk_of(rule)
    for tokens in itertools.product(range(v), repeat=length):
        tree = drafted(q, tokens)
        chance = math.prod(float(q[tokens[:i]][x]) for i, x in enumerate(tokens))
        for (path, token), prob in outcomes(
            lambda rng, tree=tree, tokens=tokens: run(tree, each(lambda node: p[tokens[:node]]), rng)
        ):
            assert path == tuple(range(len(path)))
            expected += chance * prob * len(path)
            out = (*tokens[: len(path) - 1], token)
            for rest in itertools.product(range(v), repeat=length + 1 - len(out)):
                whole = (*out, *rest)
                after = math.prod(float(p[whole[:i]][whole[i]]) for i in range(len(out), len(whole)))
                law[whole] = law.get(whole, 0.0) + chance * prob * after
    return law, expected


def worst(law: dict[tuple[int, ...], float], p: Table) -> float:
    return max(abs(law[x] - math.prod(float(p[x[:i]][t]) for i, t in enumerate(x))) for x in law)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", range(3))
def test_the_law_of_a_whole_block_and_its_length(seed: int) -> None:
    """V = 3, L = 3: exact, longer than node by node, and as long as the formulas say."""
    p, q = tables(3, 3, seed)
    law, length = law_and_length(BLOCK, p, q, 3, 3)
    assert len(law) == 81
    assert worst(law, p) < 1e-12
    node_law, node_length = law_and_length(STANDARD, p, q, 3, 3)
    assert worst(node_law, p) < 1e-12
    assert length > node_length + 0.01
    by_weight, by_node = 1.0, 1.0
    for n in (1, 2, 3):
        for tokens in itertools.product(range(3), repeat=n):
            w, each, chance = 1.0, 1.0, 1.0
            for i, x in enumerate(tokens):
                ratio = float(p[tokens[:i]][x] / q[tokens[:i]][x])
                w, each, chance = min(1, w * ratio), each * min(1, ratio), chance * float(q[tokens[:i]][x])
            by_weight, by_node = by_weight + chance * w, by_node + chance * each
    assert length == pytest.approx(by_weight, abs=1e-12)
    assert node_length == pytest.approx(by_node, abs=1e-12)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", ["p == q", "one-hot p", "one-hot q", "zeros", "equal at the first node"])
def test_blocks_at_the_edges(case: str) -> None:
    p, q = tables(3, 2, seed=5)
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
    assert worst(law, p) < 1e-12
    assert length >= law_and_length(STANDARD, p, q, 3, 2)[1] - 1e-12


def test_a_wrong_threshold_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With h_i = w_i throughout the block is lossy, and the same check says so."""
    monkeypatch.setattr("foretoken.verify.block._keep", lambda w, excess: w)
    p, q = tables(3, 2, seed=1)
    assert worst(law_and_length(BLOCK, p, q, 3, 2)[0], p) > 0.01


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


def test_only_rules_with_a_walk_of_their_own_take_it() -> None:
    assert isinstance(BLOCK, PathVerifier)
    own = {name for name, rule in VERIFIERS.items() if isinstance(rule, PathVerifier)}
    assert own == {"block", "block-transport", "block-rrsw", "string-rejection"}
    p = torch.tensor([0.3, 0.7])
    tree = chain([0, 1], [Siblings((1,), torch.tensor([0.5, 0.5]), IID(1)), None])
    rngs = seeded(0), seeded(0)
    assert walk_of(STANDARD)(tree, each(lambda node: p), rngs[0]) == walk(tree, each(lambda node: p), STANDARD, rngs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("length", [1, 2, 5])
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


@pytest.mark.usefixtures("unchecked")
def test_whole_decodings_with_a_chain_of_three() -> None:
    case = table_decoding(BLOCK, IID, static.chain(3), 3, num_tokens=4)
    law, accepted = decoding.enumerate_law(case)
    assert decoding.deviation(law, decoding.own_law(case)) <= decoding.TOLERANCE
    by_node = decoding.enumerate_law(table_decoding(STANDARD, IID, static.chain(3), 3, num_tokens=4))[1]
    assert accepted > by_node


def test_the_engine_refuses_trees_that_branch() -> None:
    with pytest.raises(ForetokenError, match="does not branch"):
        tiny_engine(tree="kary:2x2", verifier="block")


def test_greedy_text_is_the_targets() -> None:
    plain = tiny_engine(drafter=None, tree="chain:1", verifier=None)
    block = tiny_engine(tree="chain:4", verifier="block")
    options = {"max_new_tokens": 12, "temperature": 0.0}
    assert block.generate([3, 1, 4], **options).token_ids == plain.generate([3, 1, 4], **options).token_ids
