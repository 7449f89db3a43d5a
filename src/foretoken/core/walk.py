"""From the target's scores of a token tree to the tokens that are emitted: the scores, and the walk over them."""

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
from foretoken.core.tree import Siblings, TokenTree

Rule = Callable[[Float[Tensor, " v"], Siblings], Float[Tensor, " v"]]
Probabilities = Callable[[range], Float[Tensor, "m v"]]  # p after each node of a range


@runtime_checkable
class NodeScores(Protocol):
    """The scores of one tree's n nodes. Whatever speeds a backend up happens behind these four.

    All but `greedy` raise NotFiniteError, which names the model, where the logits they need are not finite.
    """

    @property
    def greedy(self) -> bool:
        """Whether `argmax` decides every token: at temperature 0, where nothing depends on the text before a node."""
        ...

    def argmax(self) -> list[int]:
        """The likeliest token after every node; for `greedy` scores only."""
        ...

    def p(self, nodes: range) -> Float[Tensor, "m v"]:
        """The target's distribution after each node of the range."""
        ...

    def draw(self, node: int, rng: Random) -> int:
        """One token from p(node), by one uniform of `rng`."""
        ...


class LogitScores:
    """The scores of one tree made of logits, when they are asked for."""

    def __init__(self, model: str, sequence: Sequence, tree: TokenTree, logits: Float[Tensor, "n v"]) -> None:
        """model: its name, for errors. logits: after every node of the tree."""
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
        return draw(self.p(range(node, node + 1))[0], rng)


class ReadyScores(LogitScores):
    """Scores whose p was made in the same call as the forward."""

    def __init__(self, p: Float[Tensor, "n v"]) -> None:
        self._p = p

    @property
    def greedy(self) -> bool:
        return False

    def p(self, nodes: range) -> Tensor:
        return self._p[nodes.start : nodes.stop]


def draw(row: Float[Tensor, " v"], rng: Random) -> int:
    """One token from a distribution, by one uniform of `rng`."""
    return int(draw_iid(row[None], rng.uniforms(1, 1)))


def explained(model: str, logits: Float[Tensor, "m v"]) -> NotFiniteError:
    """Why no distribution can be made of these logits."""
    if bool(((logits < math.inf).all(-1) & logits.isfinite().any(-1)).all()):
        return NotFiniteError("The logit bias or a logits processor left no token to choose from.")
    return NotFiniteError(f"Model {model} gave NaN or infinite logits: check its weights and dtype.")


Walk = Callable[[TokenTree, NodeScores, Random], tuple[tuple[int, ...], int]]


@runtime_checkable
class PathVerifier(Protocol):
    """A rule that decides over a whole path at once, and so walks the tree itself."""

    def walk(self, tree: TokenTree, probabilities: Probabilities, rng: Random) -> tuple[tuple[int, ...], int]:
        """As `walk` below."""
        ...


def walk_of(verifier: Rule) -> Walk:
    """The walk of a rule: its own where it decides over whole paths, else node by node.

    Greedy scores need no rule: every p is one-hot, so that every rule is exact match (docs/theory.md, section 3).
    Nor does a tree that is only its root: its token is drawn from p.
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
    """(path, the token after it) where tokens[i] is the one certain token after node i: the walk at temperature 0."""
    path = [0]
    while (child := tree.child(path[-1], tokens[path[-1]])) is not None:
        path.append(child)
    return tuple(path), tokens[path[-1]]


def walk(tree: TokenTree, probabilities: Probabilities, verify: Rule, rng: Random) -> tuple[tuple[int, ...], int]:
    """The accepted path (node indices, root first) and the one token that follows it.

    At each node the row verify(p, siblings) is drawn from once; if a child carries the token the walk descends, else
    it stops. Accepted, recovered and bonus tokens are this one case. `probabilities` is asked for visited nodes only.
    Children of opaque law, that is without a q, are matched exactly: row = p, which is the optimum for them.
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
