"""The part of a drafted tree that constraints such as a grammar allow: forbidden draft tokens are not scored.

The constraints and the text before a node decide which nodes are left out, never p or q. Children of opaque law are
matched exactly, so that any of them may be left out and the text's distribution stays the same. A priced draw that is
forbidden would be rejected with certainty, since p is 0 there; to leave it out has the same effect. Children that were
sampled from a recorded q all stay: that q was made by the same sampling and is 0 where a constraint forbids.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

from foretoken.core.laws import Opaque
from foretoken.core.sampling import Constraint
from foretoken.core.sequence import Sequence
from foretoken.core.tree import PricedSiblings, Siblings, TokenTree


def permitted(sequence: Sequence, tree: TokenTree) -> tuple[TokenTree, Seq[int]]:
    """Return the part of a drafted tree that is allowed, and for each of its nodes the index in the drafted tree.

    sequence: the text, whose sampling has the constraints.
    tree: the drafted tree.
    """
    constraints = sequence.sampling.constraints
    if not constraints or len(tree) == 1:
        return tree, range(len(tree))
    places = {0: 0}  # node of the drafted tree -> node of its allowed part
    for node in range(1, len(tree)):
        if tree.parents[node] in places and _allowed(constraints, sequence, tree, node):
            places[node] = len(places)
    kept = list(places)
    if len(kept) == len(tree):
        return tree, kept
    parents = [-1, *(places[tree.parents[node]] for node in kept[1:])]
    tokens = [tree.tokens[node] for node in kept]
    children = set(zip(parents, tokens, strict=True))
    records = [_record(tree.siblings[node], place, children) for place, node in enumerate(kept)]
    return TokenTree(tuple(tokens), tuple(parents), tuple(records)), kept


def _allowed(constraints: Seq[Constraint], sequence: Sequence, tree: TokenTree, node: int) -> bool:
    """Whether the constraints allow the node; one that was sampled from a recorded q always stays."""
    record = tree.siblings[tree.parents[node]]
    if record is not None and record.q is not None:
        return True
    path = tree.path_to(node)
    before = sequence.ids + [tree.tokens[above] for above in path[1:-1]]
    return all(constraint.allows(before, tree.tokens[node]) for constraint in constraints)


def _record(siblings: Siblings | None, node: int, children: set[tuple[int, int]]) -> Siblings | None:
    """Return the record of a kept node's children without the draws that were left out.

    siblings: the record in the drafted tree. node: the parent's index in the allowed part. children: (parent, token) of
    all nodes of the allowed part.
    """
    if siblings is None or siblings.q is not None:
        return siblings
    draws = tuple(token for token in siblings.draws if (node, token) in children)
    if isinstance(siblings, PricedSiblings):
        return replace(siblings, draws=draws)
    return Siblings(draws, None, Opaque(len(draws))) if draws else None
