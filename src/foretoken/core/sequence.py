"""One text in the making (a sequence), and the record of one step."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from foretoken.core.random import Random
from foretoken.core.sampling import Sampling
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.kernel.sizes import ALL

ANY_DEPTH = 2**31
Origin = Literal["plain", "accepted", "corrected", "bonus"]  # of one emitted token; `Step.origins` explains them


@dataclass(frozen=True)
class Step:
    """What one step brought to one sequence.

    tokens: the emitted ids, the bonus token included.
    num_drafted: nodes of the tree besides the root.
    num_accepted: draft tokens that were emitted; where the text ended inside the accepted path, those up to the end.
    last: the origin of the token after the accepted ones.
    """

    tokens: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    last: Origin = field(default="plain", compare=False)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each token in `tokens`.

        "accepted": it is a draft token. "corrected": the target's own token in the place of draft tokens that were
        rejected. "bonus": the target's own token after a path that was accepted to its end. "plain": the target's own
        token where nothing was drafted.
        """
        accepted: tuple[Origin, ...] = ("accepted",) * self.num_accepted
        return (*accepted, self.last)[: len(self.tokens)]


@dataclass(eq=False)
class Sequence:
    """The committed ids of one text, and what decides the next ones. The last id is always the next tree's root.

    ids: the ids of the prompt and of the output so far.
    sampling: how logits become probabilities.
    rng: a source of randomness of this sequence alone, so that its text does not depend on the batch around it.
    max_new_tokens: the most tokens that are emitted.
    eos_ids: tokens that end the text; the one that does so is emitted.
    depth_limit: the largest depth of its trees; 0 is plain decoding.
    shows_logits: whether an observer reads the logits of its nodes, which some compiled calls do not hand out.
    num_prompt: the number of ids of the prompt.
    finished: whether the text has ended.
    floors: the least products of q in the next tree. The tree is no deeper than their number. In a chain, a draft token
        at depth d has a next one only if the product of q down to it is at least floors[d]. None: the tree policy alone
        decides. They must be set before anything of the tree is drawn.
    """

    ids: list[int]
    sampling: Sampling
    rng: Random
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    depth_limit: int = ANY_DEPTH
    shows_logits: bool = False
    num_prompt: int = field(init=False)
    finished: bool = False
    floors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.ids)

    @property
    def num_new(self) -> int:
        """The number of tokens emitted so far."""
        return len(self.ids) - self.num_prompt

    @property
    def num_left(self) -> int:
        """The number of tokens that may still be emitted."""
        return self.max_new_tokens - self.num_new

    @property
    def depth_left(self) -> int:
        """The largest depth of the next tree; the last token that may be emitted needs no draft."""
        return min(self.num_left - 1, self.depth_limit, ANY_DEPTH if self.floors is None else len(self.floors))

    @property
    def shapes_logits(self) -> bool:
        """Whether p depends on more than the logits and `sampling`; a subclass may say so."""
        return False

    @property
    def softmax_only(self) -> bool:
        """Whether p is softmax(logits / temperature) and no more, at temperature 0 one-hot at the largest logit."""
        if self.sampling.moves_scores or self.shapes_logits:
            return False
        return self.sampling.temperature == 0 or self.sampling.truncation == ALL

    def probabilities(self, logits: Float[Tensor, "m v"], suffixes: Iterable[Iterable[int]]) -> Float[Tensor, "m v"]:
        """Return p after the committed ids and each of m suffixes [m, v].

        logits: the model's scores of the next token, one row per suffix [m, v].
        suffixes: the ids that follow the committed ones, per row; read only where `sampling.reads_prefix`. After one
            that ends the text no token is drawn, so that penalties and processors leave such a row as it is.
        """
        return self.sampling(logits, self._prefixes(suffixes), self.num_prompt)

    def scores(self, logits: Float[Tensor, "m v"], suffixes: Iterable[Iterable[int]]) -> Float[Tensor, "m v"]:
        """Return the logits after bias, penalties and processors, before temperature [m, v].

        logits, suffixes: as in `probabilities`.
        """
        return self.sampling.scores(logits, self._prefixes(suffixes), self.num_prompt)

    def _prefixes(self, suffixes: Iterable[Iterable[int]]) -> Iterator[list[int] | None]:
        for suffix in suffixes:
            ids = list(suffix)
            yield None if self.eos_ids.intersection(ids) else self.ids + ids

    def commit(self, tree: TokenTree, path: tuple[int, ...], token: int) -> Step:
        """Append the tokens of a step; tree, path, token: as in `emitted`."""
        tokens = self.emitted(tree, path, token)
        self.ids.extend(tokens)
        self.finished |= tokens[-1] in self.eos_ids or self.num_left <= 0
        return Step(tokens, tree.num_drafted, min(len(tokens), len(path) - 1), origin_after(tree, path))

    def emitted(self, tree: TokenTree, path: tuple[int, ...], token: int) -> tuple[int, ...]:
        """Return the accepted tokens and the one after them, up to an end-of-text token or the length limit.

        tree: the tree that was verified.
        path: its accepted nodes, the root first.
        token: the id that follows them.
        """
        tokens = ([tree.tokens[node] for node in path[1:]] + [token])[: self.num_left]
        end = next((i for i, each in enumerate(tokens) if each in self.eos_ids), len(tokens))
        return tuple(tokens[: end + 1])


def origin_after(tree: TokenTree, path: tuple[int, ...]) -> Origin:
    """Return the origin of the token that follows the accepted path.

    tree: the tree that was verified.
    path: its accepted nodes, the root first.
    """
    if path[-1] in tree.parents:
        return "corrected"
    return "bonus" if len(path) > 1 else "plain"
