"""Gumiho's full tree attention: our product tree is the best of the product and lossless; published reuse is not."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tiny
from foretoken.build import head as head_drafter
from foretoken.core.laws import Opaque
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import Siblings, TokenTree
from foretoken.draft.source import Source
from foretoken.heads.head import new_head
from foretoken.heads.lm import HeadLM
from foretoken.models.causal_lm import CausalLM
from foretoken.models.parts import parts
from foretoken.names import tree_policy
from foretoken.recipe import HEAD
from foretoken.trees.dynamic import WIDTH

VOCAB = 12


def drafted(spec: str) -> tuple[TokenTree, dict[tuple[int, ...], float]]:
    """A tree, and the score of every path that Gumiho's head can draft, by brute force."""
    lm = CausalLM(tiny.llama(0, vocab=VOCAB))
    torch.manual_seed(1)
    head = new_head("gumiho", parts(lm), levels=4)
    for linear in (head.fc, *(block.linear for mlp in head.mlp for block in mlp)):
        torch.nn.init.normal_(linear.weight, std=1 / linear.in_features**0.5)
    ids = [random.Random(0).randrange(VOCAB) for _ in range(7)]
    features = lm.states(torch.tensor([ids[:-1]]), head.feature_layers)[0]
    session = head_drafter(Source(HEAD, VOCAB, HeadLM(head, "head")), tree_policy(spec), Opaque).open(1, 100)
    session.join()
    session.learn([features])
    (tree,) = session.propose([Sequence(ids, Sampling(temperature=0.0), seeded(0), 40)])

    rows = HeadLM(head, "head").open(1, 100)
    rows.join()
    rows.learn([features])
    first = rows.score([ids[1:]], [range(-1, len(ids) - 2)])[0][-1].log_softmax(-1)
    root = len(ids) - 2
    second = rows.score([list(range(VOCAB))], [[root] * VOCAB])[0].log_softmax(-1)
    pairs = list(itertools.product(range(VOCAB), repeat=2))
    rows.score([[b for _, b in pairs]], [[root + 1 + a for a, _ in pairs]])
    places = [(0, root + 1 + VOCAB + i) for i in range(len(pairs))]
    later = dict(zip(pairs, rows.parallel_scores(places).log_softmax(-1), strict=True))
    scores: dict[tuple[int, ...], float] = {}
    for a in first.topk(WIDTH).indices.tolist():
        scores[a,] = float(first[a])
        for b in second[a].topk(WIDTH).indices.tolist():
            scores[a, b] = scores[a,] + float(second[a, b])
    beam = sorted((path for path in scores if len(path) == 2), key=scores.__getitem__, reverse=True)[:WIDTH]
    for path in beam:
        for c, d in itertools.product(range(VOCAB), repeat=2):
            scores[*path, c] = scores[path] + float(later[path][0, c])
            scores[*path, c, d] = scores[*path, c] + float(later[path][1, d])
    return tree, scores


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[i] for i in tree.path_to(node)[1:]) for node in range(1, len(tree))]


@pytest.mark.parametrize("nodes", [1, 5, 40])
def test_the_product_tree_is_the_best_of_the_product(nodes: int) -> None:
    tree, scores = drafted(f"product:{nodes}")
    assert len(tree) == nodes + 1
    best = sorted(scores.values(), reverse=True)[:nodes]
    assert sorted((scores[path] for path in paths(tree)), reverse=True) == pytest.approx(best, abs=1e-5)
    assert len(set(paths(tree))) == nodes


def law(tree: TokenTree, row: Callable[[int], Tensor], after: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """[v, v, v]: the law of the first three tokens of a step by exact match and of what the target writes after it."""
    out = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)

    def write(prefix: tuple[int, ...], prob: Tensor) -> None:
        if len(prefix) == 3:
            out[prefix] += prob
            return
        for token, p in enumerate(after(prefix)):
            write((*prefix, token), prob * p)

    def walk(node: int, prefix: tuple[int, ...], prob: Tensor) -> None:
        for token, p in enumerate(row(node)):
            child = tree.child(node, token)
            if child is None or len(prefix) == 2:
                write((*prefix, token), prob * p)
            else:
                walk(child, (*prefix, token), prob * p)

    walk(0, (), torch.ones((), dtype=torch.float64))
    return out


def test_a_node_under_another_path_needs_its_own_context() -> None:
    """root -> a -> c and root -> b. Completing b with c is lossless with a node of its own under b, and is not with the
    logits that c has under a, which is what the published completion takes."""
    lm = CausalLM(tiny.llama(0, vocab=VOCAB).double())
    text = [3, 1, 4, 1]

    def after(prefix: tuple[int, ...]) -> Tensor:
        with torch.inference_mode():
            return lm.model(input_ids=torch.tensor([[*text, *prefix]])).logits[0, -1].softmax(-1)

    b, a = after(()).topk(2).indices.tolist()
    c = int(after((b,)).argmax())
    children = Siblings((a, b), None, Opaque(2)), Siblings((c,), None, Opaque(1))
    tree = TokenTree((text[-1], a, b, c, c), (-1, 0, 0, 1, 2), (children[0], children[1], children[1], None, None))

    rows = lm.open(1, 20)
    rows.extend(rows.join(), text[:-1])
    (logits,) = rows.score([tree.tokens], [tree.parents])
    p = logits.softmax(-1)
    own = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for x, y in itertools.product(range(VOCAB), repeat=2):
        own[x, y] = after(())[x] * after((x,))[y] * after((x, y))

    ours = law(tree, lambda node: p[node], after)
    published = law(tree, lambda node: p[3 if node == 4 else node], after)
    assert float((ours - own).abs().sum()) / 2 < 1e-12
    assert float((published - own).abs().sum()) / 2 > 0.01
    given = published[b, c] / published[b, c].sum()  # the token after the borrowed one: another context's law
    assert float((given - after((b, c))).abs().sum()) / 2 > 0.1
