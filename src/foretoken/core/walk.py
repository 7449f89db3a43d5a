"""The target's scores of a token tree, and the walk over them that yields the emitted tokens."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.draws import draw_iid
from foretoken.core.errors import NotFiniteError
from foretoken.core.random import Random
from foretoken.core.sampling import likeliest
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.core.verifier import RowFunction

Probabilities = Callable[[range], Float[Tensor, "m v"]]  # p after each node of a range of node indices


@runtime_checkable
class NodeScores(Protocol):
    """The target's scores of the n nodes of one tree. A fast backend may compute them in any way and at any time.

    All members but `greedy` raise NotFiniteError, which names the model, where the logits they need are not finite.
    """

    @property
    def greedy(self) -> bool:
        """Whether `argmax` decides every token: at temperature 0, if sampling does not read the text before a node."""
        ...

    def argmax(self) -> list[int]:
        """Return the id of the likeliest token after each node [n]; only for scores that are `greedy`."""
        ...

    def p(self, nodes: range) -> Float[Tensor, "m v"]:
        """Return the target's distribution after each of a range of nodes [m, v]; nodes: their indices in the tree."""
        ...

    def draw(self, node: int, rng: Random) -> int:
        """Draw one token from p after `node`, by one uniform of `rng`; returns its id."""
        ...


class LogitScores:
    """The scores of one tree that are computed from logits when they are needed."""

    def __init__(self, model: str, sequence: Sequence, tree: TokenTree, logits: Float[Tensor, "n v"]) -> None:
        """Keep the logits.

        model: the target's name, for errors.
        sequence: the text that the tree continues; its sampling makes p of the logits.
        tree: the tree of n nodes.
        logits: the target's, after each node [n, v].
        """
        self._model, self._sequence, self._tree, self.logits = model, sequence, tree, logits

    @property
    def greedy(self) -> bool:
        return self._sequence.sampling.temperature == 0 and not self._sequence.sampling.reads_prefix

    def argmax(self) -> list[int]:
        try:
            return likeliest(self._sequence.scores(self.logits, ())).tolist()
        except NotFiniteError as error:
            raise explained(self._model, self.logits) from error

    # A plain annotation: one with a shape would be built anew at every call.
    def p(self, nodes: range) -> Tensor:
        rows = self.logits[nodes.start : nodes.stop]
        suffixes = ((self._tree.tokens[i] for i in self._tree.path_to(node)[1:]) for node in nodes)
        try:
            return self._sequence.probabilities(rows, suffixes)
        except NotFiniteError as error:
            raise explained(self._model, rows) from error

    def draw(self, node: int, rng: Random) -> int:
        return int(draw_iid(self.p(range(node, node + 1)), rng.uniforms(1, 1)))


class ReadyScores(LogitScores):
    """Scores at temperature > 0 whose p was computed in the same compiled call as the forward."""

    def __init__(self, p: Float[Tensor, "n v"]) -> None:
        """p: the target's distribution after each node [n, v]."""
        self._p = p

    @property
    def greedy(self) -> bool:
        return False

    def p(self, nodes: range) -> Tensor:
        return self._p[nodes.start : nodes.stop]


def draw(row: Float[Tensor, " v"], rng: Random) -> int:
    """Draw one token by one uniform of `rng` and return its id; row: weights of any positive sum [v]."""
    return int(draw_iid(row[None], rng.uniforms(1, 1)))


def explained(model: str, logits: Float[Tensor, "m v"]) -> NotFiniteError:
    """Return the error that says why no distribution can be made of these logits.

    model: the target's name.
    logits: before bias, penalties and processors [m, v].
    """
    if bool(((logits < math.inf).all(-1) & logits.isfinite().any(-1)).all()):
        return NotFiniteError("The logit bias or a logits processor gave NaN or +inf, or left no token to choose from.")
    return NotFiniteError(f"Model {model} gave NaN or infinite logits: check its weights and dtype.")


Walk = Callable[[TokenTree, NodeScores, Random], tuple[tuple[int, ...], int]]


@runtime_checkable
class PathVerifier(Protocol):
    """A rule that decides over a whole path at once, and so has a walk of its own."""

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: Random) -> tuple[tuple[int, ...], int]:
        """Return the accepted path and the id of the one token that follows it.

        tree: the tree to verify.
        probabilities: gives p after each node of a range, [m, v]; each call may cost time.
        rng: the sequence's source of randomness.

        Returns (the accepted nodes, the root first; the id after them).
        """
        ...


def walk_of(verifier: RowFunction) -> Walk:
    """Return the walk of a rule as a function of a tree, its scores and a source of randomness.

    It is the rule's own walk if it decides over whole paths, else `walk`, from node to node. Greedy scores need no
    rule: every p is one-hot, so that every rule is exact match (docs/theory.md, section 3). A root without a record of
    children needs none either: the token is drawn from p.

    verifier: the rule.
    """
    own = verifier.walk if isinstance(verifier, PathVerifier) else partial(walk, verify=verifier)

    def of_scores(tree: TokenTree, scores: NodeScores, rng: Random) -> tuple[tuple[int, ...], int]:
        if scores.greedy:
            return follow(tree, scores.argmax())
        if tree.siblings[0] is None:
            return (0,), scores.draw(0, rng)
        return own(tree, scores.p, rng=rng)

    return of_scores


def follow(tree: TokenTree, tokens: Seq[int]) -> tuple[tuple[int, ...], int]:
    """Walk a tree at temperature 0 and return the accepted path and the id of the token after it.

    tree: the tree to verify.
    tokens: per node the one id of probability 1 after it [n].
    """
    path = [0]
    while (child := tree.child(path[-1], tokens[path[-1]])) is not None:
        path.append(child)
    return tuple(path), tokens[path[-1]]


def walk(
    tree: TokenTree, probabilities: Probabilities, verify: RowFunction, rng: Random
) -> tuple[tuple[int, ...], int]:
    """Walk a tree from node to node and return the accepted path and the id of the one token that follows it.

    At each node one token is drawn from the row verify(p, siblings). If a child has this token the walk goes on there,
    else it stops. Accepted, corrected and bonus tokens are all drawn in this way. Children of opaque law, which have no
    q, are matched exactly: their row is p, which is the optimum for them.

    tree, probabilities, rng: as in `PathVerifier.walk`; p is computed for visited nodes only.
    verify: the rule.
    """
    path = [0]
    while True:
        node = path[-1]
        siblings = tree.siblings[node]
        p = probabilities(range(node, node + 1))[0]
        row = p if siblings is None or siblings.q is None else verify(p, siblings)
        token = draw(row, rng)
        child = tree.child(node, token)
        if child is None:
            return tuple(path), token
        path.append(child)
