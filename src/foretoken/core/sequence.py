"""One sequence in the making, and the record of one step."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from foretoken.core.random import Random
from foretoken.core.sampling import Sampling
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree

ANY_DEPTH = 2**31
Origin = Literal["plain", "accepted", "corrected", "bonus"]  # of one emitted token; `Step.origins` tells what they mean


@dataclass(frozen=True)
class Step:
    """What one target forward brought to one sequence.

    tokens: the ids emitted, bonus included. num_drafted: tree nodes besides the root. num_accepted: drafted tokens
    that were emitted (where the sequence ended inside the path, those before the end). last: the origin of the token
    after the accepted ones.
    """

    tokens: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    last: Origin = field(default="plain", compare=False)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Of each token: "accepted" as it was drafted; "corrected", the target's own token where the drafts after the
        accepted ones were rejected; "bonus", the target's own after a path that was accepted to its end; "plain" where
        nothing was drafted."""
        accepted: tuple[Origin, ...] = ("accepted",) * self.num_accepted
        return (*accepted, self.last)[: len(self.tokens)]


@dataclass(eq=False)
class Sequence:
    """Committed ids, and what decides the next ones. The last id is always the next tree's root.

    rng: a source of random numbers of this sequence alone, so its text does not depend on the batch around it.
    depth_limit: of all its trees; 0 is plain decoding.
    shows_logits: whether an observer reads the logits of its nodes, which some compiled calls do not hand out.
    floors: of the next tree, which is no deeper than there are floors: in a chain, a draft token at depth d has a next
        one if the product of q down to it is not below floors[d]. None: the tree is as its policy says. Whoever sets
        them does so before anything of the tree is drawn.
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
        return len(self.ids) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens it may still emit."""
        return self.max_new_tokens - self.num_new

    @property
    def depth_left(self) -> int:
        """Depth at which the next tree ends at the latest; its last token needs no draft."""
        return min(self.num_left - 1, self.depth_limit, ANY_DEPTH if self.floors is None else len(self.floors))

    @property
    def shapes_logits(self) -> bool:
        """Whether p is more than `sampling` makes of the logits."""
        return False

    @property
    def softmax_only(self) -> bool:
        """Whether p is softmax(logits / temperature) and no more, at temperature 0 one-hot at the largest logit."""
        if self.sampling.moves_scores or self.shapes_logits:
            return False
        return self.sampling.temperature == 0 or self.sampling.tempers_only

    def probabilities(self, logits: Float[Tensor, "m v"], suffixes: Iterable[Iterable[int]]) -> Float[Tensor, "m v"]:
        """p after the committed ids and each of m suffixes."""
        return self.sampling(logits, self._prefixes(suffixes), self.num_prompt)

    def scores(self, logits: Float[Tensor, "m v"], suffixes: Iterable[Iterable[int]]) -> Float[Tensor, "m v"]:
        """What p is made of: logits after bias, penalties and processors."""
        return self.sampling.scores(logits, self._prefixes(suffixes), self.num_prompt)

    def _prefixes(self, suffixes: Iterable[Iterable[int]]) -> Iterator[list[int]]:
        return (self.ids + list(suffix) for suffix in suffixes)

    def commit(self, tree: TokenTree, path: tuple[int, ...], token: int) -> Step:
        """Append the accepted tokens and the one after them; stop at the end of text or at the length limit."""
        tokens = [tree.tokens[node] for node in path[1:]] + [token]
        tokens = tokens[: self.num_left]
        for i, t in enumerate(tokens):
            if t in self.eos_ids:
                tokens = tokens[: i + 1]
                self.finished = True
                break
        self.ids.extend(tokens)
        self.finished |= self.num_left <= 0
        return Step(tuple(tokens), tree.num_drafted, min(len(tokens), len(path) - 1), origin_after(tree, path))


def origin_after(tree: TokenTree, path: tuple[int, ...]) -> Origin:
    """Of the token that follows the accepted path."""
    if path[-1] in tree.parents:
        return "corrected"
    return "bonus" if len(path) > 1 else "plain"
