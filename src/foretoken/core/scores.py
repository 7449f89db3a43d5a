"""What a target knows after scoring one token tree: the token distribution after each of its nodes."""

import math
from typing import Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.draws import draw_iid
from foretoken.core.errors import NotFiniteError
from foretoken.core.random import Random
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.softmax import likeliest
from foretoken.core.tree import TokenTree


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
        self._model, self._sequence, self._tree, self._logits = model, sequence, tree, logits

    @property
    def greedy(self) -> bool:
        return self._sequence.sampling.temperature == 0 and not self._sequence.sampling.reads_prefix

    def argmax(self) -> list[int]:
        try:
            return likeliest(self._sequence.scores(self._logits, ())).tolist()
        except NotFiniteError as error:
            raise explained(self._model, self._logits) from error

    # A plain annotation: one with a shape would be built anew at every call.
    def p(self, nodes: range) -> Tensor:
        rows = self._logits[nodes.start : nodes.stop]
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
