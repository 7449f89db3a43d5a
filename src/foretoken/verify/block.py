"""Block verification: one joint decision over the drafts of a path, instead of one decision a node.

Drafts x_1 .. x_L, each drawn from q_i(. | prefix), target p_i(. | prefix), prefix = x_1 .. x_{i-1}:

    w_0 = 1,                             w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))
    S_i = sum_x (w_i p_{i+1}(x) - q_{i+1}(x))+
    h_L = w_L,                           h_i = S_i / (S_i + 1 - w_i)   for i < L
    tau = the largest i with u_i <= h_i  (independent uniforms; 0 if there is none):
    P(tau = i | drafts) = h_i prod_{j > i} (1 - h_j), with h_0 = 1, which takes one uniform to draw
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

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.laws import IID, Law, draw_iid
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree
from foretoken.core.verifier import LawFamily
from foretoken.core.walk import Probabilities, walk
from foretoken.verify.block_fast import fast_decision
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

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: torch.Generator) -> tuple[tuple[int, ...], int]:
        """The accepted path and the token after it, as core.walk. Children without q are matched exactly there."""
        rows = []
        for siblings in tree.siblings:  # every node has one child at most, so nodes stand in the order of the chain
            if siblings is None or siblings.q is None or not siblings.draws:
                break
            rows.append(siblings.q)
        if not rows:
            return walk(tree, probabilities, self, rng)
        p, q, drafts = probabilities(range(len(rows) + 1)), torch.stack(rows), tree.tokens[1 : len(rows) + 1]
        u = torch.rand(2, generator=rng, dtype=torch.float64)
        kept, token = fast_decision(p, q, drafts, u) or plain_decision(p, q, drafts, u)
        return tuple(range(kept + 1)), token


def plain_decision(
    p: Float[Tensor, "l1 v"], q: Float[Tensor, "l v"], drafts: tuple[int, ...], u: Float[Tensor, " 2"]
) -> tuple[int, int]:
    """(tau, the token after the first tau drafts): tau drawn by u[0], the token by u[1]. l1 = l + 1 rows of p."""
    p, q = _normalised(p), _normalised(q)
    x = torch.tensor(drafts, device=p.device)[:, None]
    w = [1.0]
    for ratio in (p[:-1].gather(1, x) / q.gather(1, x))[:, 0].tolist():
        w.append(min(1.0, w[-1] * ratio))
    excess = (torch.tensor(w[:-1], dtype=p.dtype, device=p.device)[:, None] * p[:-1] - q).clamp_(min=0)
    left = excess.sum(-1).tolist()
    keep = [1.0, *(_keep(w[i], left[i]) for i in range(1, len(drafts))), w[-1]]
    chances = [1.0] * len(keep)
    for i in reversed(range(len(keep))):
        chances[i] = keep[i] * chances[i]
        chances[:i] = [c * (1 - keep[i]) for c in chances[:i]]
    tau = int(draw_iid(torch.tensor([chances], dtype=torch.float64), u[None, :1]))
    # p == q leaves no residual; tau stops there with probability 0 up to rounding, and p serves.
    row = excess[tau] if tau < len(drafts) and left[tau] > TINY else p[tau]
    return tau, int(draw_iid(row[None], u[None, 1:]))


def _normalised(rows: Float[Tensor, "m v"]) -> Float[Tensor, "m v"]:
    rows = rows.double()
    return rows / rows.sum(-1, keepdim=True)


def _keep(w: float, excess: float) -> float:
    """h_i of a draft that is not the last."""
    # p == q and w = 1: the next draft has weight 1 too, and is kept for certain.
    return excess / (excess + 1 - w) if excess + 1 - w > TINY else 1.0
