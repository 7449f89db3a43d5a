"""Block verification: one joint decision over the drafts of a path, instead of one decision a node.

Drafts x_1 .. x_L, each drawn from q_i(. | prefix), target p_i(. | prefix), prefix = x_1 .. x_{i-1}:

    w_0 = 1,                             w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))
    S_i = sum_x (w_i p_{i+1}(x) - q_{i+1}(x))+
    h_L = w_L,                           h_i = S_i / (S_i + 1 - w_i)   for i < L
    tau = the largest i with u_i <= h_i  (independent uniforms; 0 if there is none)
    then a token from p_{L+1} if tau = L, else from norm((w_tau p_{tau+1} - q_{tau+1})+)

Why it is exact. (1) P(tau >= i | x_1 .. x_i) = w_i. True for i = L. If it is for i + 1, then the chance to keep more,
a = P(tau > i | x_1 .. x_i) = sum_x q min(1, w_i p / q) = sum_x min(q, w_i p) = w_i - S_i, and P(tau >= i | x_1 .. x_i)
= a + (1 - a) h_i = w_i, because 1 - a = S_i + 1 - w_i. (2) On the event {the first i drafts are y, tau >= i}, which has
probability Q(y) w_i, the text after y has the target's law. True for i = L. For i < L the next token is z either from
the residual, with measure Q(y) (w_i p(z) - q(z))+, or as a kept draft, with measure Q(y) q(z) w_{i+1} = Q(y) min(q(z),
w_i p(z)); both go on with the target's law, the second by induction, and they add up to Q(y) w_i p(z). At i = 0 this
says that the text has the target's law.

The expected number of tokens a step is 1 + sum_i E[w_i]. One node at a time it is 1 + sum_i E[prod_{j <= i} min(1,
p_j / q_j)], and w_i is never less than that product.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.laws import IID, Law
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree
from foretoken.core.verifier import LawFamily
from foretoken.core.walk import draw, walk
from foretoken.verify.rejection import is_single, recursive_row
from foretoken.verify.rejection_acceptance import rrs_acceptance
from foretoken.verify.rejection_fast import TINY


@dataclass(frozen=True)
class Block:
    """Keep the longest prefix of a chain that its weight w allows: on average no fewer tokens than node by node.

    w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)); tau = the largest i with u_i <= h_i. Sun et al. 2024, Algorithm 2; proof
    and formulas at the head of this file. Law: one draw from q at every node, that is a chain. Optimal among the rules
    for a chain. O(v) a node, and every node's p, where the node-by-node walk stops at the first rejection. For a single
    draft, and called as a rule of one node, it is the standard rule.
    """

    name: str = "block"
    laws: tuple[LawFamily, ...] = (IID,)

    def accepts(self, law: Law) -> bool:
        return is_single(law)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        assert siblings.q is not None
        return recursive_row(p, siblings.q, siblings.draws, without_replacement=False)

    def acceptance(self, p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: Law) -> Float[Tensor, " m"]:
        """Of one node by itself, that is of a chain of one draft: sum min(p, q)."""
        return rrs_acceptance(p, q, law)

    def walk(
        self, tree: TokenTree, probabilities: Callable[[int], Float[Tensor, " v"]], rng: torch.Generator
    ) -> tuple[tuple[int, ...], int]:
        """The accepted path and the token after it, as core.walk. Children without q are matched exactly there."""
        root = tree.siblings[0]
        if root is None or root.q is None:
            return walk(tree, probabilities, self, rng)
        path, weights, excesses = [0], [1.0], []
        while (siblings := tree.siblings[path[-1]]) is not None and siblings.q is not None and siblings.draws:
            (token,) = siblings.draws
            p, q = _normalised(probabilities(path[-1])), _normalised(siblings.q)
            excesses.append((weights[-1] * p - q).clamp_(min=0))
            weights.append(min(1.0, weights[-1] * float(p[token] / q[token])))
            child = tree.child(path[-1], token)
            assert child is not None
            path.append(child)
        last = len(path) - 1
        tau = last
        while tau > 0 and not _coin(_keep(weights[tau], None if tau == last else excesses[tau]), rng):
            tau -= 1
        row = probabilities(path[tau]) if tau == last or _empty(excesses[tau]) else excesses[tau]
        return tuple(path[: tau + 1]), draw(row, rng)


def _normalised(row: Float[Tensor, " v"]) -> Float[Tensor, " v"]:
    row = row.double()
    return row / row.sum()


def _keep(w: float, excess: Float[Tensor, " v"] | None) -> float:
    """h_i."""
    if excess is None:
        return w
    s = float(excess.sum())
    # p == q and w = 1: the next draft has weight 1 too, and is kept for certain.
    return s / (s + 1 - w) if s + 1 - w > TINY else 1.0


def _empty(excess: Float[Tensor, " v"]) -> bool:
    """p == q leaves no residual; tau stops there with probability 0 up to rounding, and p serves."""
    return float(excess.sum()) <= TINY


def _coin(chance: float, rng: torch.Generator) -> bool:
    return draw(torch.tensor([1 - chance, chance], dtype=torch.float64), rng) == 1
