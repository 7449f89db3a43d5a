"""Block verification: one joint decision over all the draft tokens of a chain or tree, instead of one per node.

A chain. The draft tokens are x_1 .. x_L. x_i was drawn from the drafter's q_i(. | x_1 .. x_{i-1}); the target's
distribution there is p_i(. | x_1 .. x_{i-1}). tau is the number of accepted draft tokens, and w_i the weight of x_i:

    w_0 = 1,                             w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))
    S_i = sum_x (w_i p_{i+1}(x) - q_{i+1}(x))+
    h_L = w_L,                           h_i = S_i / (S_i + 1 - w_i)   for i < L
    tau = the largest i with u_i <= h_i  (independent uniforms; 0 if there is none):
    P(tau = i | drafts) = h_i prod_{j > i} (1 - h_j), with h_0 = 1, which takes one uniform to draw
    then a token from p_{L+1} if tau = L, else from norm((w_tau p_{tau+1} - q_{tau+1})+)

Why it is exact. (1) P(tau >= i | x_1 .. x_i) = w_i. True for i = L. If it is for i + 1, then the chance to keep more,
a = P(tau > i | x_1 .. x_i) = sum_x q min(1, w_i p / q) = sum_x min(q, w_i p) = w_i - S_i, and P(tau >= i | x_1 .. x_i)
= a + (1 - a) h_i = w_i, because 1 - a = S_i + 1 - w_i. (2) On the event {the first i draft tokens are y, tau >= i},
which has probability Q(y) w_i, the text after y has the target's law. True for i = L. For i < L the next token is z
either from the residual, with measure Q(y) (w_i p(z) - q(z))+, or as a kept draft token, with measure
Q(y) q(z) w_{i+1} = Q(y) min(q(z), w_i p(z)); both go on with the target's law, the second by induction, and they add up
to Q(y) w_i p(z). At i = 0 this says that the text has the target's law.

The expected number of tokens per step is 1 + sum_i E[w_i]. One node at a time it is 1 + sum_i E[prod_{j <= i} min(1,
p_j / q_j)], and w_i is never less than that product.

A tree, with any rule for one node. To *visit* a node with weight w is to accept it with probability w and then emit
the text that follows it, or else to reject it. Let p be the target's distribution after the node, q the drafter's, and
row = rule(p', siblings) the rule's answer to

    p' = (w p, 1 - w),      q' = (q, 0):        one more token, "rejected", which is never drafted,

visit the children x_1, x_2, .. in draw order, each with

    w_j = row(x_j) / (1 - row(x_1) - .. - row(x_{j-1})),

and stop at the first that is accepted. If none is, draw from the row without the children: "rejected" rejects the
node, any other token ends the path there. A leaf has row = p'. The root has w = 1, so it is never rejected.

Why it is exact. Let F_l be all that was drawn down to level l, anywhere in the tree. Laws of level l + 1 are chosen
from F_l, and given F_l the draws below different nodes are independent. Claim: given F_l, visits to the nodes of level
l, with weights that F_l determines, are independent of each other; each accepts its node with probability w, and given
that it does, the text that it emits has the target's law after the node. At the deepest level there are leaves only,
for which this holds by definition. For other nodes, given F_{l+1}, child j is visited when those before it were
rejected, so it is the accepted one with probability row(x_j), by the claim one level down; what else comes out has its
probability from the row. So the next token, "rejected" among them, has law row, which depends on the node's own draws
alone: given F_l, nodes are independent. Averaged over the draws the row is p', since the rule is lossless: "rejected"
has probability 1 - w, and y comes out with probability w p(y), with the target's law after it. At the root w = 1: the
text has the target's law.

With the standard rule this is, on a chain, the decision above. With rrsw it is traversal verification, which goes from
leaf to root and, when it rejects child x of a node of weight w, goes on with

    S = sum (w p - q)+,     w' = S / (S + 1 - w),     p' = norm((w p - q)+),     q' = norm(q with x set to 0)

in place of w, p, q: rrsw on (w p, 1 - w) and (q, 0) has the residual ((w p - q)+, 1 - w) / (S + 1 - w), which is
(w' p', 1 - w'), after x, so the next child's w_j is min(1, w' p' / q') of its token, and the node itself is accepted
with w' when no child is left. tests/test_verify_traversal.py compares the two. With the optimum for one node
(transport) it composes plans of optimal transport under the weight of the path, which is how the abstract of UniVer
describes that rule.

Sources: Sun et al. 2024, Block Verification Accelerates Speculative Decoding, arXiv:2403.10444, Algorithm 2 (the
chain). Weng et al. 2025, Traversal Verification, arXiv:2505.12398. Weng et al. 2026, UniVer, arXiv:2605.04543.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from foretoken.core.draws import draw_iid
from foretoken.core.laws import Law
from foretoken.core.random import Random, Uniforms
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.core.walk import Probabilities, draw, walk
from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import pick, total_of
from foretoken.verify.exact_transport import Transport
from foretoken.verify.pairwise import Pairwise
from foretoken.verify.rejection import RRSw, Standard, recursive_row
from foretoken.verify.rule import TINY, is_one_draw, loops_take

Visit = Iterator[tuple[int, float] | int]  # what `TreeBlock._visit` yields


@dataclass(frozen=True)
class Block(Standard):
    """Keep the longest prefix of a chain that its weight w allows: on average no fewer tokens than node by node.

    Law: one draw from q at every node, that is a chain. Optimal among the rules after which the text that follows an
    accepted path has the target's law (docs/theory.md, Theorem 10). Cost: O(v) per node, and p at every node of the
    chain, where the node-by-node walk stops at the first rejection. For a single draft token, and called as a rule of
    one node, it is the standard rule.
    """

    name: str = "block"

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: Random) -> tuple[tuple[int, ...], int]:
        """Decide over the draft tokens above the first one without a q; if there are none, walk as `core.walk.walk`."""
        rows = []
        for siblings in tree.siblings:  # every node has one child at most, so nodes stand in the order of the chain
            if siblings is None or siblings.q is None or not siblings.draws:
                break
            rows.append(siblings.q)
        if not rows:
            return walk(tree, probabilities, self, rng)
        p, q, drafts = probabilities(range(len(rows) + 1)), torch.stack(rows), tree.tokens[1 : len(rows) + 1]
        kept, token = decide(p, q, drafts, rng.uniforms(1, 2))
        return tuple(range(kept + 1)), token


BLOCK = Block()


def decide(p: Float[Tensor, "l1 v"], q: Float[Tensor, "l v"], drafts: tuple[int, ...], u: Uniforms) -> tuple[int, int]:
    """Draw (tau, the token after the first tau draft tokens), by the compiled loop where p and q are in CPU memory.

    p: target probabilities after the root and after each draft token, of any positive sum [l + 1, v].
    q: probabilities that each draft token was drawn from, of any positive sum [l, v].
    drafts: the ids of the draft tokens, from the root down [l].
    u: uniforms in [0, 1), the first for tau, the second for the token [1, 2].
    """
    if not (isinstance(u, Tensor) and loops_take(p, q)):
        return plain_decision(p, q, drafts, u)
    arrays = p.detach().numpy(), q.detach().numpy(), np.array(drafts), u[0].numpy()
    return decide_compiled(*arrays)


def plain_decision(
    p: Float[Tensor, "l1 v"], q: Float[Tensor, "l v"], drafts: tuple[int, ...], u: Uniforms
) -> tuple[int, int]:
    """Compute `decide` by torch, in float64, on any device; p, q, drafts, u: as there."""
    p, q = (rows.double() / rows.double().sum(-1, keepdim=True) for rows in (p, q))
    chances, excess, left = decision(p, q, drafts)
    tau = int(draw_iid(torch.tensor([chances], dtype=torch.float64), u[:, :1]))
    # p == q leaves no residual; tau stops there with probability 0 up to rounding, and p serves.
    row = excess[tau] if tau < len(drafts) and left[tau] > TINY else p[tau]
    return tau, int(draw_iid(row[None], u[:, 1:]))


def decision(
    p: Float[Tensor, "l1 v"], q: Float[Tensor, "l v"], drafts: tuple[int, ...]
) -> tuple[list[float], Float[Tensor, "l v"], list[float]]:
    """Return P(tau = i) for i <= l, and for i < l the measures (w_i p_{i+1} - q_{i+1})+ and their sums S_i.

    p, q, drafts: as in `decide`; p and q are float64 and normalised.
    """
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
    return chances, excess, left


def _keep(w: float, excess: float) -> float:
    """Return h_i of a draft token that is not the last, from w_i and S_i."""
    # p == q and w = 1: the next draft token has weight 1 too, and is kept for certain.
    return excess / (excess + 1 - w) if excess + 1 - w > TINY else 1.0


@partial(compiled, reorder_sums=True)
def decide_compiled(p: np.ndarray, q: np.ndarray, drafts: np.ndarray, u: np.ndarray) -> tuple[int, int]:
    """Return (tau, token) of `decide`.

    p: target probabilities [l + 1, v], float32 or float64, of any positive sum.
    q: draft probabilities [l, v], of p's dtype and any positive sum.
    drafts: the ids of the draft tokens [l], int64.
    u: uniforms in [0, 1) [2], float64.
    """
    length, v = q.shape
    w, keep = np.ones(length + 1), np.ones(length + 1)
    sums_p, sums_q = np.empty(length), np.empty(length)
    for i in range(length):
        a, b = total_of(p[i]), total_of(q[i])
        sums_p[i], sums_q[i] = a, b
        ratio = (p[i, drafts[i]] / a) / (q[i, drafts[i]] / b)
        w[i + 1] = min(1.0, w[i] * ratio)
        if i > 0:
            scale, share, excess = w[i] / a, 1.0 / b, 0.0
            for x in range(v):
                excess += max(np.float64(p[i, x]) * scale - np.float64(q[i, x]) * share, 0.0)
            # As in `_keep`.
            keep[i] = excess / (excess + 1 - w[i]) if excess + 1 - w[i] > TINY else 1.0
    keep[length] = w[length]
    # P(tau = i) = keep[i] prod_{j > i} (1 - keep[j]); from the last, since that is the likeliest.
    chances = np.empty(length + 1)
    left = 1.0
    for i in range(length, -1, -1):
        chances[i] = keep[i] * left
        left *= 1 - keep[i]
    tau = pick(chances, u[0])
    row = np.empty(v)
    total = 0.0
    if tau < length:
        scale, share = w[tau] / sums_p[tau], 1.0 / sums_q[tau]
        for x in range(v):
            row[x] = max(np.float64(p[tau, x]) * scale - np.float64(q[tau, x]) * share, 0.0)
            total += row[x]
    if total <= TINY:
        for x in range(v):
            row[x] = np.float64(p[tau, x])
    return tau, pick(row, u[1])


@dataclass(frozen=True)
class TreeBlock:
    """Decide jointly over all paths of a tree, as at the top of this file, with `rule` as the rule for one node.

    Law: as `rule`. Cost: that of `rule` at every node visited, up to the whole tree, where the node-by-node walk stops
    at the first rejection. Called as a rule of one node it is `rule`.

    name: the name by which users choose the joint rule.
    rule: the rule for one node.
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

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: Random) -> tuple[tuple[int, ...], int]:
        """Visit the root with weight 1; if it has no children with a q, walk as `core.walk.walk`."""
        root = tree.siblings[0]
        if root is None or root.q is None:
            return walk(tree, probabilities, self.rule, rng)
        if is_chain(tree):  # `block` gives every outcome the same probability, in one compiled pass
            return BLOCK.walk(tree, probabilities, rng)

        def visit(node: int, weight: float) -> tuple[int, Visit]:
            return node, self._visit(tree, node, weight, probabilities(range(node, node + 1))[0], rng)

        path = [visit(0, 1.0)]
        while True:  # not by recursion, since a tree may be deeper than Python's stack
            found = next(path[-1][1], None)
            if found is None:
                path.pop()
            elif isinstance(found, tuple):
                path.append(visit(*found))
            else:
                return tuple(node for node, _ in path), found

    def _visit(self, tree: TokenTree, node: int, weight: float, p: Float[Tensor, " v"], rng: Random) -> Visit:
        """Accept `node` with probability `weight` and go on from it, or reject it.

        Yields (child, weight of the child) for each child to visit, and goes on once that child is rejected; then the
        token that follows the node. A node whose iterator ends without a token is rejected.

        Where a node has at most one draw, not of a random number, and p and q are in CPU memory with one dtype, `row`
        stays None. Compiled loops then compute what `law` would, and no row is written where the child is accepted.

        tree, node, weight: the node that is visited, and with which weight.
        p: target probabilities after the node [v].
        rng: the source of random numbers.
        """
        siblings = tree.siblings[node]
        if siblings is not None and siblings.law.k == 0:
            siblings = None
        q, draws = (None, ()) if siblings is None else (siblings.q, siblings.draws)
        single = siblings is None or is_one_draw(siblings)
        looped = single and rng.gives_numbers and loops_take(p, p if q is None else q)
        row = None if looped else self.law(p, siblings, weight)
        left = 1.0
        for token in dict.fromkeys(draws):
            assert q is not None
            share = share_of(p.numpy(), q.numpy(), token, weight) if row is None else float(row[token])
            if share > 0:
                child = tree.child(node, token)
                assert child is not None
                yield child, min(1.0, share / left)
                left = max(left - share, TINY)
        if row is None:
            token = _end(p, q, weight, rng)
        else:
            row = row.index_fill(0, torch.tensor(draws, dtype=torch.long, device=row.device), 0.0)
            if float(row.sum()) <= TINY:  # the children took all; this is reached with probability 0 up to rounding
                row = torch.cat([p.double(), row.new_zeros(1)])
            if weight == 1.0:  # what rounding left there must not reject the root
                row[-1] = 0.0
            token = draw(row, rng)
        if token < len(p):
            yield token

    def law(self, p: Float[Tensor, " v"], siblings: Siblings | None, weight: float) -> Float[Tensor, " v1"]:
        """Return the distribution of the token after a visited node, given its draws, float64 [v + 1].

        Its last entry is the probability that the node is rejected; without children it is (weight p, 1 - weight).

        p: target probabilities after the node, of any positive sum [v].
        siblings: the record of the node's children, with q; None for a leaf.
        weight: the weight w that the node is visited with, in [0, 1].
        """
        p = p.double()
        row = torch.cat([p * (weight / p.sum()), p.new_tensor([1 - weight])])
        if siblings is None:
            return row
        assert siblings.q is not None
        q = torch.cat([siblings.q.double(), row.new_zeros(1)])
        if is_one_draw(siblings):
            return recursive_row(row, q, siblings.draws, without_replacement=False)
        return self.rule(row, Siblings(siblings.draws, q, siblings.law))


