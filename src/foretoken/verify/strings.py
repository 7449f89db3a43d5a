"""String rejection, the rule of SLRS: the standard rule with draft probabilities that are computed one by one.

    accept the draft token t with probability   min(1, p(t) / psi(t))
    else draw from                              norm((p - psi)+)

psi(t) is the exact probability that the first target token of a drafted string is t. Its whole vector is not known, so
the residual norm((p - psi)+) is drawn by rejection from p instead: draw t with weight w(t), at first p(t); keep it with
probability (p(t) - psi(t))+ / w(t), else lower w(t) to (p(t) - psi(t))+ and draw again. Given that a draw is kept, its
law is the residual whatever w is, since w(t) times the chance to be kept is (p(t) - psi(t))+. No psi is computed twice.

Expected number of new psi at a node: P(rejected) / P(a draw from p is kept) = 1 at most, since both are the mass of
(p - psi)+ (where psi sums to 1, and without lowering w).

Source: Timor et al. 2025, Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies, arXiv:2502.05202, Algorithm 3 and Theorem 3.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import DraftError
from foretoken.core.laws import Law, Opaque
from foretoken.core.random import Random
from foretoken.core.shapes import Float
from foretoken.core.tree import PricedSiblings, Siblings, TokenTree
from foretoken.core.verifier import LawFamily
from foretoken.core.walk import Probabilities, draw
from foretoken.verify.rule import TINY


@dataclass(frozen=True)
class StringRejection:
    """The standard rule for a drafter that prices its own draw token by token (`PricedSiblings`).

    Proof: docs/theory.md, Theorem 18. Law: opaque; children without a psi are matched exactly, row = p. Accepts with
    probability sum min(p, psi). Cost: psi of the draft token, and of one more at most on average; O(v) per draw.
    """

    name: str = "string-rejection"
    laws: tuple[LawFamily, ...] = (Opaque,)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, Opaque)

    def __call__(self, p: Float[Tensor, " v"], siblings: Siblings) -> Float[Tensor, " v"]:
        return p

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: Random) -> tuple[tuple[int, ...], int]:
        """Walk as `core.walk.walk` does, but decide by `emit` at nodes whose siblings are priced.

        Raises DraftError, with the path accepted so far, where psi could not be computed.
        """
        path = [0]
        while True:
            siblings = tree.siblings[path[-1]]
            p = probabilities(range(path[-1], path[-1] + 1))[0]
            try:
                token = emit(p, siblings, rng) if isinstance(siblings, PricedSiblings) else draw(p, rng)
            except DraftError as error:
                raise DraftError(tuple(path)) from error.__cause__
            child = tree.child(path[-1], token)
            if child is None:
                return tuple(path), token
            path.append(child)


def emit(p: Float[Tensor, " v"], siblings: PricedSiblings, rng: Random) -> int:
    """Draw the token after one node and return its id: the draft token, or one from the residual.

    p: the target's distribution after the node, of any positive sum [v].
    siblings: the draft token, or none, and psi.
    rng: the sequence's source of randomness.

    Raises DraftError where psi could not be computed.
    """
    left = p.double() / p.double().sum()
    known = set(siblings.draws)
    for token in siblings.draws:
        mass, psi = float(left[token]), _psi(siblings, token)
        if mass >= psi or _coin(mass / psi, rng):
            return token
        left[token] = 0.0  # p < psi, else it had been accepted
    while float(left.sum()) > TINY:
        token = draw(left, rng)
        mass = float(left[token])
        if token in known:
            return token
        known.add(token)
        kept = max(0.0, mass - _psi(siblings, token))
        if kept == mass or _coin(kept / mass, rng):
            return token
        left[token] = kept
    return draw(p, rng)  # p == psi leaves no residual; it is reached with probability 0 up to rounding


def _psi(siblings: PricedSiblings, token: int) -> float:
    try:
        return siblings.psi(token)
    except Exception as error:
        raise DraftError from error  # `walk` catches it and raises it again with the path


def _coin(chance: float, rng: Random) -> bool:
    return draw(torch.tensor([1 - chance, chance], dtype=torch.float64), rng) == 1
