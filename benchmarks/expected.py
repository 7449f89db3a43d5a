"""How far the walk over a drafted tree gets, exactly: no accepted token is drawn.

Given the tree and the target's p at its nodes, a rule fixes the probability that the accepted path ends at each node.
So only trees are sampled, and rules that are compared on the same trees differ by what they do alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.core.verifier import Verifier
from foretoken.core.walk import PathVerifier
from foretoken.verify.block import Block, TreeBlock, decision, is_chain
from foretoken.verify.multipath import GreedyMultipath
from foretoken.verify.rule import TINY


def survival(rule: Verifier, tree: TokenTree, p: Float[Tensor, "n v"], depth: int) -> list[float]:
    """Compute P(at least i draft tokens are accepted | the tree), for i = 1 .. depth; their sum is the expected number.

    rule, tree, p: as in `ends`.
    depth: of what is asked for; a tree that is less deep accepts no more than it has.
    """
    found = ends(rule, tree, p).tolist()
    return [sum(x for x, d in zip(found, tree.depths, strict=True) if d >= i) for i in range(1, depth + 1)]


def ends(rule: Verifier, tree: TokenTree, p: Float[Tensor, "n v"]) -> Float[Tensor, " n"]:
    """Compute P(the accepted path ends at node i | the tree), as `core.walk.walk_of` walks it.

    rule: node by node, block verification of a chain or of a chosen path, or a `TreeBlock`.
    p: the target's distribution after each of the n nodes, float64.

    Raises ForetokenError for another rule that decides over whole paths.
    """
    found = torch.zeros(len(tree), dtype=torch.float64)
    root = tree.siblings[0]
    if isinstance(rule, PathVerifier) and root is not None and root.q is not None and root.draws:
        if isinstance(rule, TreeBlock):
            _visit(rule, tree, p, 0, 1.0, 1.0, found)
        elif isinstance(rule, Block | GreedyMultipath):
            path, of_path, laws = _one_path(rule, tree, p)
            drafts = tuple(tree.tokens[node] for node in path[1:])
            of_path, laws = (rows.double() / rows.double().sum(-1, keepdim=True) for rows in (of_path, laws))
            chances, _, _ = decision(of_path, laws, drafts)
            found[list(path)] = torch.tensor(chances, dtype=torch.float64)
        else:
            raise ForetokenError(f"Verifier {rule.name} has no exact expectation here: choose another one.")
        return found
    found[0] = 1.0
    for node, siblings in enumerate(tree.siblings):
        if siblings is None or not siblings.draws or found[node] == 0:
            continue
        row = p[node] if siblings.q is None else rule(p[node], siblings)
        arrived, total = float(found[node]), float(row.sum())
        for token, child in _children(tree, node):
            found[child] = arrived * float(row[token]) / total
            found[node] -= found[child]
    return found.clamp_(min=0.0)


def _one_path(
    rule: Block | GreedyMultipath, tree: TokenTree, p: Float[Tensor, "n v"]
) -> tuple[Sequence[int], Float[Tensor, "l1 v"], Float[Tensor, "l v"]]:
    """Return the path over which the rule decides, p after each of its nodes, and the law of each of its l tokens."""
    if isinstance(rule, GreedyMultipath) and not is_chain(tree):
        return rule.chosen(tree, lambda nodes: p[nodes.start : nodes.stop])
    laws = [siblings.q for siblings in tree.siblings if siblings is not None and siblings.q is not None]
    return range(len(laws) + 1), p[: len(laws) + 1], torch.stack(laws)


def _children(tree: TokenTree, node: int) -> Sequence[tuple[int, int]]:
    """(token, node) of the children, in draw order."""
    siblings = tree.siblings[node]
    assert siblings is not None
    found = ((token, tree.child(node, token)) for token in dict.fromkeys(siblings.draws))
    return [(token, child) for token, child in found if child is not None]


def _visit(
    rule: TreeBlock, tree: TokenTree, p: Float[Tensor, "n v"], node: int, weight: float, arrived: float,
    found: Float[Tensor, " n"],
) -> float:  # fmt: skip
    """Visit `node` as verify/block.py says, by all ways that the walk may take from there.

    weight: with which it is visited.
    arrived: the probability that it is visited.
    found: gains, at the node and below it, the probability that the path ends there.

    Returns the probability that it is visited and rejected.
    """
    siblings = tree.siblings[node]
    if siblings is None or not siblings.draws:
        found[node] += arrived * weight
        return arrived * (1 - weight)
    row, left = rule.law(p[node], siblings, weight), 1.0
    for token, child in _children(tree, node):
        share = float(row[token])
        if share > 0:
            arrived = _visit(rule, tree, p, child, min(1.0, share / left), arrived, found)
            left = max(left - share, TINY)
    drafted = [token for token, _ in _children(tree, node)]
    rejected, rest = float(row[-1]), float(row.sum() - row[drafted].sum())
    if weight == 1.0 or rest <= TINY:  # as in TreeBlock: the root is never rejected
        rejected, rest = 0.0, 1.0
    found[node] += arrived * (1 - rejected / rest)
    return arrived * rejected / rest
