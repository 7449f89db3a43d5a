"""Block verification of whole trees: one joint decision over all paths, built from any rule for one node.

`visit(node, w)` accepts the node with probability w and then emits the text that follows it, or rejects it. With p the
target's distribution after the node and row = rule(p', siblings) the node rule's answer to

    p' = (w p, 1 - w),      q' = (q, 0):        one more token, "rejected", which is never drafted,

visit the children x_1, x_2, .. in draw order, each with

    w_j = row(x_j) / (1 - row(x_1) - .. - row(x_{j-1})),

and stop at the first that accepts. If none does, draw from the row without the children: "rejected" rejects the node,
any other token ends the path there. A leaf has row = p'. The root is visited with w = 1, so it is never rejected.

Why it is exact. Let F_l be all that was drawn down to level l, anywhere in the tree. Laws of level l + 1 are chosen
from F_l, and given F_l the draws below different nodes are independent. Claim: given F_l, visits to the nodes of level
l, with weights that F_l determines, are independent of each other; each accepts with probability its w, and given that
it does, the text that it emits has the target's law after the node. At the deepest level there are leaves only: by
definition. For others, given F_{l+1}, child j is visited when those before it rejected, so it is the one to accept with
probability row(x_j), by the claim one level down; what else comes out has its probability from the row. So the next
token, "rejected" among them, has law row, which depends on the node's own draws alone: given F_l, nodes are
independent. Averaged over the draws the row is p', since the rule is lossless: "rejected" has probability 1 - w, and y
comes out with probability w p(y), with the target's law after it. At the root w = 1: the text has the target's law.

On a chain with the standard rule this is the block verification of Sun et al. 2024 (block.py), w_i = min(1, w_{i-1} p_i
/ q_i). With the optimum for i.i.d. draws at each node (transport) it is, to our knowledge, new.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.laws import IID, Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.core.walk import Probabilities, draw, walk
from foretoken.verify.block import Block
from foretoken.verify.rejection import RRSw, is_single, recursive_row
from foretoken.verify.rejection_fast import TINY
from foretoken.verify.transport.exact import Transport
from foretoken.verify.tree_block_fast import fast_end, fast_share, serves

After = Callable[[int], Float[Tensor, " v"]]  # p after a node; asked for once, where the node is visited
Outcome = tuple[tuple[int, ...], int] | None  # the path from a node down and the token after it; None: rejected
BLOCK = Block()


@dataclass(frozen=True)
class TreeBlock:
    """Accept the longest path that its weights allow, the weights of siblings given by `rule`.

    w_j = row(x_j) / (1 - what the siblings before took), row = rule((w p, 1 - w)); proof and formulas at the head of
    this file. Law: as `rule`. Cost: the rule's at every node visited, up to the whole tree, where the node-by-node walk
    stops at the first rejection. Called as a rule of one node it is `rule`.
    """

    name: str
    rule: Verifier

    @property
    def laws(self) -> tuple[LawFamily, ...]:
        return self.rule.laws

    def accepts(self, law: Law) -> bool:
        return self.rule.accepts(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        return self.rule(p, siblings)

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: torch.Generator) -> tuple[tuple[int, ...], int]:
        """The accepted path and the token after it, as core.walk. Children without q are matched exactly there."""
        root = tree.siblings[0]
        if root is None or root.q is None:
            return walk(tree, probabilities, self.rule, rng)
        if is_chain(tree):  # of the same law, in one compiled pass
            return BLOCK.walk(tree, probabilities, rng)
        outcome = self._visit(tree, 0, 1.0, lambda node: probabilities(range(node, node + 1))[0], rng)
        assert outcome is not None
        return outcome

    def _visit(self, tree: TokenTree, node: int, weight: float, after: After, rng: torch.Generator) -> Outcome:
        siblings, p = tree.siblings[node], after(node)
        if siblings is not None and siblings.law.k == 0:
            siblings = None
        assert siblings is None or siblings.q is not None
        single = siblings is None or is_one_draw(siblings)
        q = None if siblings is None else siblings.q
        if single and serves(p, q):
            return self._visit_single(tree, node, weight, p, q, after, rng)
        row = self.law(p, siblings, weight)
        if siblings is not None:
            left = 1.0
            for token in dict.fromkeys(siblings.draws):
                share = float(row[token])
                if share > 0:
                    child = tree.child(node, token)
                    assert child is not None
                    outcome = self._visit(tree, child, min(1.0, share / left), after, rng)
                    if outcome is not None:
                        return (node, *outcome[0]), outcome[1]
                    left = max(left - share, TINY)
            row = row.index_fill(0, torch.tensor(siblings.draws, dtype=torch.long, device=row.device), 0.0)
            if float(row.sum()) <= TINY:  # the children took all; this is reached with probability 0 up to rounding
                row = torch.cat([p.double(), row.new_zeros(1)])
        if weight == 1.0:  # what rounding left there must not reject the root
            row[-1] = 0.0
        token = draw(row, rng)
        return None if token == len(p) else ((node,), token)

    def _visit_single(
        self,
        tree: TokenTree,
        node: int,
        weight: float,
        p: Float[Tensor, " v"],
        q: Float[Tensor, " v"] | None,
        after: After,
        rng: torch.Generator,
    ) -> Outcome:
        """The same at a node of at most one draw."""
        if q is not None:
            siblings = tree.siblings[node]
            assert siblings is not None
            (token,) = siblings.draws
            child = tree.child(node, token)
            assert child is not None
            share = fast_share(p, q, token, weight)
            outcome = self._visit(tree, child, share, after, rng) if share > 0 else None
            if outcome is not None:
                return (node, *outcome[0]), outcome[1]
        u = float(torch.rand(1, 1, generator=rng, dtype=torch.float64))  # as `draw` takes it
        token = fast_end(p, q, weight, u)
        return None if token == len(p) else ((node,), token)

    def law(self, p: Float[Tensor, " v"], siblings: Siblings | None, weight: float) -> Float[Tensor, " v1"]:
        """[v + 1]: the law of the token after a node that is visited with `weight`, given its children; the last entry
        is that of rejecting the node."""
        p = p.double()
        row = torch.cat([p * (weight / p.sum()), p.new_tensor([1 - weight])])
        if siblings is None:
            return row
        assert siblings.q is not None
        q = torch.cat([siblings.q.double(), row.new_zeros(1)])
        if is_one_draw(siblings):
            return recursive_row(row, q, siblings.draws, without_replacement=False)
        return self.rule(row, Siblings(siblings.draws, q, siblings.law))


def block_transport() -> TreeBlock:
    return TreeBlock("block-transport", Transport())


def block_rrsw() -> TreeBlock:
    return TreeBlock("block-rrsw", RRSw())


def is_one_draw(siblings: Siblings) -> bool:
    """Whether one token was drawn, and no other number could have been: then every rule may be the standard one."""
    certain = not isinstance(siblings.law, IID) or siblings.law.counts is None
    return is_single(siblings.law) and certain and len(siblings.draws) == 1


def is_chain(tree: TokenTree) -> bool:
    """Whether every node but the last has one child, and could have had no other number of draws."""
    *inner, last = tree.siblings
    return last is None and all(siblings is not None and is_one_draw(siblings) for siblings in inner)
