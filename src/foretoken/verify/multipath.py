"""Greedy multi-path block verification (GBV): one of K i.i.d. paths is chosen, and block verification decides over it.

**The choice.** The tokens after a node are ordered by falling p/q, the lower id first among equals, whether they were
drawn or not. This orders paths as letters order words: of two paths that part at a node, the one with the earlier token
there is the earlier. The earliest of the K paths is chosen. Its tokens have another law than q. Let T(x) be the q-mass
of the tokens before x, and beta the probability that a path leads through a node, given that it leads through it or is
later in the order. At the root beta = 1. Given that the chosen path leads through the node, each of the K paths leads
through it or is later, and one at least leads through it. So the chosen path's next token is x with probability
proportional to

    q~(x)  ~  (1 - beta T(x))^K - (1 - beta T(x) - beta q(x))^K  =  beta q(x) sum over i + j = K - 1 of a^i b^j

with a = 1 - beta T(x), b = a - beta q(x). In the sum no term is negative. After it beta is beta q(x) / a. For K = 1,
q~ = q.

**Why it is exact.** The order depends on p and q after the node alone, never on a draw. So the chosen path is a chain
whose every token was drawn from q~ given those before it, and block verification is exact for it (block.py). That needs
one strict order, used for the choice and for q~ alike. Where tokens of equal p/q are ordered in one way for the choice
and in another for q~, the law is off: see docs/papers.md.

**Other trees.** Where every node has draws of its own, independent of how its parent's draws fell (kary and the like),
the draw that is earliest in the order is followed at each node; of m draws it has law q~ with beta = 1 and K = m,
given all that was drawn above. So a token of the chosen path has, given the tokens before it and what else was drawn
above it, a known law, and the proof in block.py allows laws that are chosen from all that was drawn above.

What is emitted after the accepted tokens is never looked up in the tree: other paths serve for the choice alone.

Source: Thomas and Pal 2026, Greedy Multi-Path Block Verification for Faster Decoding in Speculative Sampling,
arXiv:2602.16961, with p/q not cut at 1, which leaves ties.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.laws import Paths
from foretoken.core.random import Random
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree
from foretoken.core.walk import Probabilities, walk
from foretoken.verify.block import BLOCK, decide, is_chain
from foretoken.verify.rejection import recursive_row
from foretoken.verify.rule import Rule


@dataclass(frozen=True)
class GreedyMultipath(Rule):
    """Choose one path of a tree by falling p/q, and accept the prefix of it that block verification keeps.

    Law: i.i.d. draws; made for i.i.d. paths, `delayed:D+KxL`. Cost: O(v log v + k v) per node of the chosen path.
    Called as a rule of one node it takes the draw with the largest p/q, and decides over it by the standard rule with
    the law q~ of that draw in place of q.
    """

    name: str = "gbv"

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        if not siblings.draws:
            return p
        token, law, _ = choose(p, siblings.q, siblings.draws, len(siblings.draws), 1.0)
        return recursive_row(p, law.to(p), (token,), without_replacement=False)

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: Random) -> tuple[tuple[int, ...], int]:
        """Choose a path and decide over it; if the root has no draws with a q, walk as `core.walk.walk`."""
        root = tree.siblings[0]
        if root is None or root.q is None or not root.draws:
            return walk(tree, probabilities, self, rng)
        if is_chain(tree):  # there is one path, and `block` reads p at all nodes by one call
            return BLOCK.walk(tree, probabilities, rng)
        path, p, laws = self.chosen(tree, probabilities)
        drafts = tuple(tree.tokens[node] for node in path[1:])
        kept, token = decide(p, laws, drafts, rng.uniforms(1, 2))
        return path[: kept + 1], token

    def chosen(
        self, tree: TokenTree, probabilities: Probabilities
    ) -> tuple[tuple[int, ...], Float[Tensor, "l1 v"], Float[Tensor, "l v"]]:
        """Choose a path of l draft tokens, down to the first node without draws or q.

        tree: a tree whose root has draws and a q.
        probabilities: gives p after each node of a range, [m, v].

        Returns the nodes of the path, the root first [l + 1], p after each of them, float64 [l + 1, v], and the law q~
        of each draft token, float64 [l, v].
        """
        path, p, laws = [0], [probabilities(range(1))[0]], []
        k, beta, among_paths = 0, 1.0, False
        while (siblings := tree.siblings[path[-1]]) is not None and siblings.draws and siblings.q is not None:
            if not among_paths:
                k, beta = len(siblings.draws), 1.0
            token, law, beta = choose(p[-1], siblings.q, siblings.draws, k, beta)
            among_paths = isinstance(siblings.law, Paths)
            child = tree.child(path[-1], token)
            assert child is not None
            path.append(child)
            laws.append(law)
            p.append(probabilities(range(child, child + 1))[0])
        return tuple(path), torch.stack(p).double(), torch.stack(laws)


def choose(
    p: Float[Tensor, " v"], q: Float[Tensor, " v"], draws: tuple[int, ...], k: int, beta: float
) -> tuple[int, Float[Tensor, " v"], float]:
    """Choose the draw of a node that is the earliest in the order of falling p/q.

    p, q: target and draft probabilities after the node, of any positive sum [v].
    draws: token ids, one at least.
    k: the number of paths among which the choice is made, here and above.
    beta: the probability that one of them leads through the node, given that it does or is later in the order.

    Returns its id, the distribution q~ that it was drawn from, float64 [v], and beta at the child with this id.
    """
    p, q = p.double(), q.double()
    q = q / q.sum()
    order = torch.where(q > 0, p / q, -1.0).argsort(descending=True, stable=True)
    ordered = q[order]
    behind = ordered.flip(0).cumsum(0).flip(0)  # q-mass of x and of the later tokens: 1 - T(x), but nothing cancels
    a = 1 - beta + beta * behind
    b = 1 - beta + beta * torch.cat([behind[1:], behind.new_zeros(1)])
    total, power = torch.ones_like(b), torch.ones_like(b)
    for _ in range(k - 1):
        power = power * b
        total = total * a + power
    law = torch.empty_like(q).scatter_(0, order, ordered * total)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(q), device=q.device))
    drawn = places[torch.tensor(draws, device=q.device)].tolist()
    first = min(drawn)
    token = draws[drawn.index(first)]
    return token, law / law.sum(), beta * float(q[token]) / float(a[first])