block_transport = partial(TreeBlock, "block-transport", Transport())
block_pairwise = partial(TreeBlock, "block-pairwise", Pairwise())
traversal = partial(TreeBlock, "traversal", RRSw())


def is_chain(tree: TokenTree) -> bool:
    """Whether `tree` is one path, drawn by a law that always makes one draw at each node but the last."""
    *inner, last = tree.siblings
    return last is None and all(siblings is not None and is_one_draw(siblings) for siblings in inner)


def _end(p: Float[Tensor, " v"], q: Float[Tensor, " v"] | None, weight: float, rng: Random) -> int:
    u = rng.uniforms(1, 1)
    assert isinstance(u, Tensor)  # since `rng` gives numbers
    drafted = np.empty(0, p.numpy().dtype) if q is None else q.numpy()
    return end(p.numpy(), drafted, weight, float(u))


@partial(compiled, reorder_sums=True)
def share_of(p: np.ndarray, q: np.ndarray, token: int, weight: float) -> float:
    """Return the weight of the only child of a node, min(1, weight p(token) / q(token)).

    p: target probabilities after the node [v], float32 or float64, of any positive sum.
    q: draft probabilities [v], of p's dtype and any positive sum.
    token: the id of the child.
    weight: the weight of the node, in [0, 1].
    """
    return min(1.0, weight * (np.float64(p[token]) / total_of(p)) / (np.float64(q[token]) / total_of(q)))


@partial(compiled, reorder_sums=True)
def end(p: np.ndarray, q: np.ndarray, weight: float, u: float) -> int:
    """Draw the token after a node whose child, if it has one, was rejected; return its id, or v: the node is rejected.

    The token is drawn from ((weight p - q)+, 1 - weight) after a child, else from (weight p, 1 - weight).

    p: target probabilities after the node [v], float32 or float64, of any positive sum.
    q: draft probabilities [v], of p's dtype and any positive sum; empty [0] for a leaf.
    weight: the weight of the node, in [0, 1].
    u: a uniform in [0, 1).
    """
    v = p.shape[0]
    row = np.empty(v + 1)
    row[v] = 1 - weight
    total, scale = 1 - weight, weight / total_of(p)
    if q.shape[0] == 0:
        for x in range(v):
            row[x] = np.float64(p[x]) * scale
        return pick(row, u)
    share = 1 / total_of(q)
    for x in range(v):
        row[x] = max(np.float64(p[x]) * scale - np.float64(q[x]) * share, 0.0)
        total += row[x]
    if total <= TINY:  # the child took all; this is reached with probability 0 up to rounding
        for x in range(v):
            row[x] = np.float64(p[x])
    return pick(row, u)
